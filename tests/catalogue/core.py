"""Rows of the combinators in `core`, and of `Mixed`, which wraps like them."""

import numpy as np

import mlax
from mlax import dtypes, nn
from tests.catalogue.row import LayerRow
from tests.layers import Block, Cell, Count, Modulated, tanh


def affine(x, w, name):
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def normed(x, scale=1.0, shift=0.0, axes=-1):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5) * scale + shift


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def elman(x, w):
    h, out = np.zeros((x.shape[0], 5)), []
    for t in range(x.shape[1]):
        h = np.tanh(x[:, t] @ w["kernel"] + h @ w["recurrent"] + w["bias"])
        out.append(h)
    return np.stack(out, 1)


def block(x, w):
    h = normed(x, w["norm/scale"], w["norm/shift"])
    return x + gelu(h @ w["up/kernel"] + w["up/bias"]) @ w["down/kernel"] + w["down/bias"]


def repeated(x, w, times=3):
    for time in range(times):
        x = block(x, {path.removeprefix("stacked/"): leaf[time] for path, leaf in w.items()})
    return x


def modulated(inputs, w):
    x, t = inputs
    return x + affine(normed(x, w["norm/scale"], w["norm/shift"]) * affine(t, w, "scale"), w, "down")


def repeated_modulated(inputs, w, times=3):
    x, t = inputs
    for time in range(times):
        x = modulated((x, t), {path.removeprefix("stacked/"): leaf[time] for path, leaf in w.items()})
    return x


def chained(inputs, w):
    x, t = inputs
    for layer in ("layers/0/", "layers/1/"):
        x = modulated((x, t), {path.removeprefix(layer): leaf for path, leaf in w.items() if path.startswith(layer)})
    return x


MODULATED = {
    "norm/scale": (6,),
    "norm/shift": (6,),
    "scale/kernel": (3, 6),
    "scale/bias": (6,),
    "down/kernel": (6, 6),
    "down/bias": (6,),
}

BLOCK = {
    "norm/scale": (6,),
    "norm/shift": (6,),
    "up/kernel": (6, 12),
    "up/bias": (12,),
    "down/kernel": (12, 6),
    "down/bias": (6,),
}


def repeat(mode, variant=False):
    return LayerRow(
        lambda dtype: mlax.Repeat(Block(6), 3, mode=mode),
        (4, 6),
        ({f"stacked/{path}": (3, *shape) for path, shape in BLOCK.items()}, {"stacked/count/calls": (3,)}),
        repeated,
        needs_key=True,
        tolerance=3e-6,
        variant=variant,
        no_sums="the layers that it is made of have rows",
    )


ROWS = {
    "Series": LayerRow(
        lambda dtype: mlax.Series(nn.Linear(8), mlax.F(tanh), Count(), drop=nn.Dropout(0.5), head=nn.Linear(3)),
        (4, 6),
        (
            {"linear_0/kernel": (6, 8), "linear_0/bias": (8,), "head/kernel": (8, 3), "head/bias": (3,)},
            {"count_0/calls": ()},
        ),
        lambda x, w: affine(np.tanh(affine(x, w, "linear_0")), w, "head"),
        needs_key=True,
        no_sums="the layers that it is made of have rows",
    ),
    "Parallel": LayerRow(
        lambda dtype: mlax.Parallel(nn.Linear(2), mlax.F(tanh), twice=nn.Linear(3)),
        (4, 6),
        ({"linear_0/kernel": (6, 2), "linear_0/bias": (2,), "twice/kernel": (6, 3), "twice/bias": (3,)}, {}),
        lambda x, w: (affine(x, w, "linear_0"), np.tanh(x), affine(x, w, "twice")),
        no_sums="the layers that it is made of have rows",
    ),
    "Residual": LayerRow(
        lambda dtype: mlax.Residual(nn.Linear(5), shortcut=nn.Linear(5, bias=False)),
        (4, 6),
        ({"layer/kernel": (6, 5), "layer/bias": (5,), "shortcut/kernel": (6, 5)}, {}),
        lambda x, w: affine(x, w, "layer") + x @ w["shortcut/kernel"],
        no_sums="the layers that it is made of have rows",
    ),
    "F": LayerRow(lambda dtype: mlax.F(tanh), (4, 6), ({}, {}), lambda x, w: np.tanh(x), no_sums="it sums nothing"),
    "Repeat": repeat("scan"),
    "Repeat remat": repeat("remat", variant=True),
    "Repeat unroll": repeat("unroll", variant=True),
    "Repeat of several inputs": LayerRow(
        lambda dtype: mlax.Repeat(Modulated(6), 3),
        ((4, 6), (4, 3)),
        ({f"stacked/{path}": (3, *shape) for path, shape in MODULATED.items()}, {"stacked/count/calls": (3,)}),
        repeated_modulated,
        needs_key=True,
        tolerance=3e-6,
        variant=True,
        no_sums="the layers that it is made of have rows",
    ),
    "Chain": LayerRow(
        lambda dtype: mlax.Chain((Modulated(6), Modulated(6))),
        ((4, 6), (4, 3)),
        (
            {f"layers/{time}/{path}": shape for time in range(2) for path, shape in MODULATED.items()},
            {f"layers/{time}/count/calls": () for time in range(2)},
        ),
        chained,
        needs_key=True,
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
    "Recurrent": LayerRow(
        lambda dtype: mlax.Recurrent(Cell(5)),
        (4, 7, 3),
        ({"kernel": (3, 5), "recurrent": (5, 5), "bias": (5,)}, {}),
        elman,
    ),
    "Remat": LayerRow(
        lambda dtype: mlax.Remat(Modulated(6)),
        ((4, 6), (4, 3)),
        (MODULATED, {"count/calls": ()}),
        modulated,
        needs_key=True,
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
    "Map": LayerRow(
        lambda dtype: mlax.Map(nn.Linear(4), axis=1, variables=0),
        (5, 3, 6),
        ({"stacked/kernel": (3, 6, 4), "stacked/bias": (3, 4)}, {}),
        lambda x, w: np.einsum("bad,adf->baf", x, w["stacked/kernel"]) + w["stacked/bias"],
        no_sums="the layers that it is made of have rows",
    ),
    "Map shared": LayerRow(
        lambda dtype: mlax.Map(nn.LayerNorm(), axis=-1),
        (5, 3, 6),
        ({"scale": (3,), "shift": (3,)}, {}),
        lambda x, w: normed(x, w["scale"][:, None], w["shift"][:, None], axes=1),
        tolerance=3e-6,
        variant=True,
    ),
    "Tied": LayerRow(
        lambda dtype: mlax.Tied(
            mlax.Series(up=nn.Linear(8, bias=False), tanh=mlax.F(tanh), down=nn.Linear(6)),
            mlax.Tie("down/kernel", to="up/kernel", transpose=True),
        ),
        (4, 6),
        ({"up/kernel": (6, 8), "down/bias": (6,)}, {}),
        lambda x, w: np.tanh(x @ w["up/kernel"]) @ w["up/kernel"].T + w["down/bias"],
        no_sums="the layers that it is made of have rows",
    ),
    "Mixed": LayerRow(
        lambda dtype: dtypes.Mixed(Block(6), compute=dtype, output=dtype, param_dtype=dtype),
        (4, 6),
        (BLOCK, {"count/calls": ()}),
        block,
        needs_key=True,
        tolerance=3e-6,
        no_dtype_error="Mixed casts its input",
        no_sums="the layers that it is made of have rows",
    ),
}
