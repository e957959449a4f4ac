"""Ahead-of-time compilation of a function for a fixed number of signatures."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax import leaves_with_paths
from mlax.core import signature
from mlax.inspect import format_bytes, free_bytes
from mlax.place import NotEnoughMemory, Plan, check_shardings, warn_unless_parallelized

MEMORY_ADVICE = (
    "To need less, take smaller batches, or the same in parts (accumulate=4), recompute activations (mlax.Remat, "
    "Repeat(mode='remat')), compute in bfloat16 (mlax.dtypes.mixed_bfloat16), or spread the state over more devices."
)


def check_memory(compiled: Any, leaves: Iterable[Any]) -> None:
    """Raise before the first run if it cannot succeed: a run that fails has already given up what was donated."""
    analysis = compiled.memory_analysis()
    here = jax.local_devices()  # a device of another process says nothing
    device = next((each for leaf in leaves for each in getattr(leaf, "devices", tuple)() if each in here), here[0])
    free = free_bytes(device)
    if analysis is None or free is None:
        return
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if needed > free:
        raise NotEnoughMemory(
            f"the step needs {format_bytes(needed)} more on {device}, of which "
            f"{format_bytes(analysis.temp_size_in_bytes)} for intermediate results, but {format_bytes(free)} are free; "
            f"nothing was run and the state is as it was. {MEMORY_ADVICE}"
        )


class RetraceError(TypeError):
    """Arguments came for which a function would have to be compiled again."""


class CompiledFunction:
    """`function` compiled ahead of time, at most `compilations` times, the first of its arguments donated, or none.

    With a `plan` it is compiled for its mesh, and the last argument is a batch that lies where the plan says.

    What is compiled is called as fast as under `jax.jit`. An argument of another shape, dtype, structure or placement
    is an error that names it, where `jax.jit` would compile anew without a word.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        *,
        donate: bool = True,
        compilations: int = 1,
        plan: Plan | None = None,
        stacked: bool = False,
    ):
        if compilations < 1:
            raise ValueError(f"compilations is {compilations}, but must be at least 1.")
        self.function = function
        self.names = names
        self.donate = donate
        self.compilations = compilations
        self.plan = plan
        self.stacked = stacked  # batches have one more axis than the plan says
        self.compiled: dict[Any, Any] = {}
        self._traces: dict[Any, Any] = {}  # as jax.jit(...).trace gives them
        self._seen: list[dict[str, Any]] = []
        self._only: Any = None

    def __call__(self, *args: Any) -> Any:
        run = self.compile(*args) if self._only is None else self._only
        try:
            return run(*args)
        except (TypeError, ValueError, RuntimeError) as error:
            if "Disallowed" in str(error):  # by jax.transfer_guard, which does not know the path of the leaf
                shardings, _ = run.input_shardings
                check_shardings(dict(zip(self.names, args, strict=True)), dict(zip(self.names, shardings, strict=True)))
            if isinstance(error, RetraceError) or "Disallowed" in str(error):
                raise
            if "RESOURCE_EXHAUSTED" in str(error):
                error.add_note(f"What was donated is lost: go on from the last checkpoint. {MEMORY_ADVICE}")
                raise
            _check_donated(self.names, args)
            if words := self._differences(args) if self._seen else "":
                raise RetraceError(words) from None
            raise

    def compile(self, *args: Any) -> Any:
        """The compiled function for these arguments, which may be `jax.ShapeDtypeStruct`s, made if it is not there."""
        key = _batch_signature(args)
        if key not in self.compiled:
            if len(self.compiled) == self.compilations:
                raise RetraceError(self._differences(args))
            with contextlib.nullcontext() if self.plan is None else jax.set_mesh(self.plan.mesh):
                traced = self._jitted(args).trace(*args)
                compiled = traced.lower().compile()
            if self.plan is not None:
                warn_unless_parallelized(self.plan, args[0], traced.jaxpr)
            check_memory(compiled, jax.tree.leaves(args))
            self.compiled[key], self._traces[key] = compiled, traced
            self._seen.append(_describe_leaves(self.names, args))
            self._only = compiled if self.compilations == 1 else None
        return self.compiled[key]

    def program(self, *args: Any) -> tuple[Any, Any]:
        """(what was traced, what was compiled) for these arguments; without any, the last time."""
        if args:
            self.compile(*args)
        key = _batch_signature(args) if args else next(reversed(self.compiled))
        return self._traces[key], self.compiled[key]

    def _jitted(self, args: Any) -> Any:
        results = self._placements(args)
        donated = 0 if self.donate else ()
        if self.plan is None:
            return jax.jit(self.function, donate_argnums=donated, out_shardings=results)
        *others, batch = args
        here = [jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), other) for other in others]
        places = (*here, self.plan.batch_shardings(batch, stacked=self.stacked))
        return jax.jit(self.function, donate_argnums=donated, in_shardings=places, out_shardings=results)

    def _placements(self, args: Any) -> Any:
        """Where the first result goes: where the argument that is donated is, if that was placed on purpose."""
        if not self.donate or not any(getattr(leaf, "committed", False) for leaf in jax.tree.leaves(args[0])):
            return None
        return jax.tree.map(lambda leaf: leaf.sharding, args[0]), None

    def _differences(self, args: Any) -> str:
        """What is different from every signature compiled so far, in words; nothing if nothing is."""
        now = _describe_leaves(self.names, args)
        before = min(self._seen, key=lambda seen: sum(seen.get(path) != got for path, got in now.items()), default={})
        changed = [
            f"{path} was {before.get(path, 'not there')} and is now {now.get(path, 'not there')}"
            for path in dict.fromkeys([*before, *now])
            if before.get(path) != now.get(path)
        ]
        if not changed:
            return ""
        more = f" (and {len(changed) - 4} more)" if len(changed) > 4 else ""
        often = "once" if self.compilations == 1 else f"{self.compilations} times"
        return (
            f"{'; '.join(changed[:4])}{more}. It compiles {often} and will not do so again unasked: keep shapes and "
            "dtypes fixed (a train.Feed pads its last batch), or allow more by `compilations`."
        )


def _check_donated(names: tuple[str, ...], args: Any) -> None:
    """Say so if an argument was given up to an earlier call."""
    for name, arg in zip(names, args, strict=True):
        gone = [path for path, leaf in leaves_with_paths(arg) if isinstance(leaf, jax.Array) and leaf.is_deleted()]
        if gone:
            raise ValueError(
                f"{name}/{gone[0]} was given up to an earlier call, which donates it; go on with the {name} that came "
                "back from that call."
            ) from None


def _batch_signature(args: Any) -> Any:
    """What tells signatures apart, of the last argument; what is compiled refuses the others if they change."""
    leaves, structure = jax.tree.flatten(args[-1])
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _describe_leaves(names: tuple[str, ...], args: Any) -> dict[str, str]:
    """Shape, dtype and placement of each leaf by path, in words."""
    return {
        f"{name}/{path}" if path else name: _describe_leaf(leaf)
        for name, arg in zip(names, args, strict=True)
        for path, leaf in leaves_with_paths(arg)
    }


def _describe_leaf(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    placed = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1
    where = f" over {sharding.spec}" if placed else ""  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    return f"{signature(leaf)}{where}"
