"""Two small models with a `Repeat` to pipeline, their data, and meshes of stages and data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, train

EXAMPLES = 32


def transformer(blocks=8, dropout=0.0, width=8):
    """A language model with tied embeddings."""
    attend = mlax.Residual(mlax.Series(nn.LayerNorm(), nn.MultiHeadAttention(2, causal=True, bias=False)))
    mlp = mlax.Residual(mlax.Series(nn.LayerNorm(), nn.MLP((2 * width, width)), nn.Dropout(dropout)))
    model = mlax.Series(
        embed=nn.Embed(11, width),
        positions=nn.LearnedPositions(6),
        blocks=mlax.Repeat(mlax.Series(attend, mlp), blocks),
        norm=nn.LayerNorm(),
        head=nn.Linear(11, bias=False),
    )
    return mlax.Tied(model, mlax.Tie("head/kernel", to="embed/table", transpose=True))


def convolutional(blocks=8, width=4):
    """An image classifier."""
    block = mlax.Residual(mlax.Series(nn.Conv(width, 3), nn.GroupNorm(2), mlax.F(jax.nn.relu), nn.Conv(width, 3)))
    return mlax.Series(
        stem=nn.Conv(width, 3), blocks=mlax.Repeat(block, blocks), pool=nn.GlobalPool(), head=nn.Linear(3)
    )


def batch(model, seed=0, examples=EXAMPLES):
    """Examples for either model; the mask leaves out about every fifth, unevenly."""
    draws = np.random.default_rng(seed)
    mask = jnp.asarray(draws.uniform(size=examples) > 0.2)
    if isinstance(model, mlax.Tied):
        tokens = jnp.asarray(draws.integers(0, 11, (examples, 7)), jnp.int32)
        return {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": mask}
    labels = draws.integers(0, 3, examples)
    images = draws.normal(size=(examples, 5, 5, 1)) + labels[:, None, None, None]
    return {"x": jnp.asarray(images, jnp.float32), "y": jnp.asarray(labels, jnp.int32), "mask": mask}


def objective(model):
    """The cross-entropy, accuracy and F1 of either model."""

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        f1 = train.F1(logits.argmax(-1), batch["y"], classes=logits.shape[-1])
        return {"loss": losses, "accuracy": train.accuracy(logits, batch["y"]), "f1": f1}, new

    return objective


def mesh(stages, data=1, more=()):
    """A mesh of the first devices, with Auto axes."""
    sizes, names = (stages, data, *(size for _, size in more)), ("stage", "data", *(name for name, _ in more))
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def shard_over(mesh, trainables, batch):
    """The blocks sharded by stage, the other weights replicated; the batch sharded by data."""

    def put(path, leaf):
        return jax.device_put(leaf, NamedSharding(mesh, P("stage") if path[0].key == "blocks" else P()))

    return jax.tree_util.tree_map_with_path(put, trainables), jax.device_put(batch, NamedSharding(mesh, P("data")))
