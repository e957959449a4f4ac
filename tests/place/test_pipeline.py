"""A model in stages computes and learns what it does on one device, by both schedules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, inspect, nn, optim, place
from mlax.core import flatten_paths
from mlax.place import find_pipelines
from mlax.train import gradients
from tests.arrays import normal
from tests.asserts import assert_close_to_scale
from tests.layers import Block
from tests.place.staged import batch, convolutional, mesh, objective, shard_over, transformer

MICROBATCHES = 4
TIE = mlax.Tie("head/kernel", to="embed/table", transpose=True)
MESHES = [(8, 1), (4, 2), (2, 4)]
OPTIMIZER = optim.AdamW(1e-2)


def perceptron(dropout=0.0, width=8):
    """A transformer without attention, which takes long to compile."""
    block = mlax.Residual(mlax.Series(nn.LayerNorm(), nn.MLP((2 * width, width)), nn.Dropout(dropout)))
    return mlax.Tied(mlax.replace(transformer(4, width=width).layer, "blocks", mlax.Repeat(block, 4)), TIE)


MODELS = {"transformer": transformer, "convolutional": convolutional, "perceptron": perceptron}


def staged(model, stages, microbatches=MICROBATCHES):
    return place.pipeline_repeats(model, stages, microbatches=microbatches)


def found(model, schedule, microbatches=MICROBATCHES):
    """Values, gradients and new state of (batch, trainables, non_trainables, rng)."""
    options = {
        "whole": {},
        "gpipe": {},
        "parts": {"accumulate": microbatches},
        "1f1b": {"accumulate": microbatches, "backward": place.one_forward_one_backward},
    }
    return functools.partial(gradients, objective(model), **options[schedule])


RARELY = functools.partial(pytest.param, marks=pytest.mark.thorough)
assert_close = functools.partial(assert_close_to_scale, least=1e-3)


@functools.cache
def initialized(kind):
    model = MODELS[kind]()
    return model, *model.init(jax.random.key(0), batch(model)["x"])


def learnt(step, trainables, place_batch, model, steps=20):
    """The losses of some steps on a few batches, the last weights, and how often the step was traced."""
    traces = []

    def once(trainables, state, batch):
        traces.append(1)
        values, grads, _ = step(batch, trainables, None, jax.random.key(1))
        trainables, state = OPTIMIZER.update(grads, state, trainables)
        return trainables, state, values["loss"]

    once, losses, state = jax.jit(once), [], OPTIMIZER.init(trainables)
    batches = [place_batch(batch(model, seed)) for seed in range(4)]
    for number in range(steps):
        trainables, state, loss = once(trainables, state, batches[number % 4])
        losses.append(float(loss))
    return np.asarray(losses), trainables, state, len(traces)


@functools.cache
def learnt_on_one_device(kind):
    model, trainables, _ = initialized(kind)
    return learnt(found(model, "whole"), trainables, lambda batch: batch, model)


@pytest.mark.thorough  # test_presets.py has the plans that do this
@pytest.mark.parametrize("stages, data", MESHES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["transformer", "convolutional"])
def test_a_pipelined_model_trains_like_one_on_one_device(kind, schedule, stages, data):
    wanted, weights, _, _ = learnt_on_one_device(kind)
    model, trainables, _ = initialized(kind)
    devices = mesh(stages, data)
    trainables, _ = shard_over(devices, trainables, None)
    with jax.set_mesh(devices):
        step = found(staged(model, stages), schedule)
        losses, trainables, state, traces = learnt(
            step, trainables, lambda batch: shard_over(devices, {}, batch)[1], model
        )
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert np.ptp(wanted) > 1e-2
    assert_close(trainables, weights, 1e-3)
    assert traces == 1
    for leaf in jax.tree.leaves((trainables["blocks"], state.mean["blocks"])):
        assert leaf.sharding.spec == P("stage")
        assert leaf.addressable_shards[0].data.shape[0] == 8 // stages


@pytest.mark.parametrize("stages, data", [(4, 2), RARELY(2, 1)])
def test_one_forward_one_backward_equals_accumulation_in_keys_and_state(stages, data):
    model, x = perceptron(dropout=0.3).layer, batch(transformer())
    model = mlax.replace(model, "norm", nn.BatchNorm())  # state behind the pipeline
    trainables, state = model.init(jax.random.key(0), x["x"])
    wanted = jax.jit(found(model, "parts"))(x, trainables, state, jax.random.key(1))
    devices = mesh(stages, data)
    with jax.set_mesh(devices):
        got = jax.jit(found(staged(model, stages), "1f1b"))(
            shard_over(devices, {}, x)[1], shard_over(devices, trainables, x)[0], state, jax.random.key(1)
        )
    assert_close(got, wanted)
    assert not np.allclose(got.non_trainables["norm"]["mean"], state["norm"]["mean"])


def test_gpipe_gives_each_microbatch_the_keys_of_a_repeat():
    repeat = mlax.Repeat(mlax.Series(nn.Linear(6), nn.Dropout(0.5)), 4)
    x, rng = normal(12, 6), jax.random.key(1)
    trainables, _ = repeat.init(jax.random.key(0), x)
    wanted = np.zeros(x.shape)
    for number in range(3):  # a microbatch is every third example
        wanted[number::3] = repeat.fwd(x[number::3], trainables, rng=jax.random.fold_in(rng, number))[0]
    for stages in (2, 4):
        with jax.set_mesh(mesh(stages)):
            y, _ = place.Pipelined(repeat, stages, 3).fwd(x, trainables, rng=rng)
        assert_close(y, wanted)


@pytest.mark.parametrize("microbatches", [RARELY(1), 2, RARELY(16)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_any_number_of_microbatches_gives_the_gradient_of_the_whole_batch(schedule, microbatches):
    model, trainables, _ = initialized("convolutional")
    x = batch(model)
    wanted = jax.jit(found(model, "whole"))(x, trainables, None, jax.random.key(1))
    with jax.set_mesh(mesh(4)):
        step = found(staged(model, 4, microbatches), schedule, microbatches)
        assert_close(jax.jit(step)(x, trainables, None, jax.random.key(1)), wanted)


def test_jax_grad_and_inference_of_a_pipelined_model_work():
    model, trainables, _ = initialized("transformer")
    x = batch(model)["x"]

    def loss(trainables, model):
        return jnp.square(model.fwd(x, trainables)[0]).mean()

    wanted = jax.jit(jax.value_and_grad(loss), static_argnums=1)(trainables, model)
    logits, _ = model.fwd(x, trainables, inference_mode=True)
    pipelined = staged(model, 4)
    with jax.set_mesh(mesh(4, 2)):
        assert_close(jax.jit(jax.value_and_grad(loss), static_argnums=1)(trainables, pipelined), wanted)
        fwd = jax.jit(pipelined.fwd, static_argnames="inference_mode")
        assert_close(fwd(x, trainables, inference_mode=True)[0], logits)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_combine_with_data_and_tensor_parallelism(schedule):
    model, trainables, _ = initialized("perceptron")
    x = batch(model)
    wanted = jax.jit(found(model, "whole"))(x, trainables, None, jax.random.key(1))
    devices = mesh(2, 2, [("model", 2)])

    def put(path, leaf):
        spec = [None] * leaf.ndim
        if path[0].key == "blocks":
            spec[0] = "stage"
        if path[-1].key == "kernel":
            spec[-1] = "model"
        return jax.device_put(leaf, jax.NamedSharding(devices, P(*spec)))

    with jax.set_mesh(devices):
        step = jax.jit(found(staged(model, 2), schedule))
        got = step(x, jax.tree_util.tree_map_with_path(put, trainables), None, jax.random.key(1))
    assert_close(got, wanted, 3e-5)  # sharded over two more axes, float32 sums have yet another order


def test_gpipe_in_bfloat16_equals_the_repeat_in_bfloat16():
    repeat = mlax.Repeat(mlax.Residual(nn.Linear(6)), 4)
    x = normal(8, 6, dtype="bfloat16")
    trainables, _ = repeat.init(jax.random.key(0), x)

    def loss(layer, trainables, x):
        return jnp.square(layer.fwd(x, trainables)[0]).sum(dtype=jnp.float32)

    wanted = jax.jit(jax.value_and_grad(functools.partial(loss, repeat), (0, 1)))(trainables, x)
    with jax.set_mesh(mesh(4)):
        got = jax.jit(jax.value_and_grad(functools.partial(loss, place.Pipelined(repeat, 4, 4)), (0, 1)))(trainables, x)
    assert_close(got, wanted, 3e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(got[1])} == {jnp.dtype("bfloat16")}


@pytest.mark.thorough
def test_one_forward_one_backward_works_under_mixed_precision():
    model = dtypes.Mixed(transformer(4), compute="bfloat16")
    x = batch(transformer())
    trainables, _ = model.init(jax.random.key(0), x["x"])
    wanted = jax.jit(found(model, "parts"))(x, trainables, None, jax.random.key(1))
    with jax.set_mesh(mesh(4)):
        got = jax.jit(found(staged(model, 4), "1f1b"))(x, trainables, None, jax.random.key(1))
    assert_close(got, wanted, 3e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(got.grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_the_pipeline_is_found_within_calls(call):
    model, trainables, _ = initialized("convolutional")
    x = batch(model)
    pipelined = staged(model, 2)

    def within(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return call(lambda *args: objective(pipelined)(*args))(batch, trainables, non_trainables, rng)

    wanted = jax.jit(found(model, "parts"))(x, trainables, None, jax.random.key(1))
    with jax.set_mesh(mesh(2)):
        step = functools.partial(gradients, within, accumulate=MICROBATCHES, backward=place.one_forward_one_backward)
        assert_close(jax.jit(step)(x, trainables, None, jax.random.key(1)), wanted)


def test_inputs_that_no_layer_changes_pass_between_stages_with_the_activations():
    def gated(inputs):
        x, which = inputs
        return jnp.where(which[:, None] > 0, jnp.tanh(x), 1.1 * x)

    @mlax.frozen
    class Model(mlax.Composite):
        blocks: mlax.Layer = mlax.Repeat(mlax.F(gated), 4)
        head: mlax.Layer = nn.Linear(2)

        def wire(self, sub, x):
            return sub.head(sub.blocks(x, (x[:, 0] > 0).astype(jnp.int32)))

    x = normal(8, 6)
    data = {"x": x, "y": jnp.arange(8, dtype=jnp.int32) % 2}
    trainables, _ = Model().init(jax.random.key(0), x)
    wanted = found(Model(), "parts")(data, trainables, None, jax.random.key(1))
    with jax.set_mesh(mesh(2)):
        for schedule in ("gpipe", "1f1b"):
            assert_close(
                jax.jit(found(staged(Model(), 2), schedule))(data, trainables, None, jax.random.key(1)), wanted
            )


def temporary(schedule, microbatches):
    """Bytes that the compiled gradient needs on each device beside its arguments and results; 4 examples at a time."""
    model = perceptron(width=32).layer
    x = batch(transformer(), examples=4 * microbatches)
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), x["x"])
    devices = mesh(4)
    with jax.set_mesh(devices):
        step = jax.jit(found(staged(model, 4, microbatches), schedule, microbatches))
        compiled = step.lower(x, trainables, None, jax.random.key(1)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_one_forward_one_backward_does_not_grow_with_microbatches_as_gpipes_does():
    grown = {schedule: temporary(schedule, 20) - temporary(schedule, 8) for schedule in ("gpipe", "1f1b")}
    activation = 4 * 6 * 32 * 4  # bytes that one stage sends to the next
    assert grown["gpipe"] > 12 * activation
    assert grown["1f1b"] < 4 * activation


def test_a_pipeline_reports_its_bubble():
    layer = place.Pipelined(mlax.Repeat(nn.Linear(6), 12), stages=4, microbatches=8)
    assert layer.bubble == 3 / 11
    assert layer.describe() == "4 stages of 3 layers over 'stage', 8 microbatches: 27% bubble"
    assert place.Pipelined(mlax.Repeat(nn.Linear(6), 12), stages=1, microbatches=8).bubble == 0


def test_each_outermost_repeat_is_pipelined_and_may_be_pipelined_again():
    deep = mlax.Repeat(mlax.Residual(mlax.Repeat(nn.Linear(6), 2)), 4)
    model = mlax.Series(a=deep, b=mlax.Remat(mlax.Repeat(nn.Linear(6), 8)), c=nn.Linear(2))
    cut = staged(model, 2)
    assert {where: each.layer for where, each in find_pipelines(cut).items()} == {
        "a": deep,
        "b": mlax.get(model, "b").layer,
    }
    assert staged(cut, 4) == staged(model, 4)
    assert list(find_pipelines(place.pipeline_repeats(model, 4, microbatches=2, at=("b",)))) == ["b"]
    with pytest.raises(ValueError, match="the model has no Repeat"):
        staged(nn.Linear(2), 2)
    with pytest.raises(KeyError, match="'bb' matches nothing"):
        place.pipeline_repeats(model, 4, microbatches=2, at=("bb",))


def test_invalid_options_are_errors():
    repeat = mlax.Repeat(nn.Linear(6), 12)
    with pytest.raises(TypeError, match=r"the layer is Linear\(6\), but must be a Repeat"):
        place.Pipelined(nn.Linear(6), 2, 2)
    with pytest.raises(
        ValueError, match="5 stages do not divide the 12 layers of the Repeat; use 1, 2, 3, 4, 6, 12 stages"
    ):
        place.Pipelined(repeat, 5, 2)
    with pytest.raises(ValueError, match="microbatches is 0, but must be an integer"):
        place.Pipelined(repeat, 4, 0)
    with pytest.raises(TypeError, match="axis is 0, but must be the name of a mesh axis"):
        place.Pipelined(repeat, 4, 2, 0)
    x = jnp.ones((8, 6))
    trainables, _ = repeat.init(jax.random.key(0), x)
    with jax.set_mesh(mesh(2)):
        with pytest.raises(ValueError, match="there are 4 stages, but the mesh has 2 devices along 'stage'"):
            place.Pipelined(repeat, 4, 2).fwd(x, trainables)
        with pytest.raises(ValueError, match=r"microbatches is 3, which does not divide the batch, float32\[8, 6\]"):
            place.Pipelined(repeat, 2, 3).fwd(x, trainables)
        with pytest.raises(ValueError, match="must have a leading axis of 12"):
            place.Pipelined(repeat, 2, 2).fwd(x, jax.tree.map(lambda leaf: leaf[:2], trainables))


def test_a_layer_with_state_is_an_error():
    layer = place.Pipelined(mlax.Repeat(Block(6), 4), 2, 2)
    with pytest.raises(ValueError, match="the layer has state"):
        layer.init(jax.random.key(0), jnp.ones((4, 6)))
    trainables, state = layer.layer.init(jax.random.key(0), jnp.ones((4, 6)))
    with pytest.raises(ValueError, match="the layer has state"):
        layer.fwd(jnp.ones((4, 6)), trainables, state)


class TestOneForwardOneBackwardRefuses:
    """What it cannot run is an error that says what to do."""

    def refused(self, words, model=None, objective=objective, devices=(2, 1), **overrides):
        model = staged(convolutional(4), 2) if model is None else model
        data = {**batch(convolutional()), **overrides}
        trainables, state = model.init(jax.random.key(0), data["x"])
        step = functools.partial(
            gradients, objective(model), accumulate=MICROBATCHES, backward=place.one_forward_one_backward
        )
        with jax.set_mesh(mesh(*devices)), pytest.raises(ValueError, match=words):
            jax.eval_shape(step, data, trainables, state, jax.random.key(1))

    def test_no_pipeline(self):
        self.refused(r"no pipelined part; call the model that plan.parallelize\(model, x\) returns", convolutional(4))

    def test_a_batch_that_does_not_divide(self):
        odd = jax.tree.map(lambda leaf: leaf[: MICROBATCHES + 1], batch(convolutional()))
        self.refused(f"microbatches is {MICROBATCHES}, which does not divide the batch", **odd)

    def test_two_pipelines(self):
        block = mlax.Repeat(mlax.Residual(nn.Conv(4, 3)), 2)
        model = mlax.Series(nn.Conv(4, 3), block, mlax.F(jnp.tanh), block, nn.GlobalPool(), nn.Linear(3))
        self.refused("the objective calls 2 pipelined parts", staged(model, 2))

    def test_a_pipeline_within_a_loop(self):
        model = staged(mlax.Repeat(mlax.Residual(nn.Conv(1, 3)), 2), 2)

        def looped(model):
            def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
                y, _ = jax.lax.scan(lambda x, _: (model.fwd(x, trainables)[0], None), batch["x"], length=2)
                return y.mean((1, 2, 3)), non_trainables

            return objective

        self.refused("the pipelined part is called inside scan", model, looped)

    def test_a_penalty_on_the_weights_of_the_pipeline(self):
        def penalised(model):
            def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
                y, new = model.fwd(batch["x"], trainables, non_trainables)
                return y.mean(1) + sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(trainables)), new

            return objective

        self.refused(
            "blocks/stacked/layer/conv_0/bias, .* is a weight of the pipeline and is also used outside", None, penalised
        )

    def test_an_input_that_depends_on_changing_state(self):
        @mlax.frozen
        class Shift(mlax.Layer):
            """Adds the number of calls so far."""

            def init(self, rng, x):
                return None, {"calls": jnp.zeros((), x.dtype)}

            def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
                return x + non_trainables["calls"], {"calls": non_trainables["calls"] + 1}

        model = mlax.Series(Shift(), mlax.Repeat(mlax.Residual(nn.Conv(1, 3)), 2), nn.GlobalPool(), nn.Linear(3))
        self.refused("the pipeline's input depends on state that each microbatch updates", staged(model, 2))

    def test_no_mesh(self):
        model = staged(convolutional(4), 2)
        data = batch(convolutional())
        trainables, _ = model.init(jax.random.key(0), data["x"])
        with pytest.raises(ValueError, match="no mesh with the axis 'stage' is set"):
            found(model, "1f1b")(data, trainables, None, jax.random.key(1))


@pytest.mark.parametrize("schedule", [RARELY("gpipe"), "1f1b"])
def test_frozen_weights_in_and_around_a_pipeline_are_not_differentiated(schedule):
    model, trainables, _ = initialized("perceptron")
    x = batch(model)
    frozen = {path for path in flatten_paths(trainables) if "kernel" in path or "table" in path}
    wanted = jax.jit(found(model, "parts"))(x, trainables, None, jax.random.key(1))
    with jax.set_mesh(mesh(2)):
        whole = found(staged(model, 2), schedule)
        live = functools.partial(whole, is_frozen=frozen.__contains__)
        got = jax.jit(live)(x, trainables, None, jax.random.key(1))
        costs = [inspect.flops(jax.make_jaxpr(each)(x, trainables, None, jax.random.key(1))) for each in (live, whole)]
    assert flatten_paths(got.grads).keys() == flatten_paths(trainables).keys() - frozen
    live_grads = {path: g for path, g in flatten_paths(wanted.grads).items() if path not in frozen}
    assert_close(flatten_paths(got.grads), live_grads)
    assert costs[0] < 0.8 * costs[1]
