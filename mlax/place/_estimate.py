"""Estimate the memory and the transfers of a step under a plan, by tracing and compiling it for shapes."""

import collections
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from mlax._jax import all_stay_finite, global_norm, layer_path, leaves_with_paths
from mlax._objective import Backward, Objective, gradients, loss_function, split_frozen
from mlax.core import Layer, Tree, find_layers, flatten_paths, layers, shape_dtypes, variable_shapes
from mlax.inspect import path_in_model, total_bytes, transfers
from mlax.optim import Optimizer
from mlax.place._pipeline import PipelineConfig
from mlax.place._report import Description, LayerMemory
from mlax.place._rules import HOST_MEMORY, num_shards, spec_axes

if TYPE_CHECKING:
    from mlax.place._plan import Plan

Counts = dict[tuple[str, str], int]  # bytes on one device by layer and memory


def describe(
    plan: "Plan",
    model: Layer,
    x: Any,
    optimizer: Optimizer | None,
    batch: Any,
    objective: Objective | None,
    memory: int | None,
    compile: bool,
) -> Description:
    """The memory and the transfers of a training step, or of inference; see `Plan.describe`."""
    batch = _batch_shapes(x, batch)
    trainables, non_trainables = variables = variable_shapes(model, x)
    shardings = plan.variable_shardings(model, x)
    parallel = plan.parallelize(model, x)
    activations_known = _shards_only_examples(plan, shardings)
    objective = objective or _model_objective(parallel)
    counts: dict[str, Counts] = {
        "weights": _add_counts(_bytes_by_layer(trainables, shardings[0]), _bytes_by_layer(non_trainables, shardings[1]))
    }
    slots = slot_shardings = None
    if optimizer is not None:
        slots, slot_shardings = jax.eval_shape(optimizer.init, trainables), plan.slot_shardings(optimizer, trainables)
        fields = zip(slots, slot_shardings, strict=True)
        counts["slots"] = _add_counts(*(_bytes_by_layer(slot, sharding) for slot, sharding in fields))
        live = {path for path in flatten_paths(trainables) if not optimizer.is_frozen(path)}
        counts["gradients"] = _bytes_by_layer(*(_some_leaves(tree, live) for tree in (trainables, shardings[0])))
        if activations_known:
            counts["activations"] = _activations_by_layer(plan, objective, model, variables, batch, optimizer)
    compiled = None
    if compile:
        state, state_shardings = (*variables, slots), (*shardings, slot_shardings)
        compiled = _compile_step(plan, objective, parallel, optimizer, state, state_shardings, batch)
    devices = list(plan.mesh.devices.flat)
    device = next((each for each in devices if each.process_index == jax.process_index()), devices[0])
    return Description(
        name=", ".join([plan.name, *(f"{axis} {size}" for axis, size in plan.shape.items())]),
        devices=math.prod(plan.shape.values()),
        rows=_make_rows(counts),
        batch=sum(jax.tree.leaves(jax.tree.map(_shard_bytes, batch, plan.batch_shardings(batch)))),
        working=None if compiled is None else compiled.memory_analysis().temp_size_in_bytes,
        transfers=None if compiled is None else transfers(compiled),
        memory=memory or total_bytes(device),
        device=device.device_kind,
        pipeline="" if plan.pipeline is None else str(plan.pipeline),
        activations_known=activations_known,
        cache=_cache_bytes(model, _bytes_by_layer(non_trainables, shardings[1])),
    )


def _batch_shapes(x: Any, batch: Any) -> Any:
    """The shapes of a batch; those of `x` with `batch` examples if that is a number."""
    if batch is None or isinstance(batch, int):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((batch or leaf.shape[0], *leaf.shape[1:]), leaf.dtype), shape_dtypes(x)
        )
    return shape_dtypes(batch)


def _bytes_by_layer(tree: Any, shardings: Any) -> Counts:
    """The bytes of one device's shards, by layer and memory."""
    counts: Counts = collections.defaultdict(int)
    for (path, leaf), sharding in zip(flatten_paths(tree).items(), flatten_paths(shardings).values(), strict=True):
        memory = "host" if sharding.memory_kind == HOST_MEMORY else "device"
        counts[path.rpartition("/")[0], memory] += _shard_bytes(leaf, sharding)
    return counts


def _cache_bytes(model: Layer, state: Counts) -> int:
    """The bytes of the state that stores activations, on one device."""
    caches = {path for path, layer in find_layers(model, Layer) if layer.stores_activations}
    return sum(size for (path, memory), size in state.items() if path in caches and memory == "device")


def _some_leaves(tree: Any, paths: Collection[str]) -> dict[str, Any]:
    return {path: leaf for path, leaf in flatten_paths(tree).items() if path in paths}


def _shard_bytes(leaf: Any, sharding: Sharding) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _add_counts(*counts: Counts) -> Counts:
    total: Counts = {}
    for each in counts:
        for key, size in each.items():
            total[key] = total.get(key, 0) + size
    return total


def _make_rows(counts: Mapping[str, Counts]) -> tuple[LayerMemory, ...]:
    keys = dict.fromkeys(key for each in counts.values() for key in each)
    return tuple(
        LayerMemory(layer, memory, *(counts.get(kind, {}).get((layer, memory), 0) for kind in LayerMemory.KINDS))
        for layer, memory in keys
    )


def _model_objective(model: Layer) -> Objective:
    """An objective of a batch that is the model's input; it depends on every output."""

    def objective(batch: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array | None = None) -> tuple[Any, Tree]:
        y, new = model.fwd(batch, trainables, non_trainables, rng=rng)
        floats = [leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.mean(jax.nn.logsumexp(leaf.astype(jnp.float32), -1)) for leaf in floats), jnp.float32(0)), new

    return objective


def _compile_step(
    plan: "Plan",
    objective: Objective,
    model: Layer,
    optimizer: Optimizer | None,
    state: tuple[Any, Any, Any],
    shardings: tuple[Any, Any, Any],
    batch: Any,
) -> Any:
    """A training step, or without an optimizer a forward pass, compiled for sharded shapes."""

    def step(trainables: Tree, non_trainables: Tree, slots: Any, batch: Any, rng: jax.Array) -> Any:
        if optimizer is None:
            y, new = model.fwd(batch, trainables, non_trainables, rng=rng, inference_mode=True)
            return trainables, new, None, y
        backward, number = _backward(plan.pipeline)
        values, grads, new = gradients(
            objective,
            batch,
            trainables,
            non_trainables,
            rng,
            accumulate=number,
            backward=backward,
            is_frozen=optimizer.is_frozen,
        )
        # the guard of `train.step`
        norm = global_norm(dict(leaves_with_paths(grads)))
        finite = jnp.isfinite(values["loss"]) & jnp.isfinite(norm) & all_stay_finite(non_trainables, new)
        loss = loss_function(objective, batch, non_trainables, rng)
        trainables, slots = optimizer.update(
            grads, slots, trainables, value=values["loss"], loss=loss, apply_if=finite, skip_nonfinite=True
        )
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, non_trainables)
        return trainables, new, slots, values

    jitted = jax.jit(
        step,
        donate_argnums=(0, 1, 2),
        in_shardings=(*shardings, plan.batch_shardings(batch), None),
        out_shardings=(*shardings, None),
    )
    with jax.set_mesh(plan.mesh):
        return jitted.lower(*state, batch, _key_shape()).compile()


def _backward(pipeline: PipelineConfig | None) -> tuple[Backward | None, int]:
    """What computes the gradients of microbatches, and their number, if the schedule of a pipeline does."""
    if pipeline is None or pipeline.backward is None:
        return None, 1
    return pipeline.backward, pipeline.microbatches


def _shards_only_examples(plan: "Plan", shardings: Any) -> bool:
    """Whether a plan shards activations along the batch alone; else only the compiled step tells their sizes."""
    specs = [leaf.spec for leaf in jax.tree.leaves(shardings) if isinstance(leaf, NamedSharding)]
    used = {name for spec in specs for name in spec_axes(spec)}
    return (
        plan.pipeline is None
        and not plan.activations.lists
        and not spec_axes(plan.batch[1:])
        and used <= {*spec_axes(plan.batch)}
    )


def _activations_by_layer(
    plan: "Plan",
    objective: Objective,
    model: Layer,
    variables: tuple[Tree, Tree],
    batch: Any,
    optimizer: Optimizer,
) -> Counts:
    """The bytes of one device's residuals, by layer."""
    shards = math.prod(num_shards(entry, plan.shape) for entry in plan.batch)
    with jax.set_mesh(plan.mesh):  # as when it is compiled: layers may compute in another way without a mesh
        residuals = _residuals_by_layer(objective, *variables, batch, layers(model), optimizer.is_frozen)
    return {(path, "device"): -(-size // shards) for path, size in residuals.items()}


def _residuals_by_layer(
    objective: Objective,
    trainables: Tree,
    non_trainables: Tree,
    batch: Any,
    paths: Collection[str],
    is_frozen: Callable[[str], bool],
) -> dict[str, int]:
    """The bytes of the residuals of the backward pass, by the path of the layer that produced them.

    They are read from the jaxpr, for the whole batch: XLA may store less, or more. `paths` are those of all layers.
    """

    def residuals(trainables: Tree, non_trainables: Tree, batch: Any, rng: jax.Array) -> list[jax.Array]:
        live, merge_frozen = split_frozen(trainables, is_frozen)
        loss = loss_function(objective, batch, non_trainables, rng)
        _, pullback = jax.vjp(lambda live: loss(merge_frozen(live)), live)
        return [leaf for leaf in jax.tree.leaves(pullback) if isinstance(leaf, jax.Array)]

    jaxpr = jax.make_jaxpr(residuals)(trainables, non_trainables, batch, _key_shape()).jaxpr
    counts: dict[str, int] = collections.defaultdict(int)
    for result in {id(result): result for result in jaxpr.outvars}.values():
        path = _producer_path(jaxpr, result, ())
        if path is not None:
            counts[path_in_model(path, paths)] += math.prod(result.aval.shape) * result.aval.dtype.itemsize
    return dict(counts)


def _producer_path(jaxpr: Any, result: Any, enclosing: tuple[Any, ...]) -> str | None:
    """The path of the layer whose equation produced a value; None for an argument, such as a weight."""
    producer = next((each for each in jaxpr.eqns if any(result is outvar for outvar in each.outvars)), None)
    if producer is None:
        return layer_path(enclosing) if enclosing else None
    index = next(index for index, outvar in enumerate(producer.outvars) if outvar is result)
    inner = producer.params.get("jaxpr")
    if inner is not None and producer.primitive.name in ("scan", "jit", "pjit", "checkpoint", "remat2"):
        inner = getattr(inner, "jaxpr", inner)
        return _producer_path(inner, inner.outvars[index], (*enclosing, producer))
    return layer_path((*enclosing, producer))


def _key_shape() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
