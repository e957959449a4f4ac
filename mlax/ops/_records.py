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
    """A file that begins with a text, which says in full what it is about. With any other text it says nothing."""

    file: Path
    text: bytes

    def read(self) -> bytes | None:
        """What follows the text; None if there is no such file."""
        with contextlib.suppress(OSError):
            if self.file.is_file():  # a pipe would block
                content = self.file.read_bytes()
                return content[len(self.text) :] if content.startswith(self.text) else None
        return None

    def write(self, content: bytes = b"") -> None:
        """Write it, unless the folder is missing, read-only or full."""
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=self.file.parent) as folder:
            written = Path(folder, self.file.name)
            written.write_bytes(self.text + content)
            os.replace(written, self.file)

    def delete(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink()


def find_record(kind: str, *subject: str | None) -> Record | None:
    """The record of a subject on the default GPU, with the versions and options that all of them depend on.

    None without a GPU or a persistent cache on a disk, or if a version or a part of the subject is unknown, or for
    several processes, among which XLA may divide the work of compiling.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    if not folder or "://" in folder or jax.default_backend() != "gpu" or jax.process_count() > 1:
        return None
    versions, device = cuda_versions(), jax.devices()[0]
    if versions is None or None in subject:
        return None
    described = {
        kind: subject,
        "versions": [jax.__version__, jaxlib_version.__version__, *map(str, versions), device.client.platform_version],
        "device": [str(getattr(device, name, "")) for name in ("device_kind", "compute_capability", "core_count")],
        "options": [os.environ.get("XLA_FLAGS", ""), config.jax_enable_x64],
    }
    text = json.dumps(described).encode()
    return Record(Path(folder, f"{kind}-{hashlib.sha256(text).hexdigest()[:32]}"), text)


def hash_files(*files: Path) -> str | None:
    """A hash of the source files that a record depends on; None if one cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return None
