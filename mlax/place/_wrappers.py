"""Wrappers that decide where a layer is computed and how its weights and activations are sharded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mlax._jax import to_device, to_host
from mlax.core import (
    Composite,
    Layer,
    Map,
    Tree,
    Wrapper,
    flatten_paths,
    frozen,
    get_stack,
    jitted_init,
    layers,
    map_layers,
    parts_of,
    replace,
    short_repr,
    signature,
    split_parts,
    unflatten_paths,
    with_fields,
)
from mlax.place._rules import Placement, Rules, merge_specs, mesh_axes, num_shards


@frozen
class On(Wrapper):
    """Compute `layer` on a `jax.Device`, on a `Mesh` or a `NamedSharding`, or, by `place.host`, on the host.

    `init` creates the variables there. On devices or a mesh, `fwd` moves the input there (differentiably), runs the
    layer as one jitted call, and leaves the output there. One jitted program runs on one set of devices, so do not jit
    the whole model: JAX raises "incompatible devices" inside a jit that runs elsewhere. A `NamedSharding` says how
    the input is sharded; variables are replicated over the mesh. On the host, `fwd` also works inside jit, the
    trainables are in host memory and the output is on the device.
    """

    where: Any  # a device, a mesh, a NamedSharding, or place.host

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_host(self.where) or isinstance(self.where, jax.Device | Mesh | NamedSharding):
            return
        raise TypeError(f"On: where is {self.where!r}, but must be a device, a Mesh, a NamedSharding or place.host.")

    def init(self, rng, x):
        if _is_host(self.where):
            trainables, non_trainables = self.layer.init(rng, x)
            return to_host(trainables), non_trainables
        _, replicated = self._shardings()
        if isinstance(rng, Tracer):
            return _put(self.layer.init(rng, x), replicated)
        if isinstance(self.where, jax.Device):
            with jax.default_device(self.where):
                return _put(self.layer.init(_put(rng, replicated), x), replicated)
        return jax.jit(jitted_init(self.layer, x), out_shardings=replicated)(_put(rng, replicated))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        if _is_host(self.where):
            return self._fwd_on_host(x, trainables, non_trainables, rng, inference_mode)
        input_sharding, replicated = self._shardings()
        x = _put(x, input_sharding)
        trainables, non_trainables, rng = _put((trainables, non_trainables, rng), replicated)
        fwd = jax.jit(self.layer.fwd, static_argnames="inference_mode" if isinstance(inference_mode, bool) else ())
        return fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    def _fwd_on_host(self, x: Any, trainables: Any, non_trainables: Any, rng: Any, mode: Any) -> tuple[Any, Any]:
        def fwd(x: Any, trainables: Any, non_trainables: Any, rng: Any) -> tuple[Any, Any]:
            return self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=mode)

        return _compute_on_host(fwd)(x, to_device(trainables), non_trainables, rng)

    def _shardings(self) -> tuple[Any, Any]:
        """The shardings of the input and of the variables."""
        if isinstance(self.where, jax.Device):
            single = SingleDeviceSharding(self.where)
            return single, single
        mesh = self.where if isinstance(self.where, Mesh) else self.where.mesh
        replicated = NamedSharding(mesh, PartitionSpec())
        return (replicated if isinstance(self.where, Mesh) else self.where), replicated


def _is_host(where: Any) -> bool:
    return isinstance(where, Placement) and where.memory == "host"


def _put(tree: Any, sharding: Any) -> Any:
    """`jax.device_put`; inside a trace, where nothing can move, a constraint that the program runs there."""
    traced = isinstance(jnp.zeros(()), Tracer)
    put = lax.with_sharding_constraint if traced else jax.device_put
    return jax.tree.map(lambda leaf: put(leaf, sharding), tree)


def _compute_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function computed by the host, its results in device memory."""
    annotate = getattr(compute_on, "compute_on2", None) or compute_on.compute_on  # compute_on2 in JAX 0.10
    return annotate(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)  # pyright: ignore


@frozen
class ShardingConstraint(Wrapper):
    """Compute `layer` and constrain the sharding of its output to `spec`, truncated to the rank of each array.

    The mesh is that of `jax.set_mesh`, as a step with a plan sets it. Without a mesh that has these axes this is the
    layer itself.
    """

    spec: PartitionSpec  # of the output

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return jax.tree.map(self._constrain_output, y), new

    def _constrain_output(self, leaf: jax.Array) -> jax.Array:
        entries = self.spec[: leaf.ndim]
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        for axis, entry in enumerate(entries if _mesh_has_axes(self.spec) else ()):
            size, shards = leaf.shape[axis], num_shards(entry, sizes)
            if size % shards:
                raise ValueError(
                    f"{short_repr(self.layer)} returns {signature(leaf)}, whose axis {axis} {self.spec} shards over "
                    f"{shards} devices, but {size} is not a multiple of {shards}; use a size that is."
                )
        return _constrain(leaf, PartitionSpec(*entries))


def constrain_activations(model: Layer, rules: Rules) -> Layer:
    """The model with the outputs of its parts sharded by rules; the pattern "" is for the model itself."""
    parts = {"": model, **layers(model)}
    for path, placements in rules.match(parts, "activations").items():
        spec = PartitionSpec()
        for placement in placements:
            if not isinstance(placement.spec, PartitionSpec):
                raise TypeError(f"the rule for activations gives {path!r} {placement}, but must give a PartitionSpec.")
            spec = merge_specs(spec, placement.spec)
        if placements:
            part = layers(model)[path] if path else model
            model = replace(model, path, ShardingConstraint(part, spec)) if path else ShardingConstraint(part, spec)
    return model


def _constrain(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Constrain the sharding over the mesh that is set; the array itself if that lacks the axes of the spec."""
    is_set = jax.sharding.get_abstract_mesh().axis_names and _mesh_has_axes(spec)
    return lax.with_sharding_constraint(leaf, spec) if is_set else leaf


def _mesh_has_axes(spec: PartitionSpec) -> bool:
    """Whether the mesh that is set has the axes of a spec, and no enclosing `jax.shard_map` made them manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name for entry in spec for name in mesh_axes(entry)} <= {*mesh.axis_names} - {*mesh.manual_axes}


@frozen
class AllGatherWeights(Wrapper):
    """Compute `layer` with its weights all-gathered over some mesh axes first.

    Left to itself, XLA often moves the activations instead, which are larger. Gathered weights are not stored for the
    backward pass, which gathers them again. `specs` are the specs of the gathered weights, by path. The mesh is that
    of `jax.set_mesh`; without one this is the layer itself.
    """

    specs: tuple[tuple[str, PartitionSpec], ...]  # (path, spec) of each leaf, gathered

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def fwd(x: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array | None) -> tuple[Any, Tree]:
            gathered = [(path, self._all_gather(path, leaf)) for path, leaf in flatten_paths(trainables).items()]
            return self.layer.fwd(x, unflatten_paths(gathered), non_trainables, rng=rng, inference_mode=inference_mode)

        return jax.checkpoint(fwd, policy=_save_all_but_gathered)(x, trainables, non_trainables, rng)

    def _all_gather(self, path: str, leaf: jax.Array) -> jax.Array:
        spec = dict(self.specs).get(path)
        return leaf if spec is None else _constrain(leaf, spec)


def _save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint` that saves all residuals but those that a sharding constraint made."""
    return primitive.name != "sharding_constraint"


def all_gather_weights(layer: Layer, shardings: Tree, axes: tuple[str, ...], stacked: int = 0) -> Layer:
    """The layer with an AllGatherWeights around each of its parts, and around the body of each Repeat or Map.

    `stacked` counts the leading axes that the Repeats and Maps around the layer add to its variables.
    """
    if not shardings:
        return layer
    if isinstance(layer, Wrapper) and layer.has_stack:
        return with_fields(layer, layer=_wrap_layer(layer.layer, get_stack(shardings), axes, stacked + 1))
    if isinstance(layer, Wrapper):
        return with_fields(layer, layer=all_gather_weights(layer.layer, shardings, axes, stacked))
    if isinstance(layer, Composite) and type(layer).init is Composite.init:
        parts, own = parts_of(layer), split_parts(layer, shardings)
        new = {name: all_gather_weights(part, own.get(name), axes, stacked) for name, part in parts.items()}
        return layer.with_parts({name: part for name, part in new.items() if part != parts[name]})
    return _wrap_layer(layer, shardings, axes, stacked)


def _wrap_layer(layer: Layer, shardings: Tree, axes: tuple[str, ...], stacked: int) -> Layer:
    specs = [(path, _drop_axes(sharding, axes, stacked)) for path, sharding in flatten_paths(shardings).items()]
    gathered = tuple((path, spec) for path, spec in specs if spec is not None)
    return AllGatherWeights(layer, gathered) if gathered else layer


def _drop_axes(sharding: Sharding, axes: tuple[str, ...], stacked: int) -> PartitionSpec | None:
    """The spec without these mesh axes and without the stacked array axes; None if it has none of the mesh axes."""
    if not isinstance(sharding, NamedSharding) or not any(set(mesh_axes(entry)) & set(axes) for entry in sharding.spec):
        return None
    kept = [tuple(name for name in mesh_axes(entry) if name not in axes) for entry in sharding.spec]
    return PartitionSpec(*[entry[0] if len(entry) == 1 else entry or None for entry in kept[stacked:]])


@frozen
class ExpertAllToAll(Wrapper):
    """Compute `layer` with its input and output sharded as `inside`, in a model that is sharded as `outside`.

    An all-to-all then sends each example to the devices of its experts, and another sends the outputs back. Left to
    itself, XLA gathers the experts, or everything. The mesh is that of `jax.set_mesh`; without one this is the layer
    itself.
    """

    inside: PartitionSpec  # the sharding of the layer's input and output
    outside: PartitionSpec  # the sharding in the model around it

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def reshard(leaf: jax.Array, before: PartitionSpec, after: PartitionSpec) -> jax.Array:
            return _constrain(_constrain(leaf, before), after)

        x = jax.tree.map(lambda leaf: reshard(leaf, self.outside, self.inside), x)
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return jax.tree.map(lambda leaf: reshard(leaf, self.inside, self.outside), y), new


def expert_all_to_all(model: Layer, batch: PartitionSpec, axes: tuple[str, ...]) -> Layer:
    """The model with an ExpertAllToAll around each Map of experts that is sharded over these mesh axes."""
    outside = PartitionSpec(*batch[:1])
    others = tuple(name for entry in outside for name in mesh_axes(entry) if name not in axes)

    def wrap(path: str, layer: Layer) -> Layer:
        if isinstance(layer, ExpertAllToAll):
            return layer.layer  # of an earlier plan; the layer inside has just been wrapped again
        if not isinstance(layer, Map) or layer.variables != 0:
            return layer
        entries: list[Any] = [others or None, *[None] * (layer.axis - 1), axes]
        return ExpertAllToAll(layer, PartitionSpec(*entries), outside)

    return map_layers(model, "", wrap)
