"""What was compiled once is found again on disk by the next process."""

import os
import sys
from pathlib import Path

OPTIONS = {
    "jax_compilation_cache_dir": None,  # filled in below
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def cache_folder() -> Path:
    """Where compiled programs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlax" / "compiled"


def keep_compiled() -> None:
    """Switch JAX's cache on, unless the user has set it: by JAX's own variables, so that JAX need not be loaded yet."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    options = OPTIONS | {"jax_compilation_cache_dir": str(cache_folder())}
    os.environ |= {name.upper(): str(value) for name, value in options.items()}
    if "jax" in sys.modules:
        import jax

        for name, value in options.items():
            jax.config.update(name, value)
