"""Rows of the layers in `place`."""

from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, place
from tests.catalogue.core import BLOCK, affine, repeated
from tests.catalogue.row import Row
from tests.layers import Block

ROWS = {
    "Stream": Row(
        lambda dtype: place.Stream(mlax.Repeat(Block(6), 3)),
        (4, 6),
        ({path: (3, *shape) for path, shape in BLOCK.items()}, {"count/calls": (3,)}),
        repeated,
        needs_key=True,
        tolerance=3e-6,
    ),
    "ShardingConstraint": Row(
        lambda dtype: place.ShardingConstraint(nn.Linear(5), P("data")),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: affine(x, {f"/{name}": leaf for name, leaf in w.items()}, ""),
    ),
    "AllGatherWeights": Row(
        lambda dtype: place.AllGatherWeights(nn.Linear(5), (("kernel", P(None, None)),)),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: affine(x, {f"/{name}": leaf for name, leaf in w.items()}, ""),
    ),
    "ExpertAllToAll": Row(
        lambda dtype: place.ExpertAllToAll(nn.Linear(5), P(None, "expert"), P("expert")),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: affine(x, {f"/{name}": leaf for name, leaf in w.items()}, ""),
    ),
    "On": Row(
        lambda dtype: place.On(nn.Linear(5), place.host),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: affine(x, {f"/{name}": leaf for name, leaf in w.items()}, ""),
    ),
}
