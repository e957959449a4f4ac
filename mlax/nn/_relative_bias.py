"""RelativeBias: a learned number for each head and each bucket of distances between query and key."""

from dataclasses import KW_ONLY

from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Normal, Size, frozen
from mlax.ops import relative_bias


@frozen
class RelativeBias(Layer):
    """Look up a learned score for the distance between each query and key: T5's relative positions.

    A pair of positions, whole numbers (b, t) and (b, s), to a bias (b, heads, t, s), in the table's dtype.
    Trainables: table (buckets, heads). https://arxiv.org/abs/1910.10683, section 2.1.
    """

    heads: Size
    _: KW_ONLY
    buckets: Size = 32
    farthest: int = 128  # distance from which all share the last bucket
    bidirectional: bool = True  # False for decoders: keys ahead count as distance 0
    table_init: Initializer = Normal(0.02)
    param_dtype: DType = "float32"  # the input has no floating dtype to follow

    def init(self, rng, x):
        if not isinstance(x, tuple) or len(x) != 2 or any(each.ndim != 2 or each.dtype.kind not in "iu" for each in x):
            raise TypeError(
                f"{self}: the input is {x}, but must be a pair of whole numbers, (batch, t) and (batch, s)."
            )
        table = self.table_init(named_key(rng, "table"), (self.buckets, self.heads), self.param_dtype)
        return {"table": table}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        queries, keys = x
        y = relative_bias(queries, keys, trainables["table"], bidirectional=self.bidirectional, farthest=self.farthest)
        return y, non_trainables
