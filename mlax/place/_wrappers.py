"""Wrappers that decide where a layer is computed and how its weights and activations are sharded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from mlax._jax import to_device, to_host
from mlax.core import (
    Composite,
    Layer,
    Map,
    Repeat,
    Tree,
    Wrapper,
    flatten_paths,
    frozen,
    jitted_init,
    layers,
    map_layers,
    parts_of,
    replace,
    short_repr,
    signature,
    unflatten_paths,
    with_fields,
)
from mlax.place._rules import Placement, Rules, merge_specs, mesh_axes, num_shards


@frozen
class On(Wrapper):
    """Compute `layer` somewhere: on a `jax.Device`, on a `Mesh` or a `NamedSharding`, or by `place.host` on the host.

    `init` makes the variables there. On devices or a mesh, `fwd` moves the input there, which has a gradient, runs
    the layer as one compiled call, and leaves the output there: jit the parts, as this does, and not the whole, since
    all of one compiled program runs on one set of devices. Inside of a jit that runs elsewhere JAX refuses it, as
    "incompatible devices". A `NamedSharding` says how the input is split; variables are on each device of a mesh. On
    the host, `fwd` works inside of jit too, the trainables are in host memory and the output is on the device.
    """

    where: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_host(self.where) or isinstance(self.where, jax.Device | Mesh | NamedSharding):
            return
        raise TypeError(f"On: where is {self.where!r}, but must be a device, a Mesh, a NamedSharding or place.host.")

    def init(self, rng, x):
        if _is_host(self.where):
            trainables, non_trainables = self.layer.init(rng, x)
            return to_host(trainables), non_trainables
        _, everywhere = self._shardings()
        if isinstance(rng, Tracer):
            return _put_or_constrain(self.layer.init(rng, x), everywhere)
        if isinstance(self.where, jax.Device):
            with jax.default_device(self.where):
                return _put_or_constrain(self.layer.init(_put_or_constrain(rng, everywhere), x), everywhere)
        return jax.jit(jitted_init(self.layer, x), out_shardings=everywhere)(_put_or_constrain(rng, everywhere))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        if _is_host(self.where):
            return self._on_host(x, trainables, non_trainables, rng, inference_mode)
        inputs, everywhere = self._shardings()
        x, (trainables, non_trainables, rng) = (
            _put_or_constrain(x, inputs),
            _put_or_constrain((trainables, non_trainables, rng), everywhere),
        )
        run = jax.jit(self.layer.fwd, static_argnames="inference_mode" if isinstance(inference_mode, bool) else ())
        return run(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    def _on_host(self, x: Any, trainables: Any, non_trainables: Any, rng: Any, mode: Any) -> tuple[Any, Any]:
        def run(x: Any, trainables: Any, non_trainables: Any, rng: Any) -> tuple[Any, Any]:
            return self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=mode)

        given = (x, to_device(trainables), non_trainables, rng)
        return _compute_on_host(run)(*given)

    def _shardings(self) -> tuple[Any, Any]:
        """That of the input, and that of the variables."""
        if isinstance(self.where, jax.Device):
            single = jax.sharding.SingleDeviceSharding(self.where)
            return single, single
        mesh = self.where if isinstance(self.where, Mesh) else self.where.mesh
        everywhere = NamedSharding(mesh, PartitionSpec())
        return (everywhere if isinstance(self.where, Mesh) else self.where), everywhere


def _is_host(where: Any) -> bool:
    return isinstance(where, Placement) and where.memory == "host"


def _put_or_constrain(tree: Any, sharding: Any) -> Any:
    """The arrays there; while a program is traced, a demand that this program runs there, since nothing can move."""
    traced = isinstance(jnp.zeros(()), Tracer)
    put = lax.with_sharding_constraint if traced else jax.device_put
    return jax.tree.map(lambda leaf: put(leaf, sharding), tree)


def _compute_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function computed by the host, its results in the device's memory."""
    annotate = getattr(compute_on, "compute_on2", None) or compute_on.compute_on  # its name in JAX 0.10
    return annotate(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)  # pyright: ignore


@frozen
class ShardingConstraint(Wrapper):
    """Compute `layer`, and have its output lie over the mesh as `split` says, cut to the axes of each array.

    The mesh is that of `jax.set_mesh`, as a step with a plan sets it. Without one that has these axes this is the layer
    and nothing more.
    """

    spec: PartitionSpec

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return jax.tree.map(self._constrain, y), new

    def _constrain(self, leaf: jax.Array) -> jax.Array:
        entries = self.spec[: leaf.ndim]
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        for axis, entry in enumerate(entries if mesh_has_axes(self.spec) else ()):
            number = num_shards(entry, sizes)
            if leaf.shape[axis] % number:
                raise ValueError(
                    f"{short_repr(self.layer)} gives {signature(leaf)}, whose axis {axis} is to be split into "
                    f"{number} by "
                    f"{self.spec}, which leaves {leaf.shape[axis] % number} over; take a multiple of {number}."
                )
        return constrain(leaf, PartitionSpec(*entries))


def mesh_has_axes(split: PartitionSpec) -> bool:
    """Whether a mesh is set that has the axes of a split, and they are not those of a `jax.shard_map` around."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name for entry in split for name in mesh_axes(entry)} <= {*mesh.axis_names} - {*mesh.manual_axes}


def constrain(leaf: jax.Array, split: PartitionSpec) -> jax.Array:
    """The array split over the mesh that is set, if it has the axes."""
    known = jax.sharding.get_abstract_mesh().axis_names and mesh_has_axes(split)
    return jax.lax.with_sharding_constraint(leaf, split) if known else leaf


def constrain_activations(model: Layer, rules: Rules) -> Layer:
    """The model with what the rules say of its parts' outputs; the pattern "" stands for the model itself."""
    parts = {"": model, **layers(model)}
    for path, said in rules.found(parts, "activations").items():
        split = PartitionSpec()
        for where in said:
            if not isinstance(where.spec, PartitionSpec):
                raise TypeError(f"the rule for activations says {where} of {path!r}, but must say a PartitionSpec.")
            split = merge_specs(split, where.spec)
        if not said:
            continue
        part = layers(model)[path] if path else model
        model = replace(model, path, ShardingConstraint(part, split)) if path else ShardingConstraint(part, split)
    return model


@frozen
class AllGatherWeights(Wrapper):
    """Compute `layer` with its weights put together over some axes of a mesh first.

    Left to itself XLA often moves the activations instead, which are larger. What is gathered is not kept for the
    backward pass, which gathers again. `specs` are the splits that are left, by path. The mesh is that of
    `jax.set_mesh`; without one this is the layer and nothing more.
    """

    specs: tuple[tuple[str, PartitionSpec], ...]

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def run(x: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array | None) -> tuple[Any, Tree]:
            whole = {path: self._whole(path, leaf) for path, leaf in flatten_paths(trainables).items()}
            return self.layer.fwd(
                x, unflatten_paths(whole.items()), non_trainables, rng=rng, inference_mode=inference_mode
            )

        return jax.checkpoint(run, policy=_save_all_but_gathered)(x, trainables, non_trainables, rng)

    def _whole(self, path: str, leaf: jax.Array) -> jax.Array:
        spec = dict(self.specs).get(path)
        return leaf if spec is None else constrain(leaf, spec)


def all_gather_weights(layer: Layer, shardings: Tree, axes: tuple[str, ...], stacked: int = 0) -> Layer:
    """The layer with each of its parts, and the body of each Repeat or Map, gathered over these axes by itself."""
    if not shardings:
        return layer
    if isinstance(layer, Repeat) or (isinstance(layer, Map) and layer.variables == 0):
        return with_fields(layer, layer=_wrap_layer(layer.layer, shardings, axes, stacked + 1))
    if isinstance(layer, Wrapper):
        return with_fields(layer, layer=all_gather_weights(layer.layer, shardings, axes, stacked))
    if isinstance(layer, Composite) and type(layer).init is Composite.init:
        parts = {
            name: all_gather_weights(part, shardings.get(name), axes, stacked) for name, part in parts_of(layer).items()
        }
        return layer.with_parts({name: part for name, part in parts.items() if part != parts_of(layer)[name]})
    return _wrap_layer(layer, shardings, axes, stacked)


def _wrap_layer(layer: Layer, shardings: Tree, axes: tuple[str, ...], stacked: int) -> Layer:
    specs = [(path, _drop_axes(sharding, axes, stacked)) for path, sharding in flatten_paths(shardings).items()]
    split = tuple((path, spec) for path, spec in specs if spec is not None)
    return AllGatherWeights(layer, split) if split else layer


def _drop_axes(sharding: Sharding, axes: tuple[str, ...], stacked: int) -> PartitionSpec | None:
    """The split of one copy without these mesh axes; None if it has none of them."""
    if not isinstance(sharding, NamedSharding) or not any(set(mesh_axes(entry)) & set(axes) for entry in sharding.spec):
        return None
    left = [tuple(name for name in mesh_axes(entry) if name not in axes) for entry in sharding.spec]
    return PartitionSpec(*[entry[0] if len(entry) == 1 else entry or None for entry in left[stacked:]])


def _save_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """What is kept for the backward pass: everything that a change of its placement did not make."""
    return primitive.name != "sharding_constraint"


@frozen
class ExpertAllToAll(Wrapper):
    """Compute `layer` with its input and output split as `inside`, where all around it is split as `outside`.

    So each device sends what it has for the experts of the others, and gets back what they made of it. Left to itself
    XLA gathers the experts, or everything. The mesh is that of `jax.set_mesh`; without one this is the layer and
    nothing more.
    """

    inside: PartitionSpec
    outside: PartitionSpec

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def split(leaf: jax.Array, first: PartitionSpec, then: PartitionSpec) -> jax.Array:
            return constrain(constrain(leaf, first), then)

        x = jax.tree.map(lambda leaf: split(leaf, self.outside, self.inside), x)
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return jax.tree.map(lambda leaf: split(leaf, self.inside, self.outside), y), new


def exchange_examples(model: Layer, batch: PartitionSpec, axes: tuple[str, ...]) -> Layer:
    """The model with its experts, which lie over these axes of the mesh, exchanging examples that do so too."""
    outside = PartitionSpec(*batch[:1])
    rest = tuple(name for entry in outside for name in mesh_axes(entry) if name not in axes)

    def changed(where: str, layer: Layer) -> Layer:
        if isinstance(layer, ExpertAllToAll):
            return layer.layer  # which was changed before
        if not isinstance(layer, Map) or layer.variables != 0:
            return layer
        entries: list[Any] = [rest or None, *[None] * (layer.axis - 1), axes]
        return ExpertAllToAll(layer, PartitionSpec(*entries), outside)

    return map_layers(model, "", changed)
