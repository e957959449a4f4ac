"""SpectralNorm: a layer whose kernels have the largest singular value 1."""

from dataclasses import KW_ONLY
from typing import ClassVar

from jax import lax

from mlax._jax import named_key
from mlax.core import DType, Normal, Wrapper, flatten_paths, frozen, unflatten_paths
from mlax.nn._apart import apart
from mlax.nn._leaves import check_axis, check_present, leaves_named
from mlax.nn._state import check_state_dtype
from mlax.ops import power_iteration, spectral_norm, unit


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
        kernels = leaves_named(self, x)
        trainables, non_trainables = self.layer.init(rng, x)
        state = flatten_paths(non_trainables)
        for path in kernels:
            kernel = flatten_paths(trainables)[path]
            check_axis(self, path, kernel)
            rows, dtype = kernel.shape[self.axis], self.accum_dtype or kernel.dtype
            sizes = {f"{path}/left": rows, f"{path}/right": kernel.size // max(rows, 1)}
            draws = [Normal(1.0)(named_key(rng, name), (size,), dtype) for name, size in sizes.items()]
            state |= zip(sizes, apart(self._first, kernel, *draws), strict=True)
        return trainables, unflatten_paths(state.items())

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        leaves, state, own = flatten_paths(trainables), flatten_paths(non_trainables), {}
        for path in leaves_named(self, x):
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
        return self._nearer(kernel, (unit(left), unit(right)), self.first_iterations)

    def _nearer(self, kernel, vectors, times):
        return power_iteration(kernel, *vectors, axis=self.axis, times=times, precision=self.precision)
