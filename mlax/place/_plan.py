"""Plan: where every variable lives, how data moves and how activations are split, written down once."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mlax._jax import is_on_host
from mlax.core import Layer, Tree, check_key, flatten_paths, replace_leaves, variable_shapes
from mlax.optim import Optimizer, OptimizerState
from mlax.place._batches import batch_shardings
from mlax.place._constrained import constrained
from mlax.place._describe import Objective, described
from mlax.place._description import Description
from mlax.place._exchanged import exchanged
from mlax.place._gathered import gathered
from mlax.place._init import in_their_memory, init_in
from mlax.place._mesh import REST, filled, mesh_of, sizes_of
from mlax.place._product import refuse_product
from mlax.place._rules import Rules, joined, merged, rules_of
from mlax.place._stages import Stages
from mlax.place._where import Device, Where, memory_kind, names, staying

Rule = tuple[str, Any]  # a path pattern, and a PartitionSpec, `host`, `last(...)`, `spread(...)`, a device or a Where
EVERYWHERE = (("**", PartitionSpec()),)


class Plan:
    """Where every variable lives, how data moves, and how what is computed in between is split.

        plan = place.Plan(
            mesh={"data": 4, "model": 2},
            variables=[("**/attend/*/kernel", place.last("model")), ("**", P())],
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
    - `gather`: mesh axes that weights are only kept split over, and put together where they are used.
    - `exchange`: mesh axes over which both experts and examples are split, so that these are sent to those and back.
    - `stages`: how repeated parts are cut into a pipeline, if they are; see `place.pipeline`.
    - `devices`: those to use, all unless given.

    A plan is a description: it holds no arrays and is equal by value. Plans multiply: `fsdp(4) * tensor(model, x, 2)`.
    """

    def __init__(
        self,
        mesh: Mapping[str, int] | Mesh,
        variables: Sequence[Rule] | Rules = EVERYWHERE,
        *,
        slots: Sequence[Rule] | Rules = (),
        batch: PartitionSpec = PartitionSpec(),  # noqa: B008  # it never changes
        activations: Sequence[Rule] | Rules = (),
        gather: Sequence[str] = (),
        exchange: Sequence[str] = (),
        stages: Stages | None = None,
        devices: Sequence[Device] | None = None,
        name: str = "plan",
    ):
        self.sizes = sizes_of(mesh)
        self.variables = rules_of(variables)
        self.slots = rules_of(slots)
        self.batch = batch
        self.activations = rules_of(activations)
        self.gather, self.exchange = tuple(gather), tuple(exchange)
        self.stages = stages
        self.devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else devices and tuple(devices)
        self.name = name
        for entry in batch:
            for axis in names(entry):
                if axis not in dict(self.sizes):
                    raise ValueError(f"Plan: batch is {batch}, but the mesh has the axes {dict(self.sizes)}.")

    @property
    def mesh(self) -> Mesh:
        """The mesh of JAX, over the devices that there are."""
        return mesh_of(self.sizes, self.devices or tuple(jax.devices()))

    @property
    def shape(self) -> dict[str, int]:
        """The axes of the mesh and their sizes."""
        return filled(self.sizes, len(self.devices or jax.devices()))

    @property
    def batches(self) -> NamedSharding:
        """Where batches go, as for `train.Feed(..., sharding=plan.batches)`."""
        return NamedSharding(self.mesh, self.batch)

    def init(self, model: Layer, rng: jax.Array, x: Any) -> tuple[Tree, Tree]:
        """What `model.init` makes, each variable straight in its place and nowhere else before."""
        check_key("Plan.init", "init(model, rng, x)", rng, x)
        return init_in(model, rng, x, self.variable_shardings(model, x))

    def place(self, variables: Any) -> Any:
        """Move variables that there are, trainables or a pair of both, to their places; what is there stays."""
        return jax.device_put(variables, self.shardings(variables))

    def wired(self, model: Layer, x: Any) -> Layer:
        """The same model, computed as the plan says: cut in stages, activations split, weights gathered for use.

        Its variables are the same, and its numbers up to rounding; but a pipeline draws dropout for each microbatch.
        """
        if self.stages is not None:
            model = self.stages.wired(model)
        if self.exchange:
            model = exchanged(model, self.batch, self.exchange)
        if self.gather:
            model = gathered(model, self.variable_shardings(model, x)[0], self.gather)
        return constrained(model, self.activations)

    def shardings(self, variables: Any, *, strict: bool = False) -> Any:
        """The shardings of variables, trainables or a pair of both, arrays or `jax.ShapeDtypeStruct`s.

        What lies in host memory stays there, unless a rule names a memory. With `strict`, a rule that matches nothing
        is an error.
        """
        parts = variables if isinstance(variables, tuple) else (variables,)
        leaves = {path: leaf for part in parts for path, leaf in flatten_paths(part).items()}
        rules = self.variables if strict else self.variables.among(leaves)
        placed = {
            path: self._sharding(staying(merged(said, path, leaves[path], self.shape), leaves[path]))
            for path, said in rules.found(leaves, "variables").items()
        }
        trees = tuple(replace_leaves(part, placed) for part in parts)
        return trees if isinstance(variables, tuple) else trees[0]

    def variable_shardings(self, model: Layer, x: Any) -> tuple[Tree, Tree]:
        """The shardings of what `init` makes; every rule must match something."""
        found = self.shardings(in_their_memory(model, variable_shapes(model, x)), strict=True)
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
                where = merged(said, path, leaves[path], self.shape)
                split = where if any(each.split is not None for each in said) else None
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
        return described(self, model, x, optimizer, batch, objective, memory, compile)

    def fits(self, model: Layer, x: Any, optimizer: Optimizer | None = None, batch: Any = None, **options: Any) -> None:
        """Raise DoesNotFit, with what to change, if it needs more memory than there is; as `describe` says."""
        self.describe(model, x, optimizer, batch, **options).refuse_unless_fits()

    def over(self, devices: Sequence[Device]) -> "Plan":
        """The same plan over these devices."""
        return Plan(**{**self._fields, "devices": tuple(devices)})

    def __mul__(self, other: "Plan") -> "Plan":
        """Both plans at once, over a mesh with the axes of both."""
        refuse_product(self, other)
        return Plan(
            {**dict(self.sizes), **dict(other.sizes)},
            self.variables * other.variables,
            slots=self.slots * other.slots,
            batch=joined(self.batch, other.batch),
            activations=self.activations * other.activations,
            gather=self.gather + other.gather,
            exchange=self.exchange + other.exchange,
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
        names = ("variables", "slots", "batch", "activations", "gather", "exchange", "stages", "devices", "name")
        return {"mesh": self.sizes, **{name: getattr(self, name) for name in names}}

    def _sharding(self, where: Where, like: Sharding | None = None) -> Sharding:
        """The sharding that `where` says, split like `like` if it leaves that open."""
        if where.device is not None:
            return SingleDeviceSharding(where.device, memory_kind=memory_kind(where, where.device))
        if isinstance(like, SingleDeviceSharding):
            (device,) = like.device_set
            return SingleDeviceSharding(device, memory_kind=memory_kind(where, device))
        spec = like.spec if isinstance(like, NamedSharding) else where.split
        assert isinstance(spec, PartitionSpec)
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind(where, self.mesh.devices.flat[0]))
