"""Rows of the layers in `place`, outside a mesh, where `Pipelined` is a `Repeat`."""

import jax
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, place
from tests.catalogue.core import BLOCK, repeated
from tests.catalogue.row import LayerRow
from tests.layers import Block


def linear(x, w):
    return x @ w["kernel"] + w["bias"]


def stage():
    return mlax.Residual(
        mlax.Series(
            norm=nn.LayerNorm(),
            up=nn.Linear(12),
            gelu=mlax.F(jax.nn.gelu),
            drop=nn.Dropout(0.5),
            down=nn.Linear(6),
        )
    )


ROWS = {
    "Stream": LayerRow(
        lambda dtype: place.Stream(mlax.Repeat(Block(6), 3)),
        (4, 6),
        ({f"stacked/{path}": (3, *shape) for path, shape in BLOCK.items()}, {"stacked/count/calls": (3,)}),
        repeated,
        needs_key=True,
        tolerance=3e-6,
        no_forward_mode="its backward pass fetches the weights again, by a rule for reverse mode",
        no_sums="the layers that it is made of have rows",
    ),
    "ShardingConstraint": LayerRow(
        lambda dtype: place.ShardingConstraint(nn.Linear(5), P("data")),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        linear,
        no_sums="the layers that it is made of have rows",
    ),
    "AllGatherWeights": LayerRow(
        lambda dtype: place.AllGatherWeights(nn.Linear(5), (("kernel", P(None, None)),)),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        linear,
        no_sums="the layers that it is made of have rows",
    ),
    "ExpertAllToAll": LayerRow(
        lambda dtype: place.ExpertAllToAll(nn.Linear(5), P(None, "expert"), P("expert")),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        linear,
        no_sums="the layers that it is made of have rows",
    ),
    "On": LayerRow(
        lambda dtype: place.On(nn.Linear(5), place.host),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        linear,
        no_exported_call="JAX loses memory spaces where it refines shapes",
        no_sums="the layers that it is made of have rows",
    ),
    "Pipelined": LayerRow(
        lambda dtype: place.Pipelined(mlax.Repeat(stage(), 4), stages=2, microbatches=2),
        (4, 6),
        ({f"stacked/layer/{path}": (4, *shape) for path, shape in BLOCK.items()}, {}),
        lambda x, w: repeated(x, {path.replace("layer/", ""): leaf for path, leaf in w.items()}, times=4),
        needs_key=True,
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
}
