"""The row of `Pipelined`, which is a `Repeat` as long as no mesh is set."""

import jax

import mlax
from mlax import nn, place
from tests.catalogue.core import gelu, normed
from tests.catalogue.row import Row


def blocks(x, w):
    w = {path.removeprefix("layer/"): leaf for path, leaf in w.items()}
    for time in range(4):
        h = normed(x, w["norm/scale"][time], w["norm/shift"][time])
        x = x + gelu(h @ w["up/kernel"][time] + w["up/bias"][time]) @ w["down/kernel"][time] + w["down/bias"][time]
    return x


def block():
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
    "Pipelined": Row(
        lambda dtype: place.Pipelined(mlax.Repeat(block(), 4), stages=2, microbatches=2),
        (4, 6),
        (
            {
                "layer/norm/scale": (4, 6),
                "layer/norm/shift": (4, 6),
                "layer/up/kernel": (4, 6, 12),
                "layer/up/bias": (4, 12),
                "layer/down/kernel": (4, 12, 6),
                "layer/down/bias": (4, 6),
            },
            {},
        ),
        blocks,
        needs_key=True,
        tolerance=3e-6,
    ),
}
