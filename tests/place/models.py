"""Two small models for plans to shard, a GPT and a CNN, their data, and how to train them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn, optim, train


@mlax.frozen
class Block(mlax.Composite):
    """A transformer block, with a mixture of experts instead of the MLP if `experts` is not 0."""

    width: int
    experts: int = 0

    def parts(self):
        mlp = nn.MLP((4 * self.width, self.width))
        return {
            "norm1": nn.RMSNorm(),
            "attend": nn.MultiHeadAttention(4, causal=True, rotary=nn.Rotary()),
            "norm2": nn.RMSNorm(),
            "mlp": nn.MoE(mlp, self.experts, k=2, capacity_factor=4.0) if self.experts else mlp,
        }

    def wire(self, sub, x):
        x = x + sub.attend(sub.norm1(x))
        y = sub.mlp(sub.norm2(x))
        return x + (y[0] if self.experts else y)


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


def conv_net(experts: int = 0, batch_norm: bool = True) -> mlax.Layer:
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
    """A model, the input that `init` reads, and the training data."""

    model: mlax.Layer
    x: Any
    arrays: dict[str, np.ndarray]


def gpt(**fields: Any) -> Task:
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, 64, (64, 17)).astype(np.int32)
    return Task(GPT(**fields), jax.ShapeDtypeStruct((16, 16), jnp.int32), {"x": tokens[:, :-1], "y": tokens[:, 1:]})


def perceptron() -> Task:
    """Like `gpt`, without attention, which takes long to compile."""
    blocks = mlax.Repeat(mlax.Residual(nn.MLP((64, 16))), 4)
    model = mlax.Series(embed=nn.Embed(64, 16), blocks=blocks, norm=nn.RMSNorm(), head=nn.Linear(64, bias=False))
    return gpt()._replace(model=model)


def cnn(**options: Any) -> Task:
    draws = np.random.default_rng(0)
    images = draws.normal(size=(64, 8, 4, 3)).astype(np.float32)
    labels = draws.integers(0, 16, 64).astype(np.int32)
    return Task(conv_net(**options), jax.ShapeDtypeStruct((16, 8, 4, 3), jnp.float32), {"x": images, "y": labels})


OPTIMIZER = optim.ClipGlobalNorm(optim.AdamW(3e-3), 1.0)


def objective_of(model: mlax.Layer) -> Any:
    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        chosen = jnp.take_along_axis(logits, batch["y"][..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - chosen, new

    return objective


class Training(NamedTuple):
    """The loss of each step, the shardings of the initial state, and the final state."""

    losses: np.ndarray
    before: Any
    state: Any


def train_steps(task: Task, plan: Any = None, *, steps: int) -> Training:
    """Train for some steps, as a user would."""
    model = task.model if plan is None else plan.parallelize(task.model, task.x)
    step = train.step(objective_of(model), OPTIMIZER, plan=plan)
    rng = jax.random.key(1)
    variables = task.model.init(rng, task.x) if plan is None else plan.init(task.model, rng, task.x)
    state = step.init(jax.random.key(0), *variables)
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    feed = train.Feed(task.arrays, 16, seed=0, sharding=None if plan is None else plan.batch_sharding)
    losses = []
    with feed.stream(0, steps) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
    assert len(step.aot.compiled) == 1
    return Training(np.asarray(losses, np.float64), before, state)


@functools.cache
def losses_on_one_device(kind: str, steps: int, **options: Any) -> np.ndarray:
    """The loss of each step of a model on one device."""
    return train_steps(TASKS[kind](**options), steps=steps).losses


TASKS = {"gpt": gpt, "cnn": cnn}
