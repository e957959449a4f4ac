"""Records beside the persistent compilation cache: what one process found out, and the next need not."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxlib import version as jaxlib_version

from mlax._jax import cuda_versions


class Record(NamedTuple):
    """A file that begins with a key in full, which names it by its hash. One that begins otherwise is ignored."""

    file: Path
    key: bytes

    def read(self) -> bytes | None:
        """What follows the key; None if there is no such file."""
        with contextlib.suppress(OSError):
            if self.file.is_file():  # a pipe would block
                content = self.file.read_bytes()
                return content[len(self.key) :] if content.startswith(self.key) else None
        return None

    def write(self, content: bytes = b"") -> None:
        """Write it, unless the folder is missing, read-only or full."""
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=self.file.parent, delete=False) as written:
            try:
                written.write(self.key + content)
                written.close()
                os.replace(written.name, self.file)
            except OSError:
                os.unlink(written.name)
                raise

    def delete(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink()


def find_record(prefix: str, *key: str | None) -> Record | None:
    """The record of a key on the default GPU; the versions and options that all of them depend on are part of the key.

    None without a GPU or a persistent cache on a disk, or if a version or a part of the key is unknown, or for several
    processes, among which XLA may divide the work of compiling.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    if not folder or "://" in folder or jax.default_backend() != "gpu" or jax.process_count() > 1:
        return None
    versions, device = cuda_versions(), jax.devices()[0]
    if versions is None or None in key:
        return None
    described = {
        prefix: key,
        "versions": [jax.__version__, jaxlib_version.__version__, *map(str, versions), device.client.platform_version],
        "device": [str(getattr(device, name, "")) for name in ("device_kind", "compute_capability", "core_count")],
        "options": [os.environ.get("XLA_FLAGS", ""), config.jax_enable_x64],
    }
    text = json.dumps(described).encode()
    return Record(Path(folder, f"{prefix}-{hashlib.sha256(text).hexdigest()[:32]}"), text)


def hash_files(*files: Path) -> str | None:
    """A hash of the source files that a record depends on; None if one cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return None
