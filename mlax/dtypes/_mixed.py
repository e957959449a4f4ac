"""Mixed: the boundary of mixed precision, the one place where dtypes change."""

from dataclasses import KW_ONLY

from mlax.core import DType, Wrapper, frozen
from mlax.dtypes._cast import cast


@frozen
class Mixed(Wrapper):
    """Compute `layer` in another dtype than the one its weights are stored in.

    The floating inputs and trainables are cast to `compute` on the way in, and floating outputs to `output` on
    the way out (None: left as they are). Trainables are made and stored in `param_dtype`. State is not cast:
    running statistics would not survive a narrow dtype, so a layer with state says itself what it keeps it in.
    """

    _: KW_ONLY
    compute: DType = "bfloat16"
    output: DType = "float32"
    param_dtype: DType = "float32"

    def init(self, rng, x):
        return self.layer.init(rng, cast(x, self.param_dtype))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, non_trainables = self.layer.fwd(
            cast(x, self.compute),
            cast(trainables, self.compute),
            non_trainables,
            rng=rng,
            inference_mode=inference_mode,
        )
        return cast(y, self.output), non_trainables
