"""`mlax doctor`: what works on this machine, a line each, and what to do about what does not."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlax
from mlax._compilation_cache import compilation_cache_root, compilation_cache_size, start_compilation_cache
from mlax.cli._process import package_command

EXTRAS = {  # optional packages: what for, and what installs them
    "rich": ("progress bars", "rich"),
    "tyro": ("command-line options from a dataclass", "'mlax[train]'"),
    "matplotlib": ("plots", "'mlax[train]'"),
    "tensorboardX": ("TensorBoard", "'mlax[train]'"),
    "wandb": ("Weights & Biases", "'mlax[wandb]'"),
    "grain": ("Grain data loaders", "'mlax[grain]'"),
    "datasets": ("Hugging Face datasets", "'mlax[datasets]'"),
    "orbax-checkpoint": ("Orbax checkpoints", "'mlax[orbax]'"),
    "scikit-learn": ("the datasets of the examples", "'mlax[demo]'"),
}


class Finding(NamedTuple):
    """One line of the report."""

    ok: bool
    what: str
    details: str
    needed: bool = True  # whether mlax needs it

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'no' if self.needed else '-':4}{self.what:28}{self.details}"


def doctor() -> int:
    """Print all findings; the exit status is 1 if something that mlax needs does not work."""
    healthy = True
    for finding in _check_all():
        print(finding, flush=True)
        healthy = healthy and (finding.ok or not finding.needed)
    return 0 if healthy else 1


def _check_all() -> Iterator[Finding]:
    version = platform.python_version()
    yield Finding(True, f"Python {version}", sys.executable)
    yield Finding(True, f"mlax {mlax.__version__}", str(Path(mlax.__file__).parent))
    for name in ("jax", "jaxlib", "numpy", "optax"):
        yield _check_version(name) or Finding(False, name, f"not installed: pip install {name}")
    for name, (purpose, package) in EXTRAS.items():
        missing = Finding(False, name, f"optional, for {purpose}: pip install {package}", needed=False)
        yield _check_version(name, purpose) or missing
    try:
        import jax

        devices = jax.devices()
    except Exception as error:
        details = f"{str(error).splitlines()[0]}; install JAX for your accelerator: https://docs.jax.dev/installation"
        yield Finding(False, "devices", details)
        return
    for device in devices:
        yield _check_device(device)
    yield from _check_dtypes(devices[0])
    yield _attempt(
        "pinned_host memory",
        lambda: _check_pinned_host(devices[0]),
        "weights and optimizer state cannot be kept on the host",
    )
    yield _check_cudnn(devices[0])
    yield _check_cache()
    yield _check_two_processes()


def _check_version(name: str, purpose: str = "") -> Finding | None:
    """The version of a package; None if it is not installed."""
    try:
        return Finding(True, f"{name} {importlib.metadata.version(name)}", purpose)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_device(device: Any) -> Finding:
    """Multiply matrices on this device: check the result and the time."""
    import jax
    import jax.numpy as jnp

    from mlax.inspect import format_bytes

    what = f"{device.platform} {device.id}"
    try:
        x = jax.device_put(jnp.ones((512, 512), jnp.float32), device)
        product = jax.jit(lambda x: x @ x)
        correct = bool((product(x) == 512).all())
        start = time.perf_counter()
        product(x).block_until_ready()
        seconds = time.perf_counter() - start
    except Exception as error:
        return Finding(False, what, str(error).splitlines()[0])
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    memory = "" if limit is None else f"{format_bytes(limit)}, {format_bytes(stats.get('bytes_in_use', 0))} in use, "
    return Finding(correct, what, f"{device.device_kind}, {memory}512 x 512 matrix product in {1e3 * seconds:.2f} ms")


def _check_dtypes(device: Any) -> Iterator[Finding]:
    """Multiply matrices of each dtype; float64 has to be enabled in JAX."""
    import jax
    import jax.numpy as jnp

    for name in ("float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):

        def product(name: str = name) -> str:
            with jax.enable_x64(name == "float64"):
                x = jax.device_put(jnp.ones((32, 32), name), device)
                y = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32 if "8_" in name else None))(x)
                if not bool((y.astype(jnp.float32) == 32).all()):
                    raise ArithmeticError("the matrix product is wrong")
            return "enabled by jax.config.update('jax_enable_x64', True)" if name == "float64" else ""

        yield _attempt(name, product, "use another dtype on this device")


def _check_pinned_host(device: Any) -> str:
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    there = jax.device_put(jnp.arange(8), SingleDeviceSharding(device, memory_kind="pinned_host"))
    back = jax.device_put(there, SingleDeviceSharding(device, memory_kind=device.default_memory().kind))
    if not bool((back == jnp.arange(8)).all()):
        raise ArithmeticError("the values that were read back differ")
    return "weights and optimizer state can be kept on the host"


def _check_cudnn(device: Any) -> Finding:
    import jax
    import jax.numpy as jnp

    what = "cuDNN attention"
    if device.platform != "gpu":
        return Finding(False, what, "only on NVIDIA GPUs; attention uses XLA instead", needed=False)

    def attention() -> str:
        x = jax.device_put(jnp.ones((1, 64, 2, 64), jnp.bfloat16), device)
        jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="cudnn"))(x).block_until_ready()
        return "used for attention in bfloat16 and float16"

    return _attempt(what, attention, "attention uses XLA instead, which is slower")


def _attempt(what: str, check: Callable[[], str], otherwise: str) -> Finding:
    try:
        return Finding(True, what, check(), needed=False)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0][:100]
        return Finding(False, what, f"{otherwise} ({first})", needed=False)


def _check_cache() -> Finding:
    from mlax.inspect import format_bytes

    what, found = "compilation cache", start_compilation_cache()
    if found.problem:
        return Finding(False, what, f"{found.problem}; set XDG_CACHE_HOME to a writable folder", False)
    if found.folder is None:
        return Finding(True, what, "off, by jax_enable_compilation_cache", False)
    if not Path(found.folder).is_relative_to(compilation_cache_root()):
        return Finding(True, what, f"{found.folder}, as configured", False)
    count, size = compilation_cache_size()
    return Finding(True, what, f"{found.folder}, {count} programs, {format_bytes(size)}; mlax cache --clear", False)


_SCRIPT = """
import jax
from jax.experimental import multihost_utils
found = multihost_utils.process_allgather(jax.numpy.int32(jax.process_index() + 1))
assert found.sum() == 3, found
"""


def _check_two_processes() -> Finding:
    """Launch two processes on this machine that compute a sum together."""
    what = "two processes"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "two.py"
        script.write_text(_SCRIPT)
        arguments = ("launch", "-n", "2", "--restarts", "0", str(script))
        command = [sys.executable, *package_command("mlax.cli._main", "main", *arguments)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # two processes cannot share one GPU
        start = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        except subprocess.TimeoutExpired:
            return Finding(False, what, "no answer within 120 s; does a firewall block localhost?", needed=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        return Finding(False, what, f"`mlax launch` failed: {last[:200]}", needed=False)
    return Finding(True, what, f"started, exchanged data and exited in {time.monotonic() - start:.1f} s", needed=False)
