"""The persistent compilation cache: the folder where JAX keeps compiled programs, so that the next run starts faster.

Without JAX, so that `mlax` starts fast.
"""

import contextlib
import hashlib
import importlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAX_BYTES = 4 << 30  # of all programs; those used least recently are deleted
CHECKED = "checked"  # the file whose modification time is that of the last look for truncated programs
DEFAULTS = {  # of JAX, for what is not worth the write to a remote disk
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
EVERYTHING = {  # programs of milliseconds too: a model is initialized by dozens of them
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


class CompilationCache(NamedTuple):
    """Where compiled programs are kept, and if nowhere, why."""

    folder: str | None
    problem: str = ""  # why the folder of mlax cannot be used


def enable_compilation_cache() -> str | None:
    """Enable JAX's persistent compilation cache, which keeps programs on disk between runs; returns its folder.

    `train.fit` and `mlax train` call it. In a loop of your own, call it before `model.init`: a cold start compiles, and
    the next one reads what it compiled. The folder is ~/.cache/mlax/compiled, or in XDG_CACHE_HOME; `mlax cache` shows
    and `mlax cache --clear` deletes it. It stays below 4 GiB.

    A cache that you have configured, by `jax_compilation_cache_dir` or its environment variable, stays as it is. To
    have none, `jax.config.update("jax_enable_compilation_cache", False)`; the result is then None, as it is where the
    folder cannot be written. The setting holds for the whole process.

    >>> folder = train.enable_compilation_cache()
    """
    return start_compilation_cache().folder


def start_compilation_cache() -> CompilationCache:
    """Like `enable_compilation_cache`, with the reason if the folder cannot be used.

    By JAX's environment variables if JAX is not imported yet, which processes that this one starts inherit.
    """
    jax: Any = sys.modules.get("jax")
    if jax is None:
        if _is_refused(os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "")):
            return CompilationCache(None)
        configured = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    else:
        if not jax.config.jax_enable_compilation_cache:
            return CompilationCache(None)
        configured = jax.config.jax_compilation_cache_dir
    if configured is not None:
        return CompilationCache(configured or None)
    try:
        folder = _prepare_folder()
    except OSError as error:
        return CompilationCache(None, str(error))
    _never_raise()
    if jax is None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        for name, value in EVERYTHING.items():
            os.environ.setdefault(name.upper(), str(value))
    else:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        for name, value in EVERYTHING.items():
            if getattr(jax.config, name) == DEFAULTS[name]:
                jax.config.update(name, value)
    return CompilationCache(str(folder))


def compilation_cache_root() -> Path:
    """The folder with the programs for all kinds of machines that share it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlax" / "compiled"


def compilation_cache_size() -> tuple[int, int]:
    """How many programs there are in the folder of mlax, and its size in bytes."""
    files = list(_files(compilation_cache_root()))
    return sum(file.name.endswith("-cache") for file, _ in files), sum(info.st_size for _, info in files)


def clear_compilation_cache() -> None:
    """Delete all programs. A run in progress keeps those that it has loaded."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(compilation_cache_root())


def _prepare_folder() -> Path:
    """The folder for programs of this machine, created, writable, not too large, and without truncated programs."""
    folder = compilation_cache_root() / _machine()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(folder)
    with tempfile.NamedTemporaryFile(dir=folder):  # a disk may be read-only, or full
        pass
    _delete_truncated(folder)
    delete_oldest(compilation_cache_root(), MAX_BYTES)
    return folder


def _check_owner(folder: Path) -> None:
    """Raise if another user could write programs into the folder, which this process would run."""
    if not hasattr(os, "getuid"):
        return
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")


def _machine() -> str:
    """A name for CPUs with the same instructions, as a home folder may be shared by machines of several kinds."""
    described = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        kept = ("model name", "flags", "Features", "CPU part")
        lines = (line for line in file.read(1 << 14).split("\n\n")[0].splitlines() if line.startswith(kept))
        described = "\n".join(lines)
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def _delete_truncated(folder: Path) -> None:
    """Delete what a process that was killed, or a full disk, left half written since the last look.

    JAX would warn and recompile in each run, as it never replaces a program.
    """
    stamp = folder / CHECKED
    since = stamp.stat().st_mtime if stamp.exists() else 0.0
    now = tempfile.NamedTemporaryFile(dir=folder, delete=False)  # noqa: SIM115  # renamed below
    now.close()
    for file, info in _files(folder):
        if file.name.endswith("-cache") and info.st_mtime >= since and not _is_whole(file):
            with contextlib.suppress(OSError):
                file.unlink()
    os.replace(now.name, stamp)


def _is_whole(file: Path) -> bool:
    """Whether a program can be decompressed; JAX writes Zstandard if that is installed, else zlib."""
    try:
        data = file.read_bytes()
        if data.startswith(_ZSTANDARD):
            zstandard: Any = importlib.import_module("zstandard")
            zstandard.ZstdDecompressor().decompress(data)
        else:
            zlib.decompress(data)
    except (OSError, ImportError):  # gone, or not ours to judge
        return True
    except Exception:
        return False
    return True


def delete_oldest(root: Path, max_bytes: int) -> None:
    """If the programs are larger in all than `max_bytes`, delete those read or written longest ago, a quarter."""
    files = list(_files(root))
    size = sum(info.st_size for _, info in files)
    if size <= max_bytes:
        return
    for file, info in sorted(files, key=lambda each: max(each[1].st_atime, each[1].st_mtime)):
        if size <= max_bytes * 3 // 4:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        size -= info.st_size


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files in a folder and those below it, without those that another process deletes meanwhile."""
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                file = Path(path, name)
                yield file, file.stat()


def _never_raise() -> None:
    """Show JAX's warnings of programs that it cannot read or write, even if warnings are errors: it compiles then."""
    message = "Error (reading|writing) persistent compilation cache"
    warnings.filterwarnings("default", message, UserWarning)


def _is_refused(value: str) -> bool:
    """Whether an environment variable of JAX says no."""
    return value.lower() in ("0", "false", "no", "n", "f", "off")
