"""Plan.describe: the memory and the transfers of a plan, found by tracing and compiling for shapes."""

import collections
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from mlax._jax import global_norm, layer_path
from mlax.core import Layer, Tree, flatten_paths, layers, shape_dtypes, variable_shapes
from mlax.inspect import total_bytes, transfers
from mlax.optim import Optimizer
from mlax.place._description import Description, LayerMemory
from mlax.place._pipeline import Stages, split_microbatches
from mlax.place._rules import num_shards

Objective = Callable[..., tuple[Any, Tree]]  # as for `train.step`: (batch, trainables, non_trainables, rng=)


def describe(
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
    batch = _batch_shapes(x, batch)
    variables = variable_shapes(model, x)
    trainables, _ = variables
    places = plan.variable_shardings(model, x)
    held: dict[str, Counts] = {"weights": _bytes_by_layer(trainables, places[0])}
    _add_counts(held["weights"], _bytes_by_layer(variables[1], places[1]))
    slots = slot_places = None
    if optimizer is not None:
        slots, slot_places = jax.eval_shape(optimizer.init, trainables), plan.slot_shardings(optimizer, trainables)
        for name, slot in slots._asdict().items():
            _add_counts(held.setdefault("slots", {}), _bytes_by_layer(slot, getattr(slot_places, name)))
        held["gradients"] = _bytes_by_layer(trainables, places[0])
    parallel = plan.parallelize(model, x)
    loss = _make_loss(parallel, objective)
    if optimizer is not None:
        rng = jax.eval_shape(lambda: jax.random.key(0))
        given = _residual_bytes(loss, trainables, variables[1], batch, rng, layers(model))
        split = math.prod(num_shards(entry, plan.shape) for entry in plan.batch)
        held["activations"] = {(path, "device"): -(-size // split) for path, size in given.items()}
    compiled = None
    if compile:
        compiled = _compile_step(plan, loss, parallel, optimizer, (*variables, slots), (*places, slot_places), batch)
    every = list(plan.mesh.devices.flat)
    device = next((each for each in every if each.process_index == jax.process_index()), every[0])
    return Description(
        name=", ".join([plan.name, *(f"{axis} {size}" for axis, size in plan.shape.items())]),
        devices=math.prod(plan.shape.values()),
        rows=_make_rows(held),
        batch=sum(
            _shard_bytes(leaf, place)
            for leaf, place in zip(jax.tree.leaves(batch), jax.tree.leaves(plan.batch_shardings(batch)), strict=True)
        ),
        working=None if compiled is None else compiled.memory_analysis().temp_size_in_bytes,
        moved=None if compiled is None else transfers(compiled),
        memory=memory or total_bytes(device),
        device=f"{device.device_kind}",
        stages="" if plan.stages is None else str(plan.stages),
    )


Counts = dict[tuple[str, str], int]  # bytes on one device by layer and memory


def _batch_shapes(x: Any, batch: Any) -> Any:
    """The shapes of a batch: of those given, or of `x` with so many examples."""
    if batch is None or isinstance(batch, int):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((batch or leaf.shape[0], *leaf.shape[1:]), leaf.dtype), shape_dtypes(x)
        )
    return shape_dtypes(batch)


def _bytes_by_layer(tree: Any, places: Any) -> Counts:
    """The bytes of one device's share, by layer and memory."""
    found: Counts = collections.defaultdict(int)
    for (path, leaf), place in zip(flatten_paths(tree).items(), flatten_paths(places).values(), strict=True):
        memory = "host" if place.memory_kind == "pinned_host" else "device"
        found[path.rpartition("/")[0], memory] += _shard_bytes(leaf, place)
    return found


def _shard_bytes(leaf: Any, place: Sharding) -> int:
    return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _add_counts(total: Counts, more: Counts) -> None:
    for key, size in more.items():
        total[key] = total.get(key, 0) + size


def _make_loss(model: Layer, objective: Objective | None) -> Callable[..., Any]:
    """A loss of (trainables, non_trainables, batch, rng): the objective's, or one that needs every output."""

    def loss(trainables: Tree, non_trainables: Tree, batch: Any, rng: jax.Array) -> tuple[jax.Array, Tree]:
        if objective is not None:
            values, new = objective(batch, trainables, non_trainables, rng=rng)
            return jnp.mean(values["loss"] if isinstance(values, Mapping) else values), new
        y, new = model.fwd(batch, trainables, non_trainables, rng=rng)
        floats = [leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.mean(jax.nn.logsumexp(leaf.astype(jnp.float32), -1)) for leaf in floats), jnp.float32(0)), new

    return loss


def _residual_bytes(
    loss: Callable[..., Any], trainables: Tree, non_trainables: Tree, batch: Any, rng: Any, paths: Collection[str]
) -> dict[str, int]:
    found: dict[str, int] = {}

    def traced(trainables: Tree, non_trainables: Tree, batch: Any, rng: jax.Array) -> None:
        found.update(
            residuals_by_layer(lambda weights: loss(weights, non_trainables, batch, rng)[0], trainables, paths)
        )

    jax.eval_shape(traced, trainables, non_trainables, batch, rng)
    return found


def _compile_step(
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
        (value, new), grads = _value_and_grad(plan.stages, loss)(trainables, non_trainables, batch, rng)
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


def _value_and_grad(stages: Stages | None, loss: Callable[..., Any]) -> Callable[..., Any]:
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


def _make_rows(held: Mapping[str, Counts]) -> tuple[LayerMemory, ...]:
    keys = dict.fromkeys(key for counts in held.values() for key in counts)
    return tuple(
        LayerMemory(layer, memory, *(held.get(kind, {}).get((layer, memory), 0) for kind in LayerMemory.KINDS))
        for layer, memory in keys
    )


def residuals_by_layer(loss: Callable[[Tree], Any], trainables: Tree, paths: Collection[str]) -> dict[str, int]:
    """The bytes that are kept for the backward pass, by the path of the layer that made them, for the whole batch.

    `paths` are those of the layers that there are.

    They are read off the jaxpr: nothing is computed. What XLA makes of them can be less, or more.
    """

    def residuals(trainables: Tree) -> list[jax.Array]:
        return [leaf for leaf in jax.tree.leaves(jax.vjp(loss, trainables)[1]) if isinstance(leaf, jax.Array)]

    jaxpr = jax.make_jaxpr(residuals)(trainables).jaxpr
    found: dict[str, int] = collections.defaultdict(int)
    for result in {id(result): result for result in jaxpr.outvars}.values():
        origin = _producer_path(jaxpr, result, ())
        if origin is not None:
            # the numbers in a path are those of unrolled layers, whose weights are one stack
            layer = "/".join(name for name in origin.split("/") if not name.isdigit())
            found[_resolve_path(layer, paths)] += math.prod(result.aval.shape) * result.aval.dtype.itemsize
    return dict(found)


def _resolve_path(path: str, paths: Collection[str]) -> str:
    """The path of a layer, found again by its end for what JAX took out of a loop without the names around that."""
    ends = [] if path in paths else [each for each in paths if each.endswith(f"/{path}")]
    return path if not ends else ends[0] if len(ends) == 1 else ""


def _producer_path(jaxpr: Any, result: Any, around: tuple[Any, ...]) -> str | None:
    """The path of the layer that made a value; None for what is given, as weights are."""
    maker = next((each for each in jaxpr.eqns if any(result is made for made in each.outvars)), None)
    if maker is None:
        return layer_path(around) if around else None
    place = next(place for place, made in enumerate(maker.outvars) if made is result)
    inner = maker.params.get("jaxpr")
    if inner is not None and maker.primitive.name in ("scan", "jit", "pjit", "checkpoint", "remat2"):
        inner = getattr(inner, "jaxpr", inner)
        return _producer_path(inner, inner.outvars[place], (*around, maker))
    return layer_path((*around, maker))
