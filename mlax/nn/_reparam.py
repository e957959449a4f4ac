"""WeightNorm and SpectralNorm: layers whose kernels are computed from other variables."""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import named_key
from mlax.core import DType, Normal, Wrapper, flatten_paths, frozen, short_repr, unflatten_paths, variable_shapes
from mlax.nn._variables import check_state_dtype
from mlax.ops import l2_normalize, output_norms, power_iteration, spectral_norm, weight_norm


@frozen
class WeightNorm(Wrapper):
    """Compute `layer` with each kernel made from two variables, `magnitude * direction / norm(direction)`.

    The norm is taken for each place along `axis`, the kernel's axis of outputs: -1 for Linear, 0 for Conv.
    Trainables: those of `layer`, with `kernel/direction`, of the shape of the kernel, and `kernel/magnitude`, of size 1
    but along `axis`, in the place of every leaf called `kernel` (or as `leaf` says). Both start from the kernel that
    `layer` would start with. https://arxiv.org/abs/1602.07868, equation 2.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    leaf: str = "kernel"
    axis: int = -1
    accum_dtype: DType = None  # of the norm; None: the kernel's own

    def init(self, rng, x):
        kernels = find_leaf_paths(self, x)
        trainables, non_trainables = self.layer.init(rng, x)
        leaves = flatten_paths(trainables)
        for path in kernels:
            kernel = leaves.pop(path)
            check_axis(self, path, kernel)
            leaves |= {f"{path}/direction": kernel, f"{path}/magnitude": call_unfused(self._norms, kernel)}
        return unflatten_paths(leaves.items()), non_trainables

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        leaves = flatten_paths(trainables)
        for path in find_leaf_paths(self, x):
            both = [f"{path}/direction", f"{path}/magnitude"]
            check_present(self, "trainables", both, leaves)
            direction, magnitude = map(leaves.pop, both)
            leaves[path] = weight_norm(direction, magnitude, axis=self.axis, accum_dtype=self.accum_dtype)
        return self.layer.fwd(
            x, unflatten_paths(leaves.items()), non_trainables, rng=rng, inference_mode=inference_mode
        )

    def _norms(self, kernel):
        return output_norms(kernel, axis=self.axis, accum_dtype=self.accum_dtype).astype(kernel.dtype)


@frozen
class SpectralNorm(Wrapper):
    """Compute `layer` with each kernel divided by its largest singular value, as power iteration knows it.

    The matrix has the kernel's axis of outputs, `axis`, as its rows and all others flattened: -1 for Linear, 0 for
    Conv. Each training step first runs `iterations`, and `init` runs `first_iterations`; to gradients the singular
    vectors are constants. https://arxiv.org/abs/1802.05957, equation 8 and algorithm 1.

    Trainables: those of `layer`. Non-trainables: those of `layer`, and for every leaf called `kernel` (or as `leaf`
    says) its singular vectors, `kernel/left` and `kernel/right`, in `accum_dtype`.
    """

    takes_statistics: ClassVar[bool] = True

    _: KW_ONLY
    leaf: str = "kernel"
    axis: int = -1
    iterations: int = 1
    first_iterations: int = 15
    precision: lax.PrecisionLike = None
    accum_dtype: DType = None  # of singular vectors and values; None: the kernel's own

    def __post_init__(self):
        if self.iterations < 1 or self.first_iterations < 1:
            raise ValueError(
                f"SpectralNorm: iterations is {self.iterations} and first_iterations {self.first_iterations}, "
                "but both must be at least 1."
            )

    def init(self, rng, x):
        kernels = find_leaf_paths(self, x)
        trainables, non_trainables = self.layer.init(rng, x)
        state = flatten_paths(non_trainables)
        for path in kernels:
            kernel = flatten_paths(trainables)[path]
            check_axis(self, path, kernel)
            rows, dtype = kernel.shape[self.axis], self.accum_dtype or kernel.dtype
            sizes = {f"{path}/left": rows, f"{path}/right": kernel.size // max(rows, 1)}
            draws = [Normal(1.0)(named_key(rng, name), (size,), dtype) for name, size in sizes.items()]
            state |= zip(sizes, call_unfused(self._first, kernel, *draws), strict=True)
        return trainables, unflatten_paths(state.items())

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        leaves, state, own = flatten_paths(trainables), flatten_paths(non_trainables), {}
        for path in find_leaf_paths(self, x):
            names = [f"{path}/left", f"{path}/right"]
            check_present(self, "trainables", [path], leaves)
            check_present(self, "non_trainables", names, state)
            vectors = {name: state.pop(name) for name in names}
            check_state_dtype(self, vectors, self.accum_dtype or leaves[path].dtype)
            if not inference_mode:
                vectors = dict(zip(names, self._nearer(leaves[path], vectors.values(), self.iterations), strict=True))
            leaves[path] = spectral_norm(leaves[path], *vectors.values(), axis=self.axis, precision=self.precision)
            own |= vectors
        y, inner = self.layer.fwd(
            x, unflatten_paths(leaves.items()), unflatten_paths(state.items()), rng=rng, inference_mode=inference_mode
        )
        return y, unflatten_paths({**flatten_paths(inner), **own}.items())

    def _first(self, kernel, left, right):
        return self._nearer(kernel, (l2_normalize(left), l2_normalize(right)), self.first_iterations)

    def _nearer(self, kernel, vectors, times):
        return power_iteration(kernel, *vectors, axis=self.axis, times=times, precision=self.precision)


def find_leaf_paths(wrapper: Any, x: Any) -> list[str]:
    """The paths of the trainables called `wrapper.leaf` in the layer inside; none at all is an error."""
    paths = flatten_paths(variable_shapes(wrapper.layer, x)[0])
    found = [path for path in paths if path.split("/")[-1] == wrapper.leaf]
    if not found:
        raise ValueError(
            f"{short_repr(wrapper)}: no leaf of the layer is called {wrapper.leaf!r}; it has "
            f"{', '.join(paths) or 'none'}. Pass the name of one of them as leaf=."
        )
    return found


def check_axis(wrapper: Any, path: str, leaf: Any) -> None:
    """Refuse a leaf that has no axis `wrapper.axis`."""
    if not -leaf.ndim <= wrapper.axis < leaf.ndim:
        raise ValueError(f"{short_repr(wrapper)}: {path} has the shape {leaf.shape}, which has no axis {wrapper.axis}.")


def check_present(wrapper: Any, what: str, wanted: list[str], leaves: dict[str, Any]) -> None:
    """Refuse variables that lack one of the paths that are wanted."""
    missing = [path for path in wanted if path not in leaves]
    if missing:
        raise ValueError(
            f"{short_repr(wrapper)}: {what} lacks {', '.join(missing)}. Pass what init returned for this layer."
        )


def call_unfused(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, to the same bits under any jit: fused with what makes its arguments, its sums would differ.

    For `init`. A conditional whose condition XLA cannot see is never fused with what is around it.
    """

    def never(*args: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, function(*args))

    return lax.cond(lax.optimization_barrier(True), function, never, *args)
