"""Two small models, with data, for plans to place: a GPT and a convolutional network; and how they are trained."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn, optim, train


@mlax.frozen
class Block(mlax.Composite):
    """A transformer block, with a mixture of experts in place of the MLP if `experts` are given."""

    width: int
    experts: int = 0

    def parts(self):
        think = nn.MLP((4 * self.width, self.width))
        return {
            "norm1": nn.RMSNorm(),
            "attend": nn.MultiHeadAttention(4, causal=True, rotary=nn.Rotary()),
            "norm2": nn.RMSNorm(),
            "think": nn.MoE(think, self.experts, k=2, capacity_factor=4.0) if self.experts else think,
        }

    def wire(self, sub, x):
        x = x + sub.attend(sub.norm1(x))
        thought = sub.think(sub.norm2(x))
        return x + (thought[0] if self.experts else thought)


@mlax.frozen
class GPT(mlax.Composite):
    """(b, t) tokens to (b, t, 64) logits."""

    width: int = 16
    depth: int = 4
    experts: int = 0
    mode: str = "scan"

    def parts(self):
        return {
            "embed": nn.Embed(64, self.width),
            "blocks": mlax.Repeat(Block(self.width, self.experts), self.depth, mode=self.mode),
            "norm": nn.RMSNorm(),
            "head": nn.Linear(64, bias=False),
        }

    def wire(self, sub, x):
        return sub.head(sub.norm(sub.blocks(sub.embed(x))))


def convolutions(experts: int = 0, batch_norm: bool = True) -> mlax.Layer:
    """(b, 8, 4, 3) images to (b, 16) logits."""
    block = mlax.Series(conv=nn.Conv(8, 3), norm=nn.GroupNorm(4), act=mlax.F(jax.nn.gelu), mix=nn.Conv(8, 1))
    parts: dict[str, mlax.Layer] = {
        "stem": nn.Conv(8, 3),
        "norm": nn.BatchNorm() if batch_norm else nn.GroupNorm(4),
        "blocks": mlax.Repeat(mlax.Residual(block), 4),
    }
    if experts:
        parts |= {"mixture": nn.MoE(nn.MLP((16, 8)), experts, k=1, capacity_factor=4.0), "first": mlax.F(_first)}
    return mlax.Series(**parts, pool=nn.GlobalPool(by="mean"), head=nn.Linear(16))


def _first(pair: Any) -> Any:
    return pair[0]


class Task(NamedTuple):
    """A model, what `init` reads, and batches."""

    model: mlax.Layer
    x: Any
    arrays: dict[str, np.ndarray]


def gpt(**fields: Any) -> Task:
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, 64, (64, 17)).astype(np.int32)
    return Task(GPT(**fields), jax.ShapeDtypeStruct((16, 16), jnp.int32), {"x": tokens[:, :-1], "y": tokens[:, 1:]})


def cnn(**options: Any) -> Task:
    draws = np.random.default_rng(0)
    images = draws.normal(size=(64, 8, 4, 3)).astype(np.float32)
    labels = draws.integers(0, 16, 64).astype(np.int32)
    return Task(convolutions(**options), jax.ShapeDtypeStruct((16, 8, 4, 3), jnp.float32), {"x": images, "y": labels})


OPTIMIZER = optim.ClipGlobalNorm(optim.AdamW(3e-3), 1.0)


def objective_of(model: mlax.Layer) -> Any:
    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        chosen = jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - chosen, new

    return objective


class Trained(NamedTuple):
    """The loss of each step, and the state before and after."""

    losses: np.ndarray
    before: Any  # shardings
    state: Any


def trained(task: Task, plan: Any = None, *, steps: int) -> Trained:
    """Train for some steps, as a user would."""
    model = task.model if plan is None else plan.parallelize(task.model, task.x)
    step = train.step(objective_of(model), OPTIMIZER, plan=plan)
    rng = jax.random.key(1)
    variables = task.model.init(rng, task.x) if plan is None else plan.init(task.model, rng, task.x)
    state = step.init(jax.random.key(0), *variables)
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    feed = train.Feed(task.arrays, 16, seed=0, sharding=None if plan is None else plan.batches)
    losses = []
    with feed.stream(0, steps) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
    assert len(step.aot.compiled) == 1
    return Trained(np.asarray(losses, np.float64), before, state)


@functools.cache
def alone(kind: str, steps: int, **options: Any) -> np.ndarray:
    """The losses of a model on one device."""
    return trained(TASKS[kind](**options), steps=steps).losses


TASKS = {"gpt": gpt, "cnn": cnn}
