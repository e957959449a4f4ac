"""Plan: where every variable is stored, how batches and activations are sharded, written down once."""

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mlax._jax import is_on_host, is_workaround
from mlax.core import (
    Documented,
    Layer,
    Tree,
    check_key,
    check_not_donated,
    flatten_paths,
    replace_leaves,
    signature,
    variable_shapes,
)
from mlax.optim import Optimizer, OptimizerState
from mlax.place._estimate import Objective, describe
from mlax.place._init import init_sharded, with_memory_kinds
from mlax.place._pipeline import PipelineConfig
from mlax.place._report import Description
from mlax.place._rules import (
    Device,
    Placement,
    Rules,
    as_rules,
    check_mesh_axes,
    keep_memory_kind,
    memory_kind,
    merge_placements,
    merge_specs,
    mesh_axes,
    num_shards,
    spec_axes,
)
from mlax.place._wrappers import all_gather_weights, constrain_activations, expert_all_to_all

Rule = tuple[str, Any]  # a path pattern, and what `as_placement` accepts
REPLICATED = (("**", PartitionSpec()),)


class Plan(metaclass=Documented):
    """Where every variable is stored, and how variables, batches and activations are sharded.

        plan = place.Plan(
            mesh={"data": 4, "model": 2},
            variables=[("**/attend/*/kernel", place.shard_last_axes("model")), ("**", P())],
            slots=[("**", place.host)],
            batch=P("data"),
        )
        trainables, non_trainables = plan.init(model, rng, x)

    - `mesh`: mesh axes and their sizes; -1 for all devices that are left.
    - `variables`: rules for trainables and non_trainables by path; variables that no rule matches are replicated.
    - `slots`: rules for the optimizer's slots by slot name and path, such as "mean/**"; what they do not specify is
      inherited from the parameter.
    - `batch`: the PartitionSpec of every array of a batch, truncated to its rank.
    - `activations`: rules for the outputs of parts by path; XLA chooses for all others.
    - `all_gather`: mesh axes over which weights are sharded only for storage, and all-gathered where they are used.
    - `all_to_all`: mesh axes that shard both experts and examples, which are sent to their experts and back.
    - `pipeline`: how the Repeats of a model are pipelined; see `place.pipeline`.
    - `devices`: the devices to use; all by default.

    A plan is a description: it holds no arrays and compares by value. Plans multiply: `fsdp(4) * tensor(model, x, 2)`.
    """

    _listed = ("init", "place", "parallelize", "describe", "batch_sharding")  # by `help`

    def __init__(
        self,
        mesh: Mapping[str, int] | Mesh,
        variables: Sequence[Rule] | Rules = REPLICATED,
        *,
        slots: Sequence[Rule] | Rules = (),
        batch: PartitionSpec = PartitionSpec(),  # noqa: B008  # immutable
        activations: Sequence[Rule] | Rules = (),
        all_gather: Sequence[str] = (),
        all_to_all: Sequence[str] = (),
        pipeline: PipelineConfig | None = None,
        devices: Sequence[Device] | None = None,
        name: str = "plan",
    ):
        self._sizes = _as_sizes(mesh)
        self.variables = as_rules(variables)
        self.slots = as_rules(slots)
        self.batch = batch
        self.activations = as_rules(activations)
        self.all_gather, self.all_to_all = _as_axes(all_gather), _as_axes(all_to_all)
        self.pipeline = pipeline
        self.devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else devices and tuple(devices)
        self.name = name
        _check_axes(self, [name for name, _ in self._sizes])

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh`, over the plan's devices or all devices."""
        return _make_mesh(self._sizes, self.devices or tuple(jax.devices()))

    @property
    def shape(self) -> dict[str, int]:
        """The size of each mesh axis, as in `mesh.shape`; -1 is resolved."""
        return _resolve_sizes(self._sizes, len(self.devices or jax.devices()))

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of batches, for `train.Feed(..., sharding=plan.batch_sharding)`."""
        return NamedSharding(self.mesh, self.batch)

    def init(self, model: Layer, rng: jax.Array, x: Any) -> tuple[Tree, Tree]:
        """The variables of `model.init`, each created with its sharding and nowhere else first."""
        check_key("Plan.init", "init(model, rng, x)", rng, x)
        return init_sharded(model, rng, x, self.variable_shardings(model, x))

    def place(self, variables: Any) -> Any:
        """Move existing variables, trainables or a pair with non_trainables, to their shardings by `jax.device_put`."""
        check_not_donated("Plan.place", variables=variables)
        return jax.device_put(variables, self.shardings(variables))

    def parallelize(self, model: Layer, x: Any) -> Layer:
        """The same model, computed as the plan says: pipelined, its activations sharded, its weights all-gathered.

        Variables are the same, and outputs up to rounding; but in a pipeline each microbatch has its own dropout mask.
        """
        if self.pipeline is not None:
            model = self.pipeline.apply(model)
        if self.all_to_all:
            model = expert_all_to_all(model, self.batch, self.all_to_all)
        if self.all_gather:
            model = all_gather_weights(model, self.variable_shardings(model, x)[0], self.all_gather)
        return constrain_activations(model, self.activations)

    def shardings(self, variables: Any, *, strict: bool = False) -> Any:
        """The shardings of variables, trainables or a pair with non_trainables, arrays or `jax.ShapeDtypeStruct`s.

        Variables in host memory stay there unless a rule names a memory. With `strict`, a rule that matches nothing is
        an error.
        """
        trees = variables if isinstance(variables, tuple) else (variables,)
        leaves = {path: leaf for tree in trees for path, leaf in flatten_paths(tree).items()}
        rules = self.variables if strict else self.variables.restrict(leaves)

        def sharding(path: str, placements: tuple[Placement, ...]) -> Sharding:
            merged = merge_placements(placements, path, leaves[path], self.shape)
            return self._sharding(keep_memory_kind(merged, leaves[path]))

        found = {path: sharding(path, placements) for path, placements in rules.match(leaves, "variables").items()}
        shardings = tuple(replace_leaves(tree, found) for tree in trees)
        return shardings if isinstance(variables, tuple) else shardings[0]

    def variable_shardings(self, model: Layer, x: Any) -> tuple[Tree, Tree]:
        """The shardings of the variables that `init` creates; a rule that matches nothing is an error."""
        found = self.shardings(with_memory_kinds(model, variable_shapes(model, x)), strict=True)
        if self.pipeline is not None:
            self.pipeline.check_mesh(self.shape)
        return found

    def slot_shardings(self, optimizer: Optimizer, trainables: Tree) -> OptimizerState:
        """The shardings of the optimizer's state for these trainables, arrays or `jax.ShapeDtypeStruct`s."""
        like_parameters = optimizer.partition(self.shardings(trainables), trainables)
        if not self.slots.lists:
            return like_parameters
        fields = jax.eval_shape(optimizer.init, trainables)._asdict()
        leaves = {path: leaf for path, leaf in flatten_paths(fields).items() if "/" in path}  # scalars are not slots
        shardings = flatten_paths(like_parameters._asdict())
        for path, placements in self.slots.match(leaves, "slots").items():
            if placements:
                merged = merge_placements(placements, path, leaves[path], self.shape)
                has_spec = any(placement.spec is not None for placement in placements)
                shardings[path] = self._sharding(merged, None if has_spec else shardings[path])
        return type(like_parameters)(**{name: replace_leaves(field, shardings, name) for name, field in fields.items()})

    def init_slots(self, optimizer: Optimizer, trainables: Tree) -> OptimizerState:
        """The initial state of an optimizer, each slot created sharded."""
        shardings = self.slot_shardings(optimizer, trainables)
        on_host = any(map(is_on_host, jax.tree.leaves(trainables)))
        if self.mesh.size == 1 and on_host:  # all slots at once might not fit on the device
            return jax.device_put(optimizer.init(trainables), shardings)
        return jax.jit(optimizer.init, out_shardings=shardings)(trainables)

    def batch_shardings(self, batch: Any, *, stacked: bool = False) -> Any:
        """The shardings of a batch, or of several stacked on a leading axis; raises if an axis does not divide."""
        return _batch_shardings(self.batch, self.mesh, batch, stacked)

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
        """The bytes of each device, by layer, and the transfers of a step; nothing is allocated.

        `batch` is a number of examples, by default that of `x`, or the shapes of a batch for an `objective` like that
        of `train.step`. Without an optimizer it describes inference. `memory` is what a device has, if it does not
        report that itself. The step is compiled; `compile=False` leaves that out, and with it the transfers. The memory
        is then an estimate, mostly within a fifth, for plans that shard only the examples of a batch (single, data,
        zero, fsdp, expert), and a lower bound without activations for others.
        """
        return describe(self, model, x, optimizer, batch, objective, memory, compile)

    def check_fits(
        self, model: Layer, x: Any, optimizer: Optimizer | None = None, batch: Any = None, **options: Any
    ) -> None:
        """Raise NotEnoughMemory, with what to change, if `describe` finds that a device has too little memory."""
        self.describe(model, x, optimizer, batch, **options).check_fits()

    def over(self, devices: Sequence[Device]) -> "Plan":
        """The same plan over these devices."""
        return Plan(**{**self._fields, "devices": tuple(devices)})

    def __mul__(self, other: "Plan") -> "Plan":
        """Both plans together, over a mesh with the axes of both."""
        _check_product(self, other)
        return Plan(
            {**dict(self._sizes), **dict(other._sizes)},
            self.variables * other.variables,
            slots=self.slots * other.slots,
            batch=merge_specs(self.batch, other.batch),
            activations=self.activations * other.activations,
            all_gather=self.all_gather + other.all_gather,
            all_to_all=self.all_to_all + other.all_to_all,
            pipeline=self.pipeline or other.pipeline,
            devices=self.devices or other.devices,
            name=f"{self.name} x {other.name}",
        )

    def __repr__(self) -> str:
        axes = ", ".join(f"{name} {'all' if size == REST else size}" for name, size in self._sizes)
        return f"Plan({self.name}{': ' * bool(axes)}{axes})"

    def __eq__(self, other: object) -> Any:
        return self._fields == other._fields if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._fields.values()))

    @property
    def _fields(self) -> dict[str, Any]:
        names = (
            "variables",
            "slots",
            "batch",
            "activations",
            "all_gather",
            "all_to_all",
            "pipeline",
            "devices",
            "name",
        )
        return {"mesh": self._sizes, **{name: getattr(self, name) for name in names}}

    def _sharding(self, placement: Placement, like: Sharding | None = None) -> Sharding:
        """The sharding of a placement; its spec, or single device, is that of `like` if given."""
        if placement.device is not None:
            return SingleDeviceSharding(placement.device, memory_kind=memory_kind(placement, placement.device))
        if isinstance(like, SingleDeviceSharding):
            (device,) = like.device_set
            return SingleDeviceSharding(device, memory_kind=memory_kind(placement, device))
        spec = like.spec if isinstance(like, NamedSharding) else placement.spec
        assert isinstance(spec, PartitionSpec)
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind(placement, self.mesh.devices.flat[0]))


def _as_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """One name, or several, as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check_axes(plan: Plan, mesh: Sequence[str]) -> None:
    """Raise if a field of the plan names an axis that the mesh does not have."""
    for name in ("variables", "slots", "activations"):
        getattr(plan, name).check_axes(name, mesh)
    for name in ("all_gather", "all_to_all"):
        check_mesh_axes(name, getattr(plan, name), mesh)
    check_mesh_axes(f"batch, {plan.batch},", spec_axes(plan.batch), mesh)
    if plan.pipeline is not None:
        check_mesh_axes("pipeline", (plan.pipeline.axis,), mesh)


REST = -1  # the size of a mesh axis that takes all devices that are left


def _as_sizes(mesh: Any) -> tuple[tuple[str, int], ...]:
    """(name, size) of each mesh axis, from a dict, pairs or a `jax.sharding.Mesh`."""
    sizes = tuple(mesh.shape.items() if isinstance(mesh, Mesh) else dict(mesh).items())
    for name, size in sizes:
        if not isinstance(name, str) or not isinstance(size, int) or (size < 1 and size != REST):
            raise ValueError(
                f"mesh: {name!r} is {size!r}, but must be a number of devices, or {REST} for all that are left."
            )
    if sum(size == REST for _, size in sizes) > 1:
        raise ValueError(f"mesh: {dict(sizes)} has the size {REST} more than once; give all sizes but one.")
    return sizes


def _resolve_sizes(sizes: tuple[tuple[str, int], ...], devices: int) -> dict[str, int]:
    """The sizes of a mesh over this number of devices, a size of -1 replaced by what is left."""
    given = math.prod(size for _, size in sizes if size != REST)
    if devices % given or devices < given:
        axes = " x ".join(f"{name} {size}" for name, size in sizes if size != REST)
        divisors = [number for number in range(1, devices + 1) if devices % number == 0]
        available = "1 is available" if devices == 1 else f"{devices} are available"
        fewer = f"Use some of them by plan.over(jax.devices()[:{given}]), or simulate" * (given < devices)
        raise ValueError(
            f"mesh: {axes} needs a multiple of {given} devices, but {available}; the product of the sizes must be one "
            f"of {', '.join(map(str, divisors))}. {fewer or 'Simulate'} more on a CPU by "
            'jax.config.update("jax_num_cpu_devices", n) before the first computation.'
        )
    return {name: devices // given if size == REST else size for name, size in sizes}


@functools.lru_cache(maxsize=64)
def _make_mesh(sizes: tuple[tuple[str, int], ...], devices: tuple[Any, ...]) -> Mesh:
    """The mesh over the first of these devices; its axes are auto, so that XLA propagates shardings."""
    shape = _resolve_sizes(sizes, len(devices))
    axis_types = (AxisType.Auto,) * len(shape)
    used = devices[: math.prod(shape.values())]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=axis_types, devices=used)


def _batch_shardings(spec: PartitionSpec, mesh: Mesh, batch: Any, stacked: bool) -> Any:
    sizes = dict(mesh.shape)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        entries = ([None] * stacked + [*spec])[: len(leaf.shape)]
        for axis, entry in enumerate(entries):
            size, shards = leaf.shape[axis], num_shards(entry, sizes)
            if size % shards:
                name = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
                raise ValueError(
                    f"{name} is {signature(leaf)}, but the plan shards its axis {axis} over {shards} devices ({spec} "
                    f"over {sizes}), and {size} is not a multiple of {shards}; use {size // shards * shards or shards} "
                    f"or {-(-size // shards) * shards}."
                )
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree_util.tree_map_with_path(sharding, batch)


def _check_product(plan: Plan, other: Any) -> None:
    if not isinstance(other, Plan):
        raise TypeError(f"{plan!r} times {other!r}: multiply plans by plans: place.data(2) * place.pipeline(...).")
    both = dict(plan._sizes).keys() & dict(other._sizes).keys()
    if both:
        raise ValueError(
            f"the plans {plan.name} and {other.name} both have a mesh axis {min(both)!r}; rename one of them, as in "
            "place.fsdp(4, axis='fsdp')."
        )
    if plan.devices and other.devices and plan.devices != other.devices:
        raise ValueError(f"the plans {plan.name} and {other.name} have different devices; pass devices to one only.")
    if plan.pipeline and other.pipeline:
        raise ValueError("two pipelines cannot be multiplied; use one with as many stages as both.")


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
    """Whether an equation constrains a sharding as plans do; the constraints of `ops.conv` are for XLA's sake."""
    return any(
        (equation.primitive.name == "sharding_constraint" and not is_workaround(equation))
        or any(map(_constrains_shardings, core.jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
