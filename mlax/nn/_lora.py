"""LoRA: a Linear plus a learned update of low rank."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any

import jax.numpy as jnp

from mlax import ops
from mlax._jax import named_key
from mlax.core import (
    Initializer,
    Layer,
    Tied,
    Tree,
    Wrapper,
    Zeros,
    check_layer,
    check_not_donated,
    find_layers,
    flatten_paths,
    frozen,
    get,
    lecun,
    replace,
    short_repr,
    unflatten_paths,
    untie,
    with_fields,
)
from mlax.dtypes import cast
from mlax.nn._linear import Linear


@frozen
class LoRA(Wrapper):
    """Low-rank adaptation (LoRA) of a Linear, for fine-tuning: `x @ (kernel + alpha / rank * down @ up) + bias`.

    Shapes and dtype as in the Linear. Trainables: those of the Linear, under the same paths and with the same initial
    values as without LoRA, so that pretrained weights fit, and lora/down (d, rank) and lora/up (rank, features),
    initially zero. To train only these:

        tuned = mlax.wrap(model, nn.Linear, lambda layer: nn.LoRA(layer, rank=8))
        trainables = mlax.merge(pretrained, mlax.select(tuned.init(rng, x)[0], "**/lora/*"))

    and `train.step(objective, optimizer, train="**/lora/*")`; `nn.merge_lora(tuned, trainables)` then gives the
    trainables of `model`. https://arxiv.org/abs/2106.09685, section 4.1.

    >>> layer, x = nn.LoRA(nn.Linear(32), rank=4), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> mlax.paths(trainables)
    ('bias', 'kernel', 'lora/down', 'lora/up')
    """

    layer: Linear  # the Linear to adapt
    rank: int  # of the update
    _: KW_ONLY
    alpha: float | None = None  # None: the rank, so that the factor is 1
    down_init: Initializer = lecun("normal")  # of down (d, rank)
    up_init: Initializer = Zeros()  # of up (rank, features)

    def __post_init__(self):
        if isinstance(self.layer, type):
            check_layer("LoRA", "layer", self.layer)
        if not isinstance(self.layer, Linear):
            raise TypeError(
                f"LoRA: {short_repr(self.layer)} is not a Linear; wrap each Linear that it is made of, once: "
                "mlax.wrap(model, nn.Linear, lambda layer: nn.LoRA(layer, rank=8))."
            )
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"LoRA: rank is {self.rank!r}, but must be an integer of at least 1.")

    @property
    def factor(self) -> float:
        """The factor of the product of down and up."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def param_dtype(self) -> Any:
        """The Linear's."""
        return self.layer.param_dtype

    def init(self, rng, x):
        trainables, _ = self.layer.init(rng, x)
        d, f = x.shape[-1], self.layer.features
        if self.rank > min(d, f):
            raise ValueError(
                f"{short_repr(self)}: the rank {self.rank} is above the largest rank of a {d} x {f} matrix; "
                f"pass at most {min(d, f)}, or train the kernel itself."
            )
        dtype = self.param_dtype or x.dtype
        lora = {
            "down": self.down_init(named_key(rng, "down"), (d, self.rank), dtype),
            "up": self.up_init(named_key(rng, "up"), (self.rank, f), dtype),
        }
        return {**trainables, "lora": lora}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        base = {name: leaf for name, leaf in trainables.items() if name != "lora"}
        linear = with_fields(self.layer, activation=None)  # which comes after the sum
        y, _ = linear.fwd(x, base, rng=rng, inference_mode=inference_mode)
        lora = cast(trainables["lora"], x.dtype)
        numerics = {"precision": self.layer.precision, "accum_dtype": self.layer.accum_dtype}
        update = ops.linear(ops.linear(x, lora["down"], **numerics), lora["up"], **numerics)
        y = y + self.factor * update
        return y if self.layer.activation is None else self.layer.activation(y), non_trainables

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        Layer.check_variables(self, x, trainables, non_trainables)


def merge_lora(model: Layer, trainables: Tree) -> Tree:
    """The trainables of the model without LoRA: each `kernel + alpha / rank * down @ up`, in the kernel's dtype.

    `model` and `trainables` are those with LoRA; the model without LoRA computes the same with the result. A kernel
    that is tied to another leaf cannot be merged, unless the other has the same LoRA, tied too.
    """
    check_not_donated("merge_lora", trainables=trainables)
    loras = dict(find_layers(model, LoRA))
    if not loras:
        raise ValueError(
            f"merge_lora: there is no LoRA in {short_repr(model)}; pass the model with LoRA in place of Linears."
        )
    ties = find_layers(model, Tied)  # the inner ones first
    for path, tied in ties:
        _check_ties(path, tied, loras)
    trainables = untie(model, trainables)
    leaves = flatten_paths(trainables)
    for path, lora in loras.items():
        if _join(path, "lora/down") not in leaves:
            raise ValueError(
                f"merge_lora: the trainables have no {_join(path, 'lora/down')}; pass those of the model with LoRA, "
                "which are not merged yet."
            )
        trainables = _replace_tree(trainables, path, functools.partial(_merge, lora))
    leaves = flatten_paths(trainables)
    for path, tied in ties:
        for tie in tied.ties:
            leaves.pop(_join(path, tie.leaf), None)  # None: a leaf of a LoRA, which is merged
    return unflatten_paths(leaves.items())


def _merge(lora: LoRA, leaves: Tree) -> Tree:
    update = jnp.matmul(leaves["lora"]["down"], leaves["lora"]["up"], precision="highest")  # (..., d, f)
    merged = {name: leaf for name, leaf in leaves.items() if name != "lora"}
    return {**merged, "kernel": leaves["kernel"] + lora.factor * update}


def _check_ties(path: str, tied: Tied, loras: Mapping[str, LoRA]) -> None:
    """Raise if merging would make tied kernels differ."""
    owners = {_join(owner, "kernel"): owner for owner in loras}
    ties = [(_join(path, tie.leaf), _join(path, tie.to), tie.transpose) for tie in tied.ties]
    for leaf, to, transpose in ties:
        one, other = owners.get(leaf), owners.get(to)
        if one is other is None or (
            one is not None
            and other is not None
            and loras[one].factor == loras[other].factor
            and all((f"{one}/lora/{name}", f"{other}/lora/{name}", transpose) in ties for name in ("down", "up"))
            and not transpose
        ):
            continue
        where = f"the Tied at {path!r}" if path else "model"
        raise ValueError(
            f"merge_lora: {leaf} is tied to {to}, but merging would make them differ; untie them first: "
            f"{where}.untie(trainables) are the trainables of {where}.layer."
        )


def _replace_tree(tree: Tree, path: str, function: Callable[[Tree], Tree]) -> Tree:
    """The tree with the subtree at `path` replaced by `function` of it."""
    return replace(tree, path, function(get(tree, path))) if path else function(tree)


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
