"""WeightNorm: a layer whose kernels are learned as direction and magnitude."""

from dataclasses import KW_ONLY
from typing import ClassVar

from mlax.core import DType, Wrapper, flatten_paths, frozen, unflatten_paths
from mlax.nn._apart import apart
from mlax.nn._leaves import check_axis, check_present, leaves_named
from mlax.ops import output_norms, weight_norm


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
        kernels = leaves_named(self, x)
        trainables, non_trainables = self.layer.init(rng, x)
        leaves = flatten_paths(trainables)
        for path in kernels:
            kernel = leaves.pop(path)
            check_axis(self, path, kernel)
            leaves |= {f"{path}/direction": kernel, f"{path}/magnitude": apart(self._norms, kernel)}
        return unflatten_paths(leaves.items()), non_trainables

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        leaves = flatten_paths(trainables)
        for path in leaves_named(self, x):
            both = [f"{path}/direction", f"{path}/magnitude"]
            check_present(self, "trainables", both, leaves)
            direction, magnitude = map(leaves.pop, both)
            leaves[path] = weight_norm(direction, magnitude, axis=self.axis, accum_dtype=self.accum_dtype)
        return self.layer.fwd(
            x, unflatten_paths(leaves.items()), non_trainables, rng=rng, inference_mode=inference_mode
        )

    def _norms(self, kernel):
        return output_norms(kernel, axis=self.axis, accum_dtype=self.accum_dtype).astype(kernel.dtype)
