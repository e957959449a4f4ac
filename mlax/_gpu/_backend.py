"""When kernels in Pallas (Mosaic GPU) compute an operation on an NVIDIA GPU, and what all of them share.

Each kernel has a plain form in the file that calls it, which it is tested against, and which computes what
`kernel_obstacle` refuses. The backend is read while tracing, as by `ops`.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from mlax._jax import cuda_branch, is_static
from mlax.core import check_is_dtype

THREADS = 128  # of a warpgroup
MIN_ROWS = 1024  # below which XLA is as fast


def compute_capability(device: Any = None) -> float | None:
    """The compute capability of a device, or of the first one; None if it is not an NVIDIA GPU."""
    device = jax.devices()[0] if device is None else device
    found = str(getattr(device, "compute_capability", ""))
    return float(found) if re.fullmatch(r"\d+\.\d+", found) else None


def is_hopper(device: Any = None) -> bool:
    """Whether a device is a GPU of Hopper, as the H200 is: kernels with matrix products are for its wgmma alone."""
    return 9.0 <= (compute_capability(device) or 0.0) < 10.0


def kernel_backend(x: Any, *, accum_dtype: Any = None) -> str:
    """What computes a layer norm, an RMS norm or a cross-entropy over the last axis of `x`, an array or a shape.

    "mosaic" is a kernel in Pallas that reads each row once, for NVIDIA GPUs from Hopper on, in programs of one device;
    "xla: ..." gives the reason why it is not used. Mixed precision sets `accum_dtype="float32"`, which it needs.

    >>> ops.kernel_backend(jnp.ones((4096, 768), "bfloat16"), accum_dtype="float32").split(":")[0]
    'xla'
    """
    check_is_dtype("kernel_backend", accum_dtype=accum_dtype)
    obstacle = kernel_obstacle(x, None if accum_dtype is None else jnp.dtype(accum_dtype))
    return "mosaic: the device and the shape allow it" if obstacle is None else f"xla: {obstacle}"


def kernel_obstacle(x: Any, accum_dtype: Any) -> str | None:
    """Why no kernel runs over the rows of `x` (..., d); None if one does."""
    if obstacle := device_obstacle(x):
        return obstacle
    if x.dtype != jnp.bfloat16 or accum_dtype != jnp.float32:
        return "kernels are for bfloat16 with accum_dtype='float32'"
    if not is_static(*x.shape) or x.size < MIN_ROWS * x.shape[-1]:
        return f"kernels are for {MIN_ROWS} rows or more"
    if x.shape[-1] % THREADS:
        return f"kernels are for rows of a multiple of {THREADS} elements"
    return None


def device_obstacle(*arrays: Any) -> str | None:
    """Why no kernel in Pallas takes these arrays, whatever their shapes; None if one may."""
    if (compute_capability() or 0.0) < 9.0:
        return "there is no NVIDIA GPU of compute capability 9.0 or later"
    if jax.__version_info__ < (0, 11):
        return "Mosaic GPU is measured with JAX 0.11 or later"
    if jax.device_count() > 1 or any(map(_has_mesh, arrays)):
        return "XLA cannot shard a kernel over several devices"
    return None


def prefers_kernels(x: Any) -> bool:
    """Whether kernels run in mixed precision over the rows of `x`, so that each pass over memory counts."""
    return kernel_obstacle(x, jnp.dtype(np.float32)) is None


def on_gpu(kernel: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> Any:
    """`kernel(*arrays)` where the program runs on a GPU, `plain(*arrays)` elsewhere and under `vmap`."""
    batched = custom_vmap(kernel)

    @batched.def_vmap
    def _(size: int, is_batched: Any, *arrays: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda has_axis: 0 if has_axis else None, tuple(is_batched))
        y = jax.vmap(plain, in_axes=axes, axis_size=size)(*arrays)
        return y, jax.tree.map(lambda _: True, y)

    return lax.platform_dependent(*arrays, cuda=cuda_branch(batched), default=plain)


def pallas() -> tuple[Any, Any]:
    """Pallas and its Mosaic GPU backend, imported at the first use, since that takes 0.1 s."""
    from jax.experimental import pallas
    from jax.experimental.pallas import mosaic_gpu

    return pallas, mosaic_gpu


def multiprocessors() -> int:
    return getattr(jax.devices()[0], "core_count", 132)


def _has_mesh(x: Any) -> bool:
    return not isinstance(x, jax.ShapeDtypeStruct) and not jax.typeof(x).sharding.mesh.empty
