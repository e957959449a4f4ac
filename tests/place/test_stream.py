"""A streamed model computes and trains like the resident one, and its weights and slots stay in host memory."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mlax
from mlax import nn, optim, place, train
from mlax._jax import plan_chunks
from tests.arrays import normal
from tests.asserts import assert_close
from tests.layers import Block


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def both(times, width=6, dropout=0.5):
    repeat = mlax.Repeat(Block(width, dropout), times)
    x = normal(4, width)
    return repeat, place.Stream(repeat), x


def gradients(layer):
    def loss(trainables, x, non_trainables):
        y, new = layer.fwd(x, trainables, non_trainables, rng=jax.random.key(1))
        return (y * y).mean(), new

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("times", "inputs_in_host"),
    [
        (1, False),
        (5, True),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((1, True), (2, False), (2, True), (5, False))),
    ],
)
def test_a_streamed_repeat_computes_what_the_repeat_does(times, inputs_in_host):
    repeat, _, x = both(times)
    stream = place.Stream(repeat, inputs_in_host)
    trainables, state = repeat.init(jax.random.key(0), x)
    held, _ = stream.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, held, trainables)
    assert kinds(held) == {"pinned_host"}
    (value, new), (dw, dx) = gradients(stream)(held, x, state)
    assert_close(((value, new), (dw, dx)), gradients(repeat)(trainables, x, state))
    assert kinds(dw) == {"pinned_host"} and kinds((value, new, dx)) == {"device"}
    on_device = gradients(stream)(trainables, x, state)
    assert_close(on_device, ((value, new), (dw, dx)))
    assert kinds(on_device) == {"device"}


def test_gradients_reach_the_state_and_integer_inputs_pass_through():
    @mlax.frozen
    class Shift(mlax.Layer):
        """Adds its state, a weight and a count."""

        def init(self, rng, x):
            return {"w": jnp.ones(())}, {"s": jnp.ones(3), "n": jnp.zeros((), jnp.int32)}

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            y = x["a"] * trainables["w"] + non_trainables["s"] * x["i"].astype(jnp.float32)
            new = {"s": non_trainables["s"] * trainables["w"], "n": non_trainables["n"] + 1}
            return {"a": y, "i": x["i"]}, new

    repeat = mlax.Repeat(Shift(), 4)
    x = {"a": jnp.arange(3.0), "i": jnp.int32(2)}
    trainables, state = repeat.init(jax.random.key(0), x)

    def loss(layer):
        def of(trainables, a, s):
            y, new = layer.fwd({**x, "a": a}, trainables, {"stacked": {**state["stacked"], "s": s}})
            return (y["a"] ** 2).sum() + (new["stacked"]["s"] ** 3).sum()

        return jax.jit(jax.grad(of, (0, 1, 2)))

    stream, s = place.Stream(repeat), state["stacked"]["s"]
    assert_close(loss(stream)(trainables, x["a"], s), loss(repeat)(trainables, x["a"], s))
    y, new = jax.jit(stream.fwd)(x, trainables, state)  # inference_mode traced
    assert_close((y, new), repeat.fwd(x, trainables, state))


def test_every_streamed_layer_gets_the_inputs_after_the_first():
    @mlax.frozen
    class Scale(mlax.Composite):
        linear: mlax.Layer = nn.Linear(3)

        def wire(self, sub, x, t):
            return sub.linear(x) * t

    repeat, inputs = mlax.Repeat(Scale(), 3), (normal(2, 3), normal(2, 3, seed=1))
    trainables, _ = repeat.init(jax.random.key(0), inputs)

    def grads(layer):
        return jax.grad(lambda trainables, x: (layer.fwd(x, trainables)[0] ** 2).sum(), (0, 1))(trainables, inputs)

    assert_close(grads(place.Stream(repeat)), grads(repeat))


def test_at_most_two_layers_are_on_the_device():
    def working(times):
        _, stream, x = both(times, 64, 0.0)
        variables = stream.init(jax.random.key(0), x)
        compiled = gradients(stream).lower(variables[0], x, variables[1]).compile()
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(variables[0]))
        return compiled.memory_analysis().temp_size_in_bytes, weights // times, x.nbytes

    (few, layer, x), (many, *_) = working(16), working(32)
    assert many - few < 16 * x + layer
    assert few < 4 * layer + 16 * x  # weights of two, gradients of two


def test_a_stack_sharded_over_a_mesh_streams_from_the_hosts_of_its_devices():
    repeat, stream, x = both(3, 8, 0.0)
    trainables, state = repeat.init(jax.random.key(0), x)
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("model",))

    def spread(leaf):
        split = [None] * (leaf.ndim - 1) + ["model" if leaf.shape[-1] % 8 == 0 else None]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*split), memory_kind="pinned_host"))

    held = jax.tree.map(spread, trainables)
    found = gradients(stream)(held, x, state)
    assert_close(found, gradients(repeat)(trainables, x, state))
    assert kinds(found[1][0]) == {"pinned_host"}


def test_anything_but_a_repeat_is_an_error():
    with pytest.raises(TypeError, match="is not a Repeat"):
        place.Stream(nn.Linear(3))
    with pytest.raises(ValueError, match="all of its weights on the device"):
        place.Stream(mlax.Repeat(nn.Linear(3), 2, mode="unroll"))


def trained(streamed, optimizer, spoilt=(), **options):
    blocks = mlax.Repeat(Block(6, 0.0), 4)
    model = mlax.Series(into=nn.Linear(6), blocks=place.Stream(blocks) if streamed else blocks, out=nn.Linear(1))

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        y, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return ((y - batch["y"]) ** 2).mean(-1), new

    step = train.step(objective, optimizer, **options)
    state = step.init(jax.random.key(1), *model.init(jax.random.key(0), jnp.ones((8, 6))))
    losses = []
    for time in range(10):
        draws = np.random.default_rng(time)
        batch = {"x": draws.normal(size=(8, 6)).astype("f"), "y": draws.normal(size=(8, 1)).astype("f")}
        batch["x"] *= np.nan if time in spoilt else 1
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, step


ADAM = optim.AdamW(1e-2)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (ADAM, {}),
        (optim.ClipGlobalNorm(ADAM, 0.1), {}),
        (ADAM, {"spoilt": (3,)}),
        pytest.param(ADAM, {"accumulate": 2}, marks=pytest.mark.thorough),
        pytest.param(ADAM, {"scaling": train.StaticLossScale()}, marks=pytest.mark.thorough),
    ],
    ids=["plain", "clipped", "guarded", "in parts", "scaled"],
)
def test_a_streamed_model_trains_like_a_resident_one(optimizer, options, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(plan_chunks), "MIN_CHUNK_BYTES", 1)
    losses, resident, _ = trained(False, optimizer, **options)
    same, state, step = trained(True, optimizer, **options)
    np.testing.assert_allclose(same, losses, rtol=1e-6)
    assert_close(jax.tree.leaves(state._replace(rng=None)), jax.tree.leaves(resident._replace(rng=None)))
    assert int(state.skipped) == len(options.get("spoilt", ()))
    assert kinds((state.trainables["blocks"], state.optimizer.mean["blocks"])) == {"pinned_host"}
    assert kinds((state.trainables["into"], state.optimizer.mean["into"], state.optimizer.step)) == {"device"}
    assert len(step.aot.compiled) == 1


def test_a_checkpoint_restores_the_state_to_host_memory(tmp_path):
    _, state, step = trained(True, ADAM)
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(10, state)
    checkpoints.wait()
    restored = checkpoints.restore(state).tree
    assert kinds(restored.trainables["blocks"]) == kinds(restored.optimizer.square["blocks"]) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, restored.trainables, state.trainables)
    again, metrics = step(restored, {"x": np.ones((8, 6), "f"), "y": np.ones((8, 1), "f")})
    assert kinds(again.trainables["blocks"]) == {"pinned_host"} and np.isfinite(float(metrics["loss"]))
