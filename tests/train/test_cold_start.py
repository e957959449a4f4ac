"""A cold start: what is compiled side by side, and that nothing is traced twice."""

import gc
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import stages

import mlax
from mlax import nn, optim, place, train
from tests import asserts
from tests.processes import outputs_of, start_python

X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)
BATCH = {"x": X, "y": X[:, :2]}


def objective_of(model):
    def objective(batch, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return ((y - batch["y"]) ** 2).mean(axis=1), new

    return objective


@pytest.fixture
def compiling(monkeypatch):
    """The name of the thread of each ahead-of-time compilation, and an event without which none of them ends."""
    threads, may_end = [], threading.Event()
    may_end.set()
    compile = stages.Lowered.compile

    def record(self, *args, **kwargs):
        threads.append(threading.current_thread().name)
        assert may_end.wait(60)
        return compile(self, *args, **kwargs)

    monkeypatch.setattr(stages.Lowered, "compile", record)
    return threads, may_end


MODEL = mlax.Chain((nn.Linear(3), nn.Linear(2)))


def test_a_model_is_initialized_while_the_step_compiles(compiling):
    threads, may_end = compiling
    step = train.step(objective_of(MODEL), optim.AdamW(0.1))
    may_end.clear()
    state = step.init_model(jax.random.key(0), MODEL, X, BATCH)
    assert threads == ["compile step"]  # and it has not ended
    assert not step.aot.compiled
    may_end.set()
    got, metrics = step(state, BATCH)
    assert len(step.aot.compiled) == len(threads) == 1
    other = train.step(objective_of(MODEL), optim.AdamW(0.1))
    init_rng, rng = jax.random.split(jax.random.key(0))
    wanted, _ = other(other.init(rng, *MODEL.init(init_rng, X)), BATCH)
    jax.tree.map(np.testing.assert_array_equal, got.trainables, wanted.trainables)
    assert metrics["loss"] > 0


@pytest.mark.parametrize(
    ("backend", "flags", "is_large", "wanted"),
    [
        ("cpu", "", True, [None]),
        ("gpu", "", True, [{"xla_gpu_enable_triton_gemm": False}]),
        ("gpu", "", False, [None]),
        ("gpu", "--xla_gpu_enable_triton_gemm=true", True, [None]),
    ],
)
def test_a_large_step_on_a_gpu_times_no_triton_kernels_unless_the_user_says_so(
    backend, flags, is_large, wanted, monkeypatch
):
    given = []
    step = train.step(objective_of(MODEL), optim.SGD(0.1))
    if is_large:
        monkeypatch.setattr(inspect.getmodule(type(step.aot)), "LARGE", 0)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(stages.Lowered, "compile", lambda self, compiler_options=None: given.append(compiler_options))
    step.init_model(jax.random.key(0), MODEL, X, BATCH)
    step.wait()
    assert given == wanted


def test_several_small_steps_in_a_call_run_their_kernels_side_by_side_on_a_gpu(monkeypatch):
    given = []
    step = train.step(objective_of(MODEL), optim.SGD(0.1), steps_per_call=8)
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), BATCH)
    state = step.init(jax.random.key(0), *MODEL.init(jax.random.key(1), X))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(stages.Lowered, "compile", lambda self, compiler_options=None: given.append(compiler_options))
    step.start_compile(state, batch)
    step.wait()
    assert given == [{"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}]
    (loop,) = [eqn for eqn in step.aot.last_traced.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert loop.params["unroll"] == 4


@pytest.mark.parametrize("options", [{"xla_gpu_enable_time_travel": True}, {"xla_cpu_use_onednn": "sideways"}])
def test_an_option_that_xla_does_not_have_is_left_out(options, monkeypatch):
    step = train.step(objective_of(MODEL), optim.SGD(0.1))
    module = inspect.getmodule(type(step.aot))
    monkeypatch.setattr(module, "LARGE_OPTIONS", options)
    monkeypatch.setattr(module, "LARGE", 0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    state = step.init_model(jax.random.key(0), MODEL, X, BATCH)
    step.wait()
    monkeypatch.undo()
    step(state, BATCH)
    assert len(step.aot.compiled) == 1


def test_the_garbage_collector_pauses_while_mlax_is_imported():
    code = (
        "import gc, jax; runs = []; gc.callbacks.append(lambda phase, info: runs.append(phase)); "
        "from mlax import nn, optim, train; "
        "assert runs.count('start') <= 3 and gc.isenabled(); "  # once after each import, instead of a hundred times
        "gc.disable(); from mlax import zoo; assert not gc.isenabled()"
    )
    outputs_of(start_python("-c", code))


def test_the_garbage_collector_pauses_while_a_step_is_traced():
    collecting = []

    def objective(batch, trainables, *arguments, **options):
        collecting.append(gc.isenabled())
        return objective_of(MODEL)(batch, trainables, *arguments, **options)

    step = train.step(objective, optim.SGD(0.1))
    state = step.init_model(jax.random.key(0), MODEL, X, BATCH)
    assert collecting == [False] and gc.isenabled()
    with pytest.raises(KeyError, match="'y'"):
        train.step(objective, optim.SGD(0.1)).compile(state, {"x": X})
    assert gc.isenabled()
    gc.disable()
    try:
        step(state, BATCH)
        assert not gc.isenabled()  # as the user wants it
    finally:
        gc.enable()


def test_with_a_plan_a_model_is_initialized_before_the_step_compiles():
    plan = place.fsdp()
    step = train.step(objective_of(MODEL), optim.SGD(0.1), plan=plan)
    state = step.init_model(jax.random.key(0), MODEL, X, train.Feed(BATCH, 8).example)
    assert len(step.aot.compiled) == 1
    assert state.trainables["layers"]["0"]["kernel"].sharding.mesh == plan.mesh


def test_an_error_of_xla_in_the_background_is_raised_by_the_first_call_and_once(monkeypatch):
    step = train.step(objective_of(MODEL), optim.SGD(0.1))
    with monkeypatch.context() as patch:
        patch.setattr(stages.Lowered, "compile", lambda self: (_ for _ in ()).throw(RuntimeError("no such kernel")))
        state = step.init_model(jax.random.key(0), MODEL, X, BATCH)
        step.wait()
    with pytest.raises(RuntimeError, match="no such kernel"):
        step(state, BATCH)
    step(state, BATCH)  # compiles again
    assert len(step.aot.compiled) == 1


def test_another_batch_than_the_step_is_being_compiled_for_is_refused():
    step = train.step(objective_of(MODEL), optim.SGD(0.1))
    state = step.init_model(jax.random.key(0), MODEL, X, BATCH)
    with pytest.raises(train.RetraceError, match=r"batch/x was float32\[8, 4\] and is now float32\[6, 4\]"):
        step(state, {name: array[:6] for name, array in BATCH.items()})
    step(state, BATCH)


def test_fit_compiles_the_evaluation_while_the_step_compiles(compiling):
    threads, _ = compiling
    step = train.step(objective_of(MODEL), optim.SGD(0.1))
    state = step.init(jax.random.key(0), *MODEL.init(jax.random.key(0), X))
    feed = train.Feed(BATCH, 8)
    train.fit(step, state, feed, steps=2, evaluate=feed, show=False)
    assert sorted(threads) == ["MainThread", "compile step"]


def test_an_evaluation_that_cannot_be_compiled_leaves_no_compilation_behind(compiling):
    step = train.step(objective_of(MODEL), optim.SGD(0.1))
    state = step.init(jax.random.key(0), *MODEL.init(jax.random.key(0), X))
    with pytest.raises(KeyError, match="'y'"):
        train.fit(step, state, train.Feed(BATCH, 8), steps=2, evaluate=train.Feed({"x": X}, 8), show=False)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]


TRACES = []


@mlax.frozen
class Count(mlax.Layer):
    """Appends its name to TRACES whenever `fwd` is traced."""

    name: str

    def init(self, rng, x):
        return {"scale": jax.numpy.ones(x.shape[-1], x.dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        TRACES.append(self.name)
        return x * trainables["scale"], non_trainables


@mlax.frozen
class Block(mlax.Composite):
    name: str

    def parts(self):
        return {"count": Count(self.name), "mix": nn.Linear(4)}

    def wire(self, sub, x, more=None):
        return x + sub.mix(sub.count(x))


@mlax.frozen
class Model(mlax.Composite):
    """Counts how often a block in a stack, which gets a constant input besides, and a part outside are traced."""

    name: str
    mode: str

    def parts(self):
        blocks = mlax.Repeat(Block(f"{self.name} block"), 3, mode=self.mode)
        return {"count": Count(self.name), "blocks": blocks, "out": nn.Linear(2)}

    def wire(self, sub, x):
        return sub.out(sub.blocks(sub.count(x), None))


@pytest.mark.parametrize("mode", ["scan", "remat", "unroll"])
def test_from_init_through_evaluation_nothing_is_traced_twice(mode):
    TRACES.clear()
    name = f"model {mode}"
    model, feed = Model(name, mode), train.Feed(BATCH, 8)
    step = train.step(objective_of(model), optim.AdamW(0.1))
    variables = model.init(jax.random.key(0), X)
    assert TRACES.count(name) == 1
    assert TRACES.count(f"{name} block") == 2  # the shapes of its parts, then those of the stack, of any depth
    TRACES.clear()
    state = step.init(jax.random.key(0), *variables)
    assert not TRACES
    train.fit(step, state, feed, steps=2, evaluate=feed, show=False)
    assert TRACES.count(name) == 2  # the step, and the evaluation
    assert TRACES.count(f"{name} block") == 2


def test_the_state_is_initialized_by_one_program():
    model = mlax.Chain(tuple(nn.Linear(size) for size in (3, 5, 7, 9)))
    variables = model.init(jax.random.key(0), X)
    step = train.step(objective_of(model), optim.AdamW(0.1))
    rng = jax.random.key(1)
    with asserts.compilations() as compiled:
        state = step.init(rng, *variables)
    assert len(compiled) == 1
    assert not any(leaf.committed for leaf in jax.tree.leaves(state))
