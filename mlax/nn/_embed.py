"""Embed: a learned vector for each entry of a vocabulary."""

from dataclasses import KW_ONLY

from mlax import ops
from mlax._jax import named_key
from mlax.core import DType, Initializer, Layer, Normal, Size, frozen


@frozen
class Embed(Layer):
    """Look up a learned vector for each whole number: (...) integers to (..., width), in the table's dtype.

    Trainables: table (vocabulary, width). A number outside of the vocabulary gives NaN.
    """

    vocabulary: Size
    width: Size
    _: KW_ONLY
    table_init: Initializer = Normal(0.02)
    param_dtype: DType = "float32"  # the input has no floating dtype to follow

    def init(self, rng, x):
        if x.dtype.kind not in "iu":
            raise TypeError(f"{self}: the input is {x.dtype}, but must be whole numbers; cast it to int32.")
        return {
            "table": self.table_init(named_key(rng, "table"), (self.vocabulary, self.width), self.param_dtype)
        }, None

    def splits(self, number):
        return {"table": 0}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.embed(x, trainables["table"]), non_trainables
