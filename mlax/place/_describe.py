"""describe: what a plan would put where, and what would move, before anything is allocated."""

import collections
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from mlax._jax import global_norm
from mlax.core import Layer, Tree, flatten_paths, layers, shape_dtypes, variable_shapes
from mlax.inspect import all_bytes, transfers
from mlax.optim import Optimizer
from mlax.place._description import Description, Row
from mlax.place._kept import kept_by_layer
from mlax.place._microbatches import split_microbatches
from mlax.place._stages import Stages
from mlax.place._where import ways

Objective = Callable[..., tuple[Any, Tree]]  # as for `train.step`: (batch, trainables, non_trainables, rng=)


def described(
    plan: Any,
    model: Layer,
    x: Any,
    optimizer: Optimizer | None,
    batch: Any,
    objective: Objective | None,
    memory: int | None,
    compile: bool,
) -> Description:
    """What `plan.describe` gives."""
    batch = _batch(x, batch)
    variables = variable_shapes(model, x)
    trainables, _ = variables
    places = plan.variable_shardings(model, x)
    held: dict[str, Counts] = {"weights": _held(trainables, places[0])}
    _add(held["weights"], _held(variables[1], places[1]))
    slots = slot_places = None
    if optimizer is not None:
        slots, slot_places = jax.eval_shape(optimizer.init, trainables), plan.slot_shardings(optimizer, trainables)
        for name, slot in slots._asdict().items():
            _add(held.setdefault("slots", {}), _held(slot, getattr(slot_places, name)))
        held["gradients"] = _held(trainables, places[0])
    wired = plan.wired(model, x)
    loss = _loss(wired, objective)
    if optimizer is not None:
        rng = jax.eval_shape(lambda: jax.random.key(0))
        given = _kept(loss, trainables, variables[1], batch, rng, layers(model))
        split = math.prod(ways(entry, plan.shape) for entry in plan.batch)
        held["activations"] = {(path, "device"): -(-size // split) for path, size in given.items()}
    compiled = None
    if compile:
        compiled = _compiled(plan, loss, wired, optimizer, (*variables, slots), (*places, slot_places), batch)
    every = list(plan.mesh.devices.flat)
    device = next((each for each in every if each.process_index == jax.process_index()), every[0])
    return Description(
        name=", ".join([plan.name, *(f"{axis} {size}" for axis, size in plan.shape.items())]),
        devices=math.prod(plan.shape.values()),
        rows=_rows(held),
        batch=sum(
            _share(leaf, place)
            for leaf, place in zip(jax.tree.leaves(batch), jax.tree.leaves(plan.batch_shardings(batch)), strict=True)
        ),
        working=None if compiled is None else compiled.memory_analysis().temp_size_in_bytes,
        moved=None if compiled is None else transfers(compiled),
        memory=memory or all_bytes(device),
        device=f"{device.device_kind}",
        stages="" if plan.stages is None else str(plan.stages),
    )


Counts = dict[tuple[str, str], int]  # bytes on one device by layer and memory


def _batch(x: Any, batch: Any) -> Any:
    """The shapes of a batch: of those given, or of `x` with so many examples."""
    if batch is None or isinstance(batch, int):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((batch or leaf.shape[0], *leaf.shape[1:]), leaf.dtype), shape_dtypes(x)
        )
    return shape_dtypes(batch)


def _held(tree: Any, places: Any) -> Counts:
    """The bytes of one device's share, by layer and memory."""
    found: Counts = collections.defaultdict(int)
    for (path, leaf), place in zip(flatten_paths(tree).items(), flatten_paths(places).values(), strict=True):
        memory = "host" if place.memory_kind == "pinned_host" else "device"
        found[path.rpartition("/")[0], memory] += _share(leaf, place)
    return found


def _share(leaf: Any, place: Sharding) -> int:
    return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _add(total: Counts, more: Counts) -> None:
    for key, size in more.items():
        total[key] = total.get(key, 0) + size


def _loss(model: Layer, objective: Objective | None) -> Callable[..., Any]:
    """A loss of (trainables, non_trainables, batch, rng): the objective's, or one that needs every output."""

    def loss(trainables: Tree, non_trainables: Tree, batch: Any, rng: jax.Array) -> tuple[jax.Array, Tree]:
        if objective is not None:
            values, new = objective(batch, trainables, non_trainables, rng=rng)
            return jnp.mean(values["loss"] if isinstance(values, Mapping) else values), new
        y, new = model.fwd(batch, trainables, non_trainables, rng=rng)
        floats = [leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.mean(jax.nn.logsumexp(leaf.astype(jnp.float32), -1)) for leaf in floats), jnp.float32(0)), new

    return loss


def _kept(
    loss: Callable[..., Any], trainables: Tree, non_trainables: Tree, batch: Any, rng: Any, paths: Collection[str]
) -> dict[str, int]:
    found: dict[str, int] = {}

    def traced(trainables: Tree, non_trainables: Tree, batch: Any, rng: jax.Array) -> None:
        found.update(kept_by_layer(lambda weights: loss(weights, non_trainables, batch, rng)[0], trainables, paths))

    jax.eval_shape(traced, trainables, non_trainables, batch, rng)
    return found


def _compiled(
    plan: Any,
    loss: Callable[..., Any],
    model: Layer,
    optimizer: Optimizer | None,
    variables: tuple[Any, Any, Any],
    places: tuple[Any, Any, Any],
    batch: Any,
) -> Any:
    """A training step, or a forward pass where there is no optimizer, compiled for shapes in their places."""

    def step(trainables: Tree, non_trainables: Tree, slots: Any, batch: Any, rng: jax.Array) -> Any:
        if optimizer is None:
            y, new = model.fwd(batch, trainables, non_trainables, rng=rng, inference_mode=True)
            return trainables, new, None, y
        (value, new), grads = _gradients(plan.stages, loss)(trainables, non_trainables, batch, rng)
        fine = jnp.isfinite(value) & jnp.isfinite(global_norm(flatten_paths(grads)))  # as `train.step` guards its steps
        trainables, slots = optimizer.update(grads, slots, trainables, take=fine)
        new = jax.tree.map(lambda new, old: jnp.where(fine, new, old), new, non_trainables)
        return trainables, new, slots, value

    rng = jax.eval_shape(lambda: jax.random.key(0))
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1, 2),
        in_shardings=(*places, plan.batch_shardings(batch), None),
        out_shardings=(*places, None),
    )
    with jax.set_mesh(plan.mesh):
        return jitted.lower(*variables, batch, rng).compile()


def _gradients(stages: Stages | None, loss: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.value_and_grad` of the loss, by the schedule of a pipeline if it has one of its own."""
    if stages is None or stages.backward is None:
        return jax.value_and_grad(loss, has_aux=True)
    backward, number = stages.backward, stages.microbatches

    def of_one(trainables: Tree, part: Any, non_trainables: Tree, rng: jax.Array) -> tuple[Any, Any]:
        value, new = loss(trainables, non_trainables, part, rng)
        return value, (value, new)

    def gradients(trainables: Tree, non_trainables: Tree, batch: Any, rng: jax.Array) -> Any:
        parts, rngs = split_microbatches(batch, number, "microbatches"), jax.random.split(rng, number)
        value, grads, new = backward(of_one, trainables, parts, non_trainables, rngs)
        return (value, new), grads

    return gradients


def _rows(held: Mapping[str, Counts]) -> tuple[Row, ...]:
    keys = dict.fromkeys(key for counts in held.values() for key in counts)
    return tuple(
        Row(layer, memory, *(held.get(kind, {}).get((layer, memory), 0) for kind in Row.KINDS))
        for layer, memory in keys
    )
