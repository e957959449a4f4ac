"""Pipelined: a Repeat whose layers are distributed over the devices of a mesh axis."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mlax.core import Repeat, Tree, Wrapper, frozen, short_repr, signature, with_fields


@frozen
class Pipelined(Wrapper):
    """Compute a `Repeat` in `stages`: the devices along a mesh axis hold a part of its times each.

    The batch is cut into `microbatches`, which follow each other through the stages; JAX's derivative of that is the
    same in reverse (GPipe, https://arxiv.org/abs/1811.06965). Every stage's input is stored for the backward pass, and
    the rest is computed again. Other mesh axes are left to the compiler, so that this goes together with any placement
    over them.

    The numbers, and the variables, are those of the `Repeat`; the leading axis of each variable belongs on the mesh
    axis. A random layer gets the key that the `Repeat` would give it for one microbatch alone, with
    `jax.random.fold_in(rng, microbatch)`. A layer with state is refused: its microbatches are under way together.

    The mesh is that of `jax.set_mesh`. If there is none, or none with this axis, it is the `Repeat` and nothing more.
    """

    stages: int
    microbatches: int
    axis: str = "stage"

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Repeat):
            raise TypeError(
                f"Pipelined: the layer is {short_repr(self.layer)}, but must be a Repeat, to be cut in stages."
            )
        for name in ("stages", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Pipelined: {name} is {value!r}, but must be a whole number of at least 1.")
        if not isinstance(self.axis, str):
            raise TypeError(f"Pipelined: axis is {self.axis!r}, but must be the name of a mesh axis.")
        times = self.repeat.times
        if times % self.stages:
            fitting = ", ".join(str(n) for n in range(1, times + 1) if times % n == 0)
            raise ValueError(
                f"Pipelined: {times} times do not divide into {self.stages} stages, {times % self.stages} are left "
                f"over; take {fitting} stages, or {times - times % self.stages + self.stages} times."
            )

    @property
    def repeat(self) -> Repeat:
        """The layer, which is a Repeat."""
        return cast(Repeat, self.layer)

    @property
    def bubble(self) -> float:
        """The share of its time that a stage waits, while the pipeline fills and drains."""
        return bubble_fraction(self.stages, self.microbatches)

    def describe(self) -> str:
        """The stages, and what they cost, in a sentence."""
        return (
            f"{self.stages} stages of {self.repeat.times // self.stages} over {self.axis!r}, {self.microbatches} "
            f"microbatches: each stage waits {self.bubble:.0%} of the time"
        )

    def init(self, rng, x):
        trainables, non_trainables = self.layer.init(rng, x)
        self._refuse_state(non_trainables)
        return trainables, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        self._refuse_state(non_trainables)
        self.layer.check_variables(x, trainables, None)
        kind = self._axis_type()
        if kind is None:
            return self.layer.fwd(x, trainables, rng=rng, inference_mode=inference_mode)
        if kind is AxisType.Manual:  # whoever runs the stages wants to know where the pipeline is
            return bind_pipeline(self, x, trainables, rng, inference_mode), None
        return merge_microbatches(
            self._all(split_microbatches(x, self.microbatches, "microbatches"), trainables, rng, inference_mode)
        ), None

    def stage(self, stage: jax.Array, x: Any, own: Tree, rng: jax.Array | None, inference_mode: bool) -> Any:
        """One microbatch through one stage, which has its own slice of the variables; `rng` is the microbatch's."""
        keys = None
        layer = with_fields(self.repeat, times=self.repeat.times // self.stages)
        if rng is not None:
            keys = jax.random.split(rng, self.repeat.times)
            keys = lax.dynamic_slice_in_dim(keys, stage * np.int32(layer.times), layer.times)
        return layer.with_keys(x, own, None, keys, inference_mode)[0]

    def sent(self, tree: Any, by: int) -> Any:
        """What each stage has, sent to the next one (`by` 1) or to the one before (-1)."""
        pairs = [(stage, (stage + by) % self.stages) for stage in range(self.stages)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, pairs), tree)

    def _all(self, parts: Any, trainables: Tree, rng: jax.Array | None, inference_mode: bool) -> Any:
        ticks, last = self.microbatches + self.stages - 1, self.stages - 1

        def run(stage: jax.Array, own: Tree, parts: Any, rng: jax.Array | None) -> Any:
            stage, parts = stage[0], jax.tree.map(lambda leaf: leaf[0], parts)

            @jax.checkpoint
            def through(x: Any, own: Tree, rng: jax.Array | None) -> Any:
                return self.stage(stage, x, own, rng, inference_mode)

            def tick(received: Any, now: tuple[jax.Array, Any]) -> tuple[Any, Any]:
                time, fresh = now
                x = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), fresh, received)
                y = through(x, own, None if rng is None else jax.random.fold_in(rng, time - stage))
                return self.sent(y, 1), y

            # while a stage waits it computes for nothing, on numbers that do no harm: a conditional could hang
            first = jax.tree.map(lambda leaf: leaf[0], parts)
            _, ys = lax.scan(tick, first, (jnp.arange(ticks, dtype=np.int32), _repeat_last(parts, last)))
            return jax.tree.map(lambda leaf: leaf[None, last:], ys)

        piped = jax.shard_map(
            run,
            in_specs=(P(self.axis), P(self.axis), P(self.axis), P()),
            out_specs=P(self.axis),
            axis_names={self.axis},
            check_vma=False,
        )
        # a copy for each stage: what they shared would have a gradient that XLA's CPU compiler cannot sum in bfloat16
        parts = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.stages, *leaf.shape)), parts)
        ys = jax.jit(piped)(jnp.arange(self.stages, dtype=np.int32), trainables, parts, rng)
        return jax.tree.map(lambda leaf: leaf[last], ys)

    def _axis_type(self) -> Any:
        """How the mesh that is set treats the axis; None if there is no such axis."""
        mesh = jax.sharding.get_abstract_mesh()
        if self.axis not in mesh.axis_names:
            return None
        if mesh.shape[self.axis] != self.stages:
            raise ValueError(
                f"{short_repr(self)}: there are {self.stages} stages, but the mesh has {mesh.shape[self.axis]} devices "
                f"along {self.axis!r}; make them as many."
            )
        return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[self.axis]

    def _refuse_state(self, non_trainables: Tree) -> None:
        if non_trainables is not None:
            raise ValueError(
                f"{short_repr(self)}: the layer has state (non_trainables), which cannot follow several "
                "microbatches that "
                "are under way together; take layers without, as GroupNorm in place of BatchNorm."
            )


def _repeat_last(parts: Any, more: int) -> Any:
    """The parts, the last of them some times more."""

    def longer(leaf: jax.Array) -> jax.Array:
        return jnp.concatenate([leaf, jnp.broadcast_to(leaf[-1:], (more, *leaf.shape[1:]))])

    return jax.tree.map(longer, parts)


def split_microbatches(batch: Any, number: int, name: str) -> Any:
    """The batch in `number` parts on a leading axis, each of every number-th example.

    So no example leaves the device that holds it, if a device holds as many as there are parts, or a multiple.
    `name` is what the number is called in the error, if it does not divide the batch.
    """

    def split(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0 or leaf.shape[0] % number:
            raise ValueError(
                f"{name} is {number}, but does not divide the batch: {signature(leaf)}; "
                f"take a batch that is a multiple of {number}."
            )
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // number, number, *leaf.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def merge_microbatches(parts: Any) -> Any:
    """The batch of which these are the parts."""

    def join(leaf: jax.Array) -> jax.Array:
        return jnp.swapaxes(leaf, 0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])

    return jax.tree.map(join, parts)


def bubble_fraction(stages: int, microbatches: int) -> float:
    """The share of its time that a stage waits, while the pipeline fills and drains."""
    return (stages - 1) / (microbatches + stages - 1)


pipeline_p = Primitive("pipelined")
pipeline_p.multiple_results = True


def bind_pipeline(layer: Any, x: Any, trainables: Tree, rng: jax.Array | None, inference_mode: bool) -> Any:
    """What `layer`, a `Pipelined`, would give, not computed: whoever traced this puts the pipeline in its place."""
    leaves, tree = jax.tree.flatten((x, trainables, rng))
    out = pipeline_p.bind(*leaves, layer=layer, tree=tree, inference_mode=inference_mode)
    return jax.tree.unflatten(jax.tree.structure(x), out)


@pipeline_p.def_abstract_eval
def _(*leaves: Any, layer: Any, tree: Any, inference_mode: bool) -> list[Any]:
    x, _, _ = jax.tree.unflatten(tree, leaves)
    return jax.tree.leaves(x)
