"""Plan: where every variable is stored, how batches and activations are sharded, written down once."""

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mlax._jax import is_on_host
from mlax.core import Layer, Tree, check_key, flatten_paths, replace_leaves, signature, variable_shapes
from mlax.optim import Optimizer, OptimizerState
from mlax.place._describe import Objective, describe
from mlax.place._description import Description
from mlax.place._init import init_sharded, with_memory_kinds
from mlax.place._pipeline import Stages
from mlax.place._rules import (
    Device,
    Placement,
    Rules,
    as_rules,
    keep_memory_kind,
    memory_kind,
    merge_placements,
    merge_specs,
    mesh_axes,
    num_shards,
)
from mlax.place._wrappers import all_gather_weights, constrain_activations, exchange_examples

Rule = tuple[str, Any]  # a path pattern, and what `as_placement` accepts
REPLICATED = (("**", PartitionSpec()),)


class Plan:
    """Where every variable lives, how data moves, and how what is computed in between is split.

        plan = place.Plan(
            mesh={"data": 4, "model": 2},
            variables=[("**/attend/*/kernel", place.shard_last_axes("model")), ("**", P())],
            slots=[("**", place.host)],
            batch=P("data"),
        )
        trainables, non_trainables = plan.init(model, rng, x)

    - `mesh`: named numbers of devices; -1 stands for all that are left.
    - `variables`: rules for trainables and non_trainables by path; what no rule names is whole on every device.
    - `slots`: rules for what the optimizer keeps, by the slot's name and the path: "mean/**", say; what they leave
      open is as with the parameter.
    - `batch`: the split of every array of a batch, cut to its axes.
    - `activations`: rules for the outputs of parts by path; all else is for XLA to choose.
    - `all_gather`: mesh axes that weights are only kept split over, and put together where they are used.
    - `all_to_all`: mesh axes over which both experts and examples are split, so that these are sent to those and back.
    - `stages`: how repeated parts are cut into a pipeline, if they are; see `place.pipeline`.
    - `devices`: those to use, all unless given.

    A plan is a description: it holds no arrays and is equal by value. Plans multiply: `fsdp(4) * tensor(model, x, 2)`.
    """

    def __init__(
        self,
        mesh: Mapping[str, int] | Mesh,
        variables: Sequence[Rule] | Rules = REPLICATED,
        *,
        slots: Sequence[Rule] | Rules = (),
        batch: PartitionSpec = PartitionSpec(),  # noqa: B008  # it never changes
        activations: Sequence[Rule] | Rules = (),
        all_gather: Sequence[str] = (),
        all_to_all: Sequence[str] = (),
        stages: Stages | None = None,
        devices: Sequence[Device] | None = None,
        name: str = "plan",
    ):
        self.sizes = as_sizes(mesh)
        self.variables = as_rules(variables)
        self.slots = as_rules(slots)
        self.batch = batch
        self.activations = as_rules(activations)
        self.all_gather, self.all_to_all = tuple(all_gather), tuple(all_to_all)
        self.stages = stages
        self.devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else devices and tuple(devices)
        self.name = name
        for entry in batch:
            for axis in mesh_axes(entry):
                if axis not in dict(self.sizes):
                    raise ValueError(f"Plan: batch is {batch}, but the mesh has the axes {dict(self.sizes)}.")

    @property
    def mesh(self) -> Mesh:
        """The mesh of JAX, over the devices that there are."""
        return make_mesh(self.sizes, self.devices or tuple(jax.devices()))

    @property
    def shape(self) -> dict[str, int]:
        """The axes of the mesh and their sizes."""
        return resolve_sizes(self.sizes, len(self.devices or jax.devices()))

    @property
    def batches(self) -> NamedSharding:
        """Where batches go, as for `train.Feed(..., sharding=plan.batches)`."""
        return NamedSharding(self.mesh, self.batch)

    def init(self, model: Layer, rng: jax.Array, x: Any) -> tuple[Tree, Tree]:
        """What `model.init` makes, each variable straight in its place and nowhere else before."""
        check_key("Plan.init", "init(model, rng, x)", rng, x)
        return init_sharded(model, rng, x, self.variable_shardings(model, x))

    def place(self, variables: Any) -> Any:
        """Move variables that there are, trainables or a pair of both, to their places; what is there stays."""
        return jax.device_put(variables, self.shardings(variables))

    def parallelize(self, model: Layer, x: Any) -> Layer:
        """The same model, computed as the plan says: cut in stages, activations split, weights gathered for use.

        Its variables are the same, and its numbers up to rounding; but a pipeline draws dropout for each microbatch.
        """
        if self.stages is not None:
            model = self.stages.pipeline(model)
        if self.all_to_all:
            model = exchange_examples(model, self.batch, self.all_to_all)
        if self.all_gather:
            model = all_gather_weights(model, self.variable_shardings(model, x)[0], self.all_gather)
        return constrain_activations(model, self.activations)

    def shardings(self, variables: Any, *, strict: bool = False) -> Any:
        """The shardings of variables, trainables or a pair of both, arrays or `jax.ShapeDtypeStruct`s.

        What lies in host memory stays there, unless a rule names a memory. With `strict`, a rule that matches nothing
        is an error.
        """
        parts = variables if isinstance(variables, tuple) else (variables,)
        leaves = {path: leaf for part in parts for path, leaf in flatten_paths(part).items()}
        rules = self.variables if strict else self.variables.among(leaves)
        placed = {
            path: self._sharding(keep_memory_kind(merge_placements(said, path, leaves[path], self.shape), leaves[path]))
            for path, said in rules.found(leaves, "variables").items()
        }
        trees = tuple(replace_leaves(part, placed) for part in parts)
        return trees if isinstance(variables, tuple) else trees[0]

    def variable_shardings(self, model: Layer, x: Any) -> tuple[Tree, Tree]:
        """The shardings of what `init` makes; every rule must match something."""
        found = self.shardings(with_memory_kinds(model, variable_shapes(model, x)), strict=True)
        if self.stages is not None:
            self.stages.check(self.shape)
        return found

    def slot_shardings(self, optimizer: Optimizer, trainables: Tree) -> OptimizerState:
        """The shardings of the optimizer's state beside these trainables, arrays or `jax.ShapeDtypeStruct`s."""
        own = optimizer.partition(self.shardings(trainables), trainables)
        if not self.slots.lists:
            return own
        state = jax.eval_shape(optimizer.init, trainables)
        fields = state._asdict()
        leaves = {path: leaf for path, leaf in flatten_paths(fields).items() if "/" in path}  # a scalar is no slot
        found = self.slots.found(leaves, "slots")
        placed = flatten_paths(own._asdict())
        for path, said in found.items():
            if said:
                where = merge_placements(said, path, leaves[path], self.shape)
                split = where if any(each.spec is not None for each in said) else None
                placed[path] = self._sharding(where, None if split else placed[path])
        return type(own)(**{name: replace_leaves(field, placed, name) for name, field in fields.items()})

    def init_slots(self, optimizer: Optimizer, trainables: Tree) -> OptimizerState:
        """The first state of an optimizer, each slot straight in its place."""
        places = self.slot_shardings(optimizer, trainables)
        if self.mesh.size == 1 and any(
            map(is_on_host, jax.tree.leaves(trainables))
        ):  # which might not fit on the device
            return jax.device_put(optimizer.init(trainables), places)
        return jax.jit(optimizer.init, out_shardings=places)(trainables)

    def batch_shardings(self, batch: Any, *, stacked: bool = False) -> Any:
        """The shardings of a batch, or of several stacked on a leading axis; refuses one that does not divide."""
        return batch_shardings(self.batch, self.mesh, batch, stacked)

    def describe(
        self,
        model: Layer,
        x: Any,
        optimizer: Optimizer | None = None,
        batch: Any = None,
        *,
        objective: Objective | None = None,
        memory: int | None = None,
        compile: bool = True,
    ) -> Description:
        """What each device would hold, by layer, and what would move in a step; nothing is allocated.

        `batch` is a number of examples, those of `x` unless given; or the shapes of a batch for the `objective`, as
        `train.step` takes it. Without an optimizer it is about inference. `memory` is what a device has, unless it
        says so itself. It compiles the step; `compile=False` leaves that out, and with it what moves.
        """
        return describe(self, model, x, optimizer, batch, objective, memory, compile)

    def check_fits(
        self, model: Layer, x: Any, optimizer: Optimizer | None = None, batch: Any = None, **options: Any
    ) -> None:
        """Raise NotEnoughMemory, with what to change, if it needs more memory than there is; as `describe` says."""
        self.describe(model, x, optimizer, batch, **options).check_fits()

    def over(self, devices: Sequence[Device]) -> "Plan":
        """The same plan over these devices."""
        return Plan(**{**self._fields, "devices": tuple(devices)})

    def __mul__(self, other: "Plan") -> "Plan":
        """Both plans at once, over a mesh with the axes of both."""
        check_product(self, other)
        return Plan(
            {**dict(self.sizes), **dict(other.sizes)},
            self.variables * other.variables,
            slots=self.slots * other.slots,
            batch=merge_specs(self.batch, other.batch),
            activations=self.activations * other.activations,
            all_gather=self.all_gather + other.all_gather,
            all_to_all=self.all_to_all + other.all_to_all,
            stages=self.stages or other.stages,
            devices=self.devices or other.devices,
            name=f"{self.name} x {other.name}",
        )

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} {'all' if size == REST else size}" for name, size in self.sizes)
        return f"Plan({self.name}{': ' * bool(axes)}{axes})"

    def __eq__(self, other: object) -> Any:
        return self._fields == other._fields if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._fields.values()))

    @property
    def _fields(self) -> dict[str, Any]:
        names = ("variables", "slots", "batch", "activations", "all_gather", "all_to_all", "stages", "devices", "name")
        return {"mesh": self.sizes, **{name: getattr(self, name) for name in names}}

    def _sharding(self, where: Placement, like: Sharding | None = None) -> Sharding:
        """The sharding that `where` says, split like `like` if it leaves that open."""
        if where.device is not None:
            return SingleDeviceSharding(where.device, memory_kind=memory_kind(where, where.device))
        if isinstance(like, SingleDeviceSharding):
            (device,) = like.device_set
            return SingleDeviceSharding(device, memory_kind=memory_kind(where, device))
        spec = like.spec if isinstance(like, NamedSharding) else where.spec
        assert isinstance(spec, PartitionSpec)
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind(where, self.mesh.devices.flat[0]))


REST = -1  # as many as are left


def as_sizes(given: Any) -> tuple[tuple[str, int], ...]:
    """Named sizes from a dict, pairs, or a mesh of JAX."""
    pairs = tuple(given.shape.items() if isinstance(given, Mesh) else dict(given).items())
    for name, size in pairs:
        if not isinstance(name, str) or not isinstance(size, int) or (size < 1 and size != REST):
            raise ValueError(f"mesh: {name!r} is {size!r}, but must be a number of devices, or {REST} for all others.")
    if sum(size == REST for _, size in pairs) > 1:
        raise ValueError(f"mesh: {dict(pairs)} leaves more than one axis to be found; say all but one.")
    return pairs


def resolve_sizes(sizes: tuple[tuple[str, int], ...], devices: int) -> dict[str, int]:
    """The sizes, with the one that was left open."""
    said = math.prod(size for _, size in sizes if size != REST)
    left = [name for name, size in sizes if size == REST]
    if devices % said or devices < said:
        by = " x ".join(f"{name} {size}" for name, size in sizes if size != REST)
        fitting = [number for number in range(1, devices + 1) if devices % number == 0]
        fewer = f"Use some of them by plan.over(jax.devices()[:{said}]), or simulate" if said < devices else "Simulate"
        raise ValueError(
            f"mesh: {by} = {said} does not divide the {devices} device{'s' * (devices != 1)} there are; the numbers "
            f"that do are {', '.join(map(str, fitting))}. {fewer} more on a CPU "
            'by jax.config.update("jax_num_cpu_devices", n) before the first computation.'
        )
    return {name: devices // said if name in left else size for name, size in sizes}


@functools.lru_cache(maxsize=64)
def make_mesh(sizes: tuple[tuple[str, int], ...], devices: tuple[Any, ...]) -> Mesh:
    """The mesh over the first of these devices, whose axes XLA may split arrays over as it sees fit."""
    shape: Mapping[str, int] = resolve_sizes(sizes, len(devices))
    number = math.prod(shape.values())
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=devices[:number])


def batch_shardings(split: PartitionSpec, mesh: Mesh, batch: Any, stacked: bool) -> Any:
    """The shardings of a batch, or of several stacked on a leading axis; refuses one that does not divide."""
    sizes = dict(mesh.shape)

    def of(path: Any, leaf: Any) -> NamedSharding:
        entries = ([None] * stacked + [*split])[: len(leaf.shape)]
        for axis, entry in enumerate(entries):
            number = num_shards(entry, sizes)
            if leaf.shape[axis] % number:
                place = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
                size = leaf.shape[axis]
                raise ValueError(
                    f"{place} is {signature(leaf)}, but the plan splits its axis {axis} into {number} "
                    f"({split} over {sizes}), and {size} is no multiple of it; take "
                    f"{size // number * number or number} or {-(-size // number) * number}."
                )
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree_util.tree_map_with_path(of, batch)


def check_product(plan: Any, other: Any) -> None:
    """Refuse what is no plan, and plans that cannot hold at once."""
    if not isinstance(other, type(plan)):
        raise TypeError(f"{plan!r} times {other!r}: multiply plans by plans, as place.data(2) * place.pipeline(...).")
    both = dict(plan.sizes).keys() & dict(other.sizes).keys()
    if both:
        raise ValueError(
            f"the plans {plan.name} and {other.name} both have a mesh axis {min(both)!r}; name that of one otherwise, "
            "as by place.fsdp(4, axis='fsdp')."
        )
    if plan.devices and other.devices and plan.devices != other.devices:
        raise ValueError(f"the plans {plan.name} and {other.name} are of different devices; give them to one only.")
    if plan.stages and other.stages:
        raise ValueError("two pipelines cannot be multiplied; make one of as many stages.")


def warn_unless_parallelized(plan: Plan, variables: Any, jaxpr: Any) -> None:
    """Warn if a plan says how parts of a model are computed, but the program traced for it constrains no sharding."""
    if plan.mesh.size == 1 or _constrains_shardings(getattr(jaxpr, "jaxpr", jaxpr)):
        return
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(variables) if isinstance(leaf.sharding, NamedSharding)]
    sharded_over = {axis for spec in specs for entry in spec for axis in mesh_axes(entry)}
    if plan.activations.lists or not sharded_over.isdisjoint({*plan.all_gather, *plan.all_to_all}):
        warnings.warn(
            f"{plan} says how parts of a model are computed, but the objective's model does not follow it; call "
            "plan.parallelize(model, x) and train that model, or XLA transfers and computes more than it needs to.",
            stacklevel=2,
        )


def _constrains_shardings(jaxpr: Any) -> bool:
    """Whether an equation fixes the sharding of an array; those of `ops.conv` leave some of its axes unconstrained."""
    return any(
        (equation.primitive.name == "sharding_constraint" and not equation.params["unconstrained_dims"])
        or any(map(_constrains_shardings, core.jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
