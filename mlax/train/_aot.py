"""Ahead-of-time compilation of a function for a fixed number of signatures."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlax._garbage import pause_garbage_collection
from mlax._jax import key_data, leaves_with_paths, wrap_key_data
from mlax.core import Documented, check_not_donated, signature
from mlax.inspect import flops, format_bytes, free_bytes
from mlax.place import NotEnoughMemory, Plan, check_shardings, warn_unless_parallelized
from mlax.train._fingerprint import Fingerprint, describe_change, describe_objective, differences
from mlax.train._state import DONATED_STATE

MEMORY_ADVICE = (
    "To need less memory, use smaller batches or gradient accumulation (accumulate=4), rematerialize activations "
    "(mlax.Remat, Repeat(mode='remat')), compute in bfloat16 (mlax.dtypes.mixed_bfloat16), or shard the state over "
    "more devices."
)


# XLA generates Triton kernels for each matrix product, and times them beside cuBLAS. On an H200 that takes most of a
# cold compilation, and the steps of GPT-2 and ViT run as fast without, or faster; those of a small MLP and an LSTM,
# whose products are short, are slower: docs/design/cold-start.md.
LARGE_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
# Kernels of a small step take less time than their launches, so that independent ones should run side by side: 20 steps
# of that MLP take 50 µs each instead of 55. A large step would hold more memory.
LOOP_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
LARGE = 3 * 10**7  # elements of a state, from which on it is large


class RetraceError(TypeError, metaclass=Documented):
    """A function that is already compiled would have to be compiled again for these arguments."""


class Compilation(NamedTuple):
    """A compilation that is under way."""

    traced: jax.stages.Traced
    result: Future[jax.stages.Compiled]
    constants: Fingerprint  # what the objective referred to, before it was traced and after
    args: Any  # that it is compiled for


class CompiledFunction:
    """A function compiled ahead of time for at most `compilations` signatures; its first argument may be donated.

    Calls are as fast as under `jax.jit`. An argument of another shape, dtype, structure or sharding raises an error
    that names it, where `jax.jit` would silently recompile. With a `plan`, the function is traced over the plan's mesh,
    and its last argument is a batch sharded as the plan specifies.

    With `keeps_key`, the first argument and the first result are states with the same key `rng`, which is not donated.
    The executable takes the data of the key: a typed key would keep JAX from its fast path for calls, which costs 24 µs
    on a GPU.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        *,
        donate: bool,
        compilations: int,
        plan: Plan | None = None,
        stacked: bool = False,
        owner: str = "step",
        objective: Callable[..., Any] | None = None,
        keeps_key: bool = False,
    ):
        if compilations < 1:
            raise ValueError(f"compilations is {compilations}, but must be at least 1.")
        self.function = function
        self.names = names  # the arguments' names, for errors
        self.donate = donate
        self.compilations = compilations
        self.plan = plan
        self.owner = owner  # the function's name, for errors
        self.objective = objective  # that `function` calls; what it refers to is compiled as constants
        self.keeps_key = keeps_key
        self.stacked = stacked  # batches have a leading axis that the plan does not know of
        self.compiled: dict[Any, jax.stages.Compiled] = {}
        self._traced: dict[Any, jax.stages.Traced] = {}
        self._started: dict[Any, Compilation] = {}
        self._signatures: list[dict[str, str]] = []
        self._only: jax.stages.Compiled | None = None
        self._known_key: tuple[Any, Any] = (None, None)  # of the last call, and its data
        self._only_kind: Any = None  # the dtype of the key that `_only` is compiled for
        self._constants: Fingerprint = {}  # what the objective referred to when it was compiled

    def __call__(self, *args: Any) -> Any:
        run = self.compile(*args) if self._only is None else self._only
        try:
            if not self.keeps_key:
                return run(*args)
            state, result = run(*self._unwrap_key(args))
            return state._replace(rng=args[0].rng), result
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(error, run, args)
            raise

    def _unwrap_key(self, args: Any) -> tuple[Any, ...]:
        """The arguments for the executable: the state without its key, the data of that, and the others."""
        state, *others = args
        key, data = self._known_key  # at once, as another thread may call with another key
        if state.rng is not key or key is None:  # the first call, or a state that another one made
            if self._only is not None and getattr(state.rng, "dtype", None) != self._only_kind:
                raise TypeError("the key is of another kind")
            data = _place_key_data(state)
            if isinstance(state.rng, jax.Array):
                self._known_key = state.rng, data
        return state._replace(rng=None), data, *others

    def _explain(self, error: Exception, run: jax.stages.Compiled, args: Any) -> None:
        """Raise a better error, which keeps this one as its cause, or add a note to it."""
        named, text = dict(zip(self.names, args, strict=True)), str(error)
        if "Disallowed" in text:  # by jax.transfer_guard, which does not know the path of the leaf
            shardings, _ = run.input_shardings
            if self.keeps_key:
                named["state"], shardings = args[0]._replace(rng=None), (shardings[0], *shardings[2:])
            check_shardings(named, dict(zip(self.names, shardings, strict=True)))
        elif "RESOURCE_EXHAUSTED" in text:
            error.add_note(f"What was donated is lost: resume from the last checkpoint. {MEMORY_ADVICE}")
        elif "deleted or donated" in text or "Array has been deleted" in text:
            try:
                check_not_donated(self.owner, DONATED_STATE, **named)
            except ValueError as better:
                raise better from error
        elif message := self._describe_change(args):
            raise RetraceError(message) from None
        elif any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(args)):
            error.add_note("The state was donated to this call and is lost: resume from the last checkpoint.")

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """The executable for these arguments, which may be `jax.ShapeDtypeStruct`s; compiled if it is not yet."""
        key = self._signature(args)
        if key not in self.compiled:
            self._start(key, args, in_background=False)
            self._finish(key)
        return self.compiled[key]

    def _signature(self, args: Any) -> Any:
        """What an executable is chosen by: what follows the state, and the kind of its key."""
        return _batch_signature(args), getattr(args[0].rng, "dtype", None) if self.keeps_key else None

    def start(self, *args: Any) -> None:
        """Trace for these arguments, and compile in the background: `compile`, or a call, waits for the executable.

        XLA compiles without the GIL, so that other work goes on meanwhile. Of several processes none may be
        ahead of the others, so they compile in the foreground.
        """
        key = self._signature(args)
        if key not in self.compiled:
            self._start(key, args, in_background=jax.process_count() == 1)

    def wait(self) -> None:
        """Wait for what is compiled in the background, whether it succeeds or not."""
        for compilation in self._started.values():
            compilation.result.exception()

    def _start(self, key: Any, args: Any, *, in_background: bool) -> None:
        if key in self._started:
            return
        check_not_donated(self.owner, DONATED_STATE, **dict(zip(self.names, args, strict=True)))
        if len(self.compiled) + len(self._started) == self.compilations:
            for started in list(self._started):
                self._finish(started)
            raise RetraceError(self._describe_change(args))
        self.check_constants(self.owner)
        before = self._describe_constants()
        given = (args[0]._replace(rng=None), _place_key_data(args[0]), *args[1:]) if self.keeps_key else args
        with self._on_mesh(), pause_garbage_collection():
            traced = self._jit(given, args).trace(*given)
            lowered = traced.lower()
        after = self._describe_constants()  # without what tracing itself changes, such as a counter
        constants = {name: value for name, value in after.items() if value == before.get(name)}
        result = self._compile_lowered(lowered, compiler_options(args, is_loop=self.stacked), in_background)
        self._started[key] = Compilation(traced, result, constants, args)

    def _compile_lowered(
        self, lowered: jax.stages.Lowered, options: dict[str, Any], in_background: bool
    ) -> Future[jax.stages.Compiled]:
        result: Future[jax.stages.Compiled] = Future()

        def run() -> None:
            try:
                with self._on_mesh():
                    result.set_result(compile_lowered(lowered, options))
            except BaseException as error:
                result.set_exception(error)

        if in_background:
            threading.Thread(target=run, name=f"compile {self.owner}").start()
        else:
            run()
        return result

    def _finish(self, key: Any) -> None:
        """Wait for the compilation of this signature, and keep its result. If it failed, its error is raised once."""
        traced, result, constants, args = self._started[key]
        try:
            compiled = result.result()
        finally:
            if result.done():  # and not interrupted by Ctrl-C
                del self._started[key]
        if self.plan is not None:
            warn_unless_parallelized(self.plan, args[0], traced.jaxpr)
        _check_memory(compiled, jax.tree.leaves(args))
        self._constants = constants
        self.compiled[key], self._traced[key] = compiled, traced
        self._signatures.append(_describe_leaves(self.names, args))
        if self.compilations == 1:
            self._only, self._only_kind = compiled, args[0].rng.dtype if self.keeps_key else None

    def _on_mesh(self) -> Any:
        return contextlib.nullcontext() if self.plan is None else jax.set_mesh(self.plan.mesh)

    @property
    def last_traced(self) -> jax.stages.Traced | None:
        """The function as it was last traced, compiled or being compiled; None if it never was."""
        if self._started:
            return next(reversed(self._started.values())).traced
        return next(reversed(self._traced.values()), None)

    def check_constants(self, owner: str) -> None:
        """Raise if what the objective refers to, such as the model, changed since it was compiled as constants."""
        if not self.compiled:
            return
        found = [describe_change(*each) for each in differences(self._constants, self._describe_constants())]
        if found:
            raise ValueError(
                f"{owner}: {'; '.join(found[:4])}, but the step was compiled before that and would go on with what it "
                "was; make the step and its state again: train.step(objective, optimizer)."
            )

    def _describe_constants(self) -> Fingerprint:
        """What the objective refers to, without lists and sets: those often collect what callbacks send."""
        found = {} if self.objective is None else describe_objective(self.objective)
        return {name: text for name, text in found.items() if not text.startswith(("list #", "set #"))}

    def stages(self, *args: Any) -> tuple[jax.stages.Traced, jax.stages.Compiled]:
        """The function traced and compiled for these arguments; without any, the last compilation."""
        if args:
            self.compile(*args)
        if not self.compiled:
            raise ValueError(f"{self.owner}: nothing is compiled yet; call it, or step.compile(state, batch), first.")
        key = self._signature(args) if args else next(reversed(self.compiled))
        return self._traced[key], self.compiled[key]

    def flops(self) -> int:
        """FLOPs of a call over all devices, by the jaxpr of the last compilation."""
        traced, _ = self.stages()
        return flops(traced.jaxpr)

    def _jit(self, args: Any, called_with: Any) -> Any:
        donated = 0 if self.donate else ()
        out = self._out_shardings(args)
        function = self._with_key_data(called_with[0].rng) if self.keeps_key else self.function
        if self.plan is None:
            return jax.jit(function, donate_argnums=donated, out_shardings=out)
        *others, batch = args
        shardings = [jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), other) for other in others]
        batch_shardings = self.plan.batch_shardings(batch, stacked=self.stacked)
        return jax.jit(function, donate_argnums=donated, in_shardings=(*shardings, batch_shardings), out_shardings=out)

    def _with_key_data(self, like: Any) -> Callable[..., tuple[Any, Any]]:
        """The function of what `_unwrap_key` returns, for keys like this one."""

        def call(state: Any, rng: jax.Array, *others: Any) -> tuple[Any, Any]:
            new, result = self.function(state._replace(rng=wrap_key_data(rng, like=like)), *others)
            return new._replace(rng=None), result

        call.__name__ = self.function.__name__  # which profiles show
        return call

    def _out_shardings(self, args: Any) -> Any:
        """The first result is sharded like the donated argument, if that was placed explicitly."""
        if not self.donate or not any(getattr(leaf, "committed", False) for leaf in jax.tree.leaves(args[0])):
            return None
        return jax.tree.map(lambda leaf: leaf.sharding, args[0]), None

    def _describe_change(self, args: Any) -> str:
        """How these arguments differ from the closest signature that was compiled; empty if they do not."""
        now = _describe_leaves(self.names, args)
        before = min(self._signatures, key=lambda old: sum(old.get(path) != leaf for path, leaf in now.items()))
        changed = [
            f"{path} was {before.get(path, 'missing')} and is now {now.get(path, 'missing')}"
            for path in dict.fromkeys([*before, *now])
            if before.get(path) != now.get(path)
        ]
        if not changed:
            return ""
        of_model = any(change.startswith("state/trainables") for change in changed)
        other_model = " If the model changed, make a new step, by train.step." if of_model else ""
        more = f" (and {len(changed) - 4} more)" if len(changed) > 4 else ""
        return (
            f"{'; '.join(changed[:4])}{more}. This would recompile, beyond compilations={self.compilations}: keep "
            f"shapes and dtypes fixed (train.Feed pads the last batch), or raise compilations.{other_model}"
        )


def compiler_options(args: Any, *, is_loop: bool = False) -> dict[str, Any]:
    """The options of XLA for a step, or several in a loop, on a GPU, unless the user has set one in XLA_FLAGS.

    Quantized kernels have none: Triton reads them best.
    """
    if jax.default_backend() != "gpu":
        return {}
    options = (LOOP_OPTIONS if is_loop else {}) if is_small(args[0]) else LARGE_OPTIONS
    is_quantized = any(leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(args[0]))
    is_given = any(name in os.environ.get("XLA_FLAGS", "") for name in options)
    return {} if is_quantized or is_given else options


def is_small(state: Any) -> bool:
    """Whether the kernels of a step with this state take less time to compute than to launch."""
    return sum(leaf.size for leaf in jax.tree.leaves(state)) < LARGE


def compile_lowered(lowered: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
    """Compile with these options of XLA, or without them if it does not have them any more."""
    if options:
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error) and "While setting option" not in str(error):
                raise
    return lowered.compile()


def _check_memory(compiled: jax.stages.Compiled, leaves: Iterable[Any]) -> None:
    """Raise before the first run if memory is too small: a failed run has already consumed its donated arguments."""
    analysis: Any = compiled.memory_analysis()
    local = jax.local_devices()
    shardings = [leaf.sharding for leaf in leaves if getattr(leaf, "sharding", None) is not None]
    used = {device for sharding in shardings for device in sharding.device_set} or {local[0]}
    device = next((each for each in local if each in used), None)  # the memory of others is unknown
    free = None if device is None else free_bytes(device)
    if analysis is None or free is None:
        return
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if needed > free:
        raise NotEnoughMemory(
            f"the step needs {format_bytes(needed)} more on {device}, of which "
            f"{format_bytes(analysis.temp_size_in_bytes)} for intermediate results, but {format_bytes(free)} are free; "
            f"nothing was run, and the state is unchanged. {MEMORY_ADVICE}"
        )


def _place_key_data(state: Any) -> Any:
    """The data of the key of a state, moved to the devices of the state if the key is on others."""
    data, sharding = key_data(state.rng), getattr(state.step, "sharding", None)
    if sharding is not None and getattr(data, "committed", False) and data.sharding.device_set != sharding.device_set:
        return jax.device_put(data, sharding)
    return data


def _batch_signature(args: Any) -> Any:
    """Structure, shapes and dtypes of what follows the state; the executable itself rejects changes of that."""
    leaves, structure = jax.tree.flatten(args[1:])
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _describe_leaves(names: tuple[str, ...], args: Any) -> dict[str, str]:
    """Shape, dtype and sharding of each leaf, by path."""
    return {
        f"{name}/{path}" if path else name: _describe_leaf(leaf)
        for name, arg in zip(names, args, strict=True)
        for path, leaf in leaves_with_paths(arg)
    }


def _describe_leaf(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
        return f"{signature(leaf)} over {sharding.spec}"
    return signature(leaf)
