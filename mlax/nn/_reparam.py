"""WeightNorm and SpectralNorm: layers whose kernels are computed from other variables."""

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mlax import ops
from mlax._jax import named_key
from mlax.core import (
    DType,
    Normal,
    Wrapper,
    find_layers,
    flatten_paths,
    frozen,
    short_repr,
    stacked_axes,
    unflatten_paths,
    variable_shapes,
)
from mlax.nn._conv import Convolution
from mlax.nn._variables import check_state_dtype


@frozen
class WeightNorm(Wrapper):
    """Weight normalization: each kernel of `layer` is `magnitude * direction / norm(direction)`.

    The norm is over all axes but `axis`, by default that of the outputs of each kernel, as its layer and layout have
    it; each layer of a `Repeat` has separate norms. Trainables: those of `layer`, with `kernel/direction`, of the
    kernel's shape, and `kernel/magnitude`, of its size along `axis` and 1 elsewhere, in place of every leaf named
    `kernel` (or `leaf`). Both are initialized so that the kernel is that of `layer`.
    https://arxiv.org/abs/1602.07868, equation 2.

    >>> layer, x = nn.WeightNorm(nn.Linear(32)), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> mlax.paths(trainables)
    ('bias', 'kernel/direction', 'kernel/magnitude')
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    leaf: str = "kernel"  # the name of the kernel
    axis: int | None = None  # None: of the outputs
    accum_dtype: DType = None  # of the norm; None: the kernel's

    def init(self, rng, x):
        kernels = _find_leaf_paths(self, x)
        trainables, non_trainables = self.layer.init(rng, x)
        leaves = flatten_paths(trainables)
        for path in kernels:
            kernel = leaves.pop(path)
            norms = _map_stack(path, functools.partial(self._norms, axis=_kernel_axis(self, path, kernel)))
            leaves |= {f"{path}/direction": kernel, f"{path}/magnitude": _call_unfused(norms, kernel)}
        return unflatten_paths(leaves.items()), non_trainables

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        leaves = flatten_paths(trainables)
        for path in _find_leaf_paths(self, x):
            both = [f"{path}/direction", f"{path}/magnitude"]
            _check_present(self, "trainables", both, leaves)
            direction, magnitude = map(leaves.pop, both)
            options = {"axis": _kernel_axis(self, path, direction), "accum_dtype": self.accum_dtype}
            leaves[path] = _map_stack(path, functools.partial(ops.weight_norm, **options))(direction, magnitude)
        return self.layer.fwd(
            x, unflatten_paths(leaves.items()), non_trainables, rng=rng, inference_mode=inference_mode
        )

    def _norms(self, kernel, axis):
        return ops.output_norms(kernel, axis=axis, accum_dtype=self.accum_dtype).astype(kernel.dtype)


@frozen
class SpectralNorm(Wrapper):
    """Spectral normalization: each kernel of `layer` is divided by its largest singular value, by power iteration.

    The matrix has `axis`, by default that of the outputs of each kernel, as its layer and layout have it, as its rows,
    and all others flattened; each layer of a `Repeat` has separate matrices. Each training step first runs
    `iterations`, and `init` runs `first_iterations`; gradients treat the singular vectors as constants.
    https://arxiv.org/abs/1802.05957, equation 8 and algorithm 1.

    Trainables: those of `layer`. Non-trainables: those of `layer`, and for every leaf named `kernel` (or `leaf`) its
    singular vectors, `kernel/left` and `kernel/right`, in `accum_dtype`.

    >>> layer, x = nn.SpectralNorm(nn.Conv(16, 3)), jnp.ones((8, 32, 32, 3))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> y, non_trainables = layer.fwd(x, trainables, non_trainables)
    >>> y.shape
    (8, 32, 32, 16)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    leaf: str = "kernel"  # the name of the kernel
    axis: int | None = None  # None: of the outputs
    iterations: int = 1  # of the power method, in each training step
    first_iterations: int = 15  # of the power method, in init
    precision: lax.PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # of singular vectors and values; None: the kernel's

    def __post_init__(self):
        if self.iterations < 1 or self.first_iterations < 1:
            raise ValueError(
                f"SpectralNorm: iterations is {self.iterations} and first_iterations {self.first_iterations}, "
                "but both must be at least 1."
            )

    def init(self, rng, x):
        kernels = _find_leaf_paths(self, x)
        trainables, non_trainables = self.layer.init(rng, x)
        state = flatten_paths(non_trainables)
        for path in kernels:
            kernel = flatten_paths(trainables)[path]
            axis, number = _kernel_axis(self, path, kernel), stacked_axes(path)
            stack, own = kernel.shape[:number], kernel.shape[number:]
            sizes = {f"{path}/left": own[axis], f"{path}/right": math.prod(own) // max(own[axis], 1)}
            dtype = self.accum_dtype or kernel.dtype
            draws = [Normal(1.0)(named_key(rng, name), (*stack, size), dtype) for name, size in sizes.items()]
            vectors = _map_stack(path, functools.partial(self._init_vectors, axis))
            state |= zip(sizes, _call_unfused(vectors, kernel, *draws), strict=True)
        return trainables, unflatten_paths(state.items())

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        leaves, state, new_vectors = flatten_paths(trainables), flatten_paths(non_trainables), {}
        for path in _find_leaf_paths(self, x):
            names = [f"{path}/left", f"{path}/right"]
            _check_present(self, "trainables", [path], leaves)
            _check_present(self, "non_trainables", names, state)
            vectors = {name: state.pop(name) for name in names}
            check_state_dtype(self, vectors, self.accum_dtype or leaves[path].dtype)
            axis = _kernel_axis(self, path, leaves[path])
            if not inference_mode:
                iterate = _map_stack(path, functools.partial(self._iterate, axis, self.iterations))
                vectors = dict(zip(names, iterate(leaves[path], *vectors.values()), strict=True))
            divide = functools.partial(ops.spectral_norm, axis=axis, precision=self.precision)
            leaves[path] = _map_stack(path, divide)(leaves[path], *vectors.values())
            new_vectors |= vectors
        y, inner = self.layer.fwd(
            x, unflatten_paths(leaves.items()), unflatten_paths(state.items()), rng=rng, inference_mode=inference_mode
        )
        return y, unflatten_paths({**flatten_paths(inner), **new_vectors}.items())

    def _init_vectors(self, axis, kernel, left, right):
        return self._iterate(axis, self.first_iterations, kernel, ops.l2_normalize(left), ops.l2_normalize(right))

    def _iterate(self, axis, times, kernel, left, right):
        return ops.power_iteration(kernel, left, right, axis=axis, times=times, precision=self.precision)


def _find_leaf_paths(wrapper: Any, x: Any) -> list[str]:
    """The paths of the layer's trainables named `wrapper.leaf`."""
    paths = flatten_paths(variable_shapes(wrapper.layer, x)[0])
    found = [path for path in paths if path.split("/")[-1] == wrapper.leaf]
    if not found:
        raise ValueError(
            f"{short_repr(wrapper)}: no leaf of the layer is named {wrapper.leaf!r}; it has "
            f"{', '.join(paths) or 'none'}. Pass the name of one of them as leaf=."
        )
    return found


def _kernel_axis(wrapper: Any, path: str, leaf: Any) -> int:
    """The axis that is left out of the norm, of one layer's kernel: `wrapper.axis`, or that of the outputs."""
    if wrapper.axis is None:
        owner = path.rpartition("/")[0]
        convolutions = dict(find_layers(wrapper.layer, Convolution))
        return convolutions[owner].kernel_output_axis if owner in convolutions else -1
    rank = leaf.ndim - stacked_axes(path)
    if not -rank <= wrapper.axis < rank:
        raise ValueError(f"{short_repr(wrapper)}: {path} has the shape {leaf.shape}, which has no axis {wrapper.axis}.")
    return wrapper.axis


def _map_stack(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one layer's variables, mapped over the layers that the leaf at `path` stacks."""
    for _ in range(stacked_axes(path)):
        function = jax.vmap(function)
    return function


def _check_present(wrapper: Any, what: str, wanted: list[str], leaves: dict[str, Any]) -> None:
    missing = [path for path in wanted if path not in leaves]
    if missing:
        raise ValueError(
            f"{short_repr(wrapper)}: {what} lacks {', '.join(missing)}. Pass what init returned for this layer."
        )


def _call_unfused(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, not fused with the computation of its arguments, so that `init` is bitwise equal under jit.

    XLA fuses nothing into a conditional whose condition it cannot see.
    """

    def unreachable(*args: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, function(*args))

    return lax.cond(lax.optimization_barrier(True), function, unreachable, *args)
