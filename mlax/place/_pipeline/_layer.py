"""Pipelined: a Repeat whose layers are distributed over the devices of a mesh axis."""

from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mlax._objective import split_microbatches
from mlax.core import Repeat, Tree, Wrapper, frozen, short_repr, with_fields


@frozen
class Pipelined(Wrapper):
    """Compute a `Repeat` in `stages`: each device along a mesh axis holds an equal share of its layers.

    The batch is split into `microbatches`, which go from stage to stage; JAX's derivative of that is the same in
    reverse (GPipe, https://arxiv.org/abs/1811.06965). Each stage's input is stored for the backward pass, which
    recomputes the rest. Other mesh axes are left to the compiler, so this combines with any sharding over them.

    Outputs and variables are those of the `Repeat`; the leading axis of each variable belongs on the mesh axis. Each
    microbatch has the keys that the `Repeat` would derive from `jax.random.fold_in(rng, microbatch)`. A layer with
    state is an error, since several microbatches are in flight at once.

    The mesh is that of `jax.set_mesh`. Without a mesh that has this axis, this is the `Repeat` itself.
    """

    needs_repeat: ClassVar[bool] = True

    stages: int  # of devices
    microbatches: int  # of a batch
    axis: str = "stage"  # of the mesh

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Repeat):
            raise TypeError(f"Pipelined: the layer is {short_repr(self.layer)}, but must be a Repeat.")
        for name in ("stages", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Pipelined: {name} is {value!r}, but must be an integer of at least 1.")
        if not isinstance(self.axis, str):
            raise TypeError(f"Pipelined: axis is {self.axis!r}, but must be the name of a mesh axis.")
        times = self.repeat.times
        if times % self.stages:
            divisors = ", ".join(str(n) for n in range(1, times + 1) if times % n == 0)
            raise ValueError(
                f"Pipelined: {self.stages} stages do not divide the {times} layers of the Repeat; use {divisors} "
                f"stages, or {times - times % self.stages + self.stages} layers."
            )

    @property
    def repeat(self) -> Repeat:
        """The Repeat."""
        return cast(Repeat, self.layer)

    @property
    def bubble(self) -> float:
        """The fraction of its time for which a stage is idle, while the pipeline fills and drains."""
        return bubble_fraction(self.stages, self.microbatches)

    def describe(self) -> str:
        """The stages, microbatches and bubble in a sentence."""
        return (
            f"{self.stages} stages of {self.repeat.times // self.stages} layers over {self.axis!r}, "
            f"{self.microbatches} microbatches: {self.bubble:.0%} bubble"
        )

    def init(self, rng, x):
        trainables, non_trainables = self.layer.init(rng, x)
        self._check_stateless(non_trainables)
        return trainables, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        self._check_stateless(non_trainables)
        self.layer.check_variables(x, trainables, None)
        axis_type = self._axis_type()
        if axis_type is None:
            return self.layer.fwd(x, trainables, rng=rng, inference_mode=inference_mode)
        if self.repeat.has_constants(x, trainables, None, rng, inference_mode):  # they pass with their microbatch
            pipelined = with_fields(self, layer=self.repeat.carry_constants())
            (y, *_), _ = pipelined.fwd(x, trainables, rng=rng, inference_mode=inference_mode)
            return y, None
        if axis_type is AxisType.Manual:  # traced by a schedule, which looks for the pipeline in the jaxpr
            return bind_pipeline(self, x, trainables, rng, inference_mode), None
        parts = split_microbatches(x, self.microbatches, "microbatches")
        return merge_microbatches(self._gpipe(parts, trainables, rng, inference_mode)), None

    def run_stage(self, stage: jax.Array, x: Any, own: Tree, rng: jax.Array | None, inference_mode: bool) -> Any:
        """One microbatch through one stage, with its own slice of the variables; `rng` is the microbatch's key."""
        keys = None
        layer = with_fields(self.repeat, times=self.repeat.times // self.stages)
        if rng is not None:
            keys = jax.random.split(rng, self.repeat.times)
            keys = lax.dynamic_slice_in_dim(keys, stage * np.int32(layer.times), layer.times)
        y, captured = layer.apply_with_keys(x, own, None, keys, inference_mode)
        if captured is not None:  # the layers have no state
            raise ValueError(
                f"{short_repr(self)}: outputs inside a pipeline cannot be captured, since each stage holds some of "
                "them; capture that of the whole pipeline, or run without a mesh that has the axis."
            )
        return y

    def send(self, tree: Any, offset: int) -> Any:
        """Send the arrays of each stage to the next stage (`offset` 1) or to the previous one (-1)."""
        pairs = [(stage, (stage + offset) % self.stages) for stage in range(self.stages)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, pairs), tree)

    def _gpipe(self, parts: Any, trainables: Tree, rng: jax.Array | None, inference_mode: bool) -> Any:
        """The outputs of all microbatches, on a leading axis."""
        ticks, last = self.microbatches + self.stages - 1, self.stages - 1

        def run(stage: jax.Array, own: Tree, parts: Any, rng: jax.Array | None) -> Any:
            stage, parts = stage[0], jax.tree.map(lambda leaf: leaf[0], parts)

            @jax.checkpoint
            def run_stage(x: Any, own: Tree, rng: jax.Array | None) -> Any:
                return self.run_stage(stage, x, own, rng, inference_mode)

            def tick(received: Any, xs: tuple[jax.Array, Any]) -> tuple[Any, Any]:
                time, part = xs
                x = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), part, received)
                y = run_stage(x, own, None if rng is None else jax.random.fold_in(rng, time - stage))
                return self.send(y, 1), y

            # in the bubble a stage computes on repeated microbatches, for nothing: a conditional could hang
            first = jax.tree.map(lambda leaf: leaf[0], parts)
            _, ys = lax.scan(tick, first, (jnp.arange(ticks, dtype=np.int32), _repeat_last(parts, last)))
            return jax.tree.map(lambda leaf: leaf[None, last:], ys)

        pipeline = jax.shard_map(
            run,
            in_specs=(P(self.axis), P(self.axis), P(self.axis), P()),
            out_specs=P(self.axis),
            axis_names={self.axis},
            check_vma=False,
        )
        # one copy for each stage: XLA's CPU compiler cannot sum the gradient of a shared one in bfloat16
        parts = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.stages, *leaf.shape)), parts)
        ys = jax.jit(pipeline)(jnp.arange(self.stages, dtype=np.int32), trainables, parts, rng)
        return jax.tree.map(lambda leaf: leaf[last], ys)

    def _axis_type(self) -> Any:
        """The type of the mesh axis; None if no mesh with this axis is set."""
        mesh = jax.sharding.get_abstract_mesh()
        if self.axis not in mesh.axis_names:
            return None
        if mesh.shape[self.axis] != self.stages:
            raise ValueError(
                f"{short_repr(self)}: there are {self.stages} stages, but the mesh has {mesh.shape[self.axis]} devices "
                f"along {self.axis!r}; use the same number."
            )
        return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[self.axis]

    def _check_stateless(self, non_trainables: Tree) -> None:
        if non_trainables is not None:
            raise ValueError(
                f"{short_repr(self)}: the layer has state (non_trainables), but several microbatches are in flight at "
                "once; use layers without state, such as GroupNorm instead of BatchNorm."
            )


def _repeat_last(parts: Any, more: int) -> Any:
    """The microbatches, followed by `more` copies of the last one."""

    def extend(leaf: jax.Array) -> jax.Array:
        return jnp.concatenate([leaf, jnp.broadcast_to(leaf[-1:], (more, *leaf.shape[1:]))])

    return jax.tree.map(extend, parts)


def merge_microbatches(parts: Any) -> Any:
    """The batch that `split_microbatches` split into these parts."""

    def merge(leaf: jax.Array) -> jax.Array:
        return jnp.swapaxes(leaf, 0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])

    return jax.tree.map(merge, parts)


def bubble_fraction(stages: int, microbatches: int) -> float:
    """The fraction of its time for which a stage is idle, while the pipeline fills and drains."""
    return (stages - 1) / (microbatches + stages - 1)


pipeline_p = Primitive("pipeline")  # stands in a jaxpr for the pipeline, which a schedule replaces
pipeline_p.multiple_results = True


def bind_pipeline(layer: Pipelined, x: Any, trainables: Tree, rng: jax.Array | None, inference_mode: bool) -> Any:
    """The output of a pipeline as an equation of the jaxpr that is being traced."""
    leaves, structure = jax.tree.flatten((x, trainables, rng))
    out = pipeline_p.bind(*leaves, layer=layer, structure=structure, inference_mode=inference_mode)
    return jax.tree.unflatten(jax.tree.structure(x), out)


@pipeline_p.def_abstract_eval
def _(*leaves: Any, layer: Any, structure: Any, inference_mode: bool) -> list[Any]:
    x, _, _ = jax.tree.unflatten(structure, leaves)
    return jax.tree.leaves(x)
