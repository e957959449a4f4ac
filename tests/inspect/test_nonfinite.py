"""nonfinite names the layer, the pass and the operation of the first NaN or infinity."""

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import inspect, nn, optim, place, train

X = jnp.ones((2, 4))


@mlax.frozen
class Block(mlax.Composite):
    """A block with a logarithm of a trainable, which is 0 in one repetition."""

    def parts(self):
        return {"up": nn.Linear(4), "scale": nn.Scaler()}

    def wire(self, sub, x):
        return x + 0 * jnp.log(jnp.abs(sub.scale(sub.up(x))))


def model(mode):
    deep = mlax.Series(blocks=mlax.Repeat(Block(), 12, mode=mode), head=nn.Linear(1))
    trainables, _ = deep.init(jax.random.key(0), X)
    scale = trainables["blocks"]["stacked"]["scale"]
    (name,) = scale
    scale[name] = scale[name].at[7].set(0.0)
    return deep, trainables


MODES = ["scan", *(pytest.param(mode, marks=pytest.mark.thorough) for mode in ("unroll", "remat"))]


@pytest.mark.parametrize("mode", MODES)
def test_the_logarithm_of_zero_in_one_of_twelve_blocks_is_found(mode):
    deep, trainables = model(mode)
    found = inspect.nonfinite(lambda trainables: deep.fwd(X, trainables)[0].sum(), trainables)
    assert (found.path, found.is_backward, found.primitive) == ("blocks/7", False, "mul")
    assert found.cause.path == "blocks/7" and found.cause.primitive == "log"
    assert found.cause.inputs[0].zeros == 8
    assert "test_nonfinite.py" in found.source and "(wire)" in found.source
    assert "the first NaN is in blocks/7, in the forward pass: mul" in str(found)
    assert "it is computed from an infinity: in blocks/7" in str(found)


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_gradient_of_a_square_root_at_zero_is_found_in_the_backward_pass(mode):
    layer = mlax.Series(
        up=nn.Linear(4), blocks=mlax.Repeat(mlax.Series(root=mlax.F(masked_root), up=nn.Linear(4)), 3, mode=mode)
    )
    trainables, _ = layer.init(jax.random.key(0), X)
    trainables = jax.tree.map(jnp.zeros_like, trainables)

    def loss(trainables):
        return layer.fwd(X, trainables)[0].sum()

    assert inspect.nonfinite(loss, trainables) is None
    found = inspect.nonfinite(jax.grad(loss), trainables)
    assert (found.path, found.is_backward) == ("blocks/2/root", True)


def masked_root(x):
    return jnp.where(x > 0, jnp.sqrt(x), 0)


def test_what_does_not_reach_the_result_is_not_blamed():
    def masked(x):
        return jnp.where(x > 0, jnp.log(x), 0.0), jax.nn.softmax(jnp.where(x > 1, x, -jnp.inf)).sum()

    assert inspect.nonfinite(masked, jnp.array([0.0, 1.0, 2.0])) is None


def test_an_infinity_alone_and_one_in_a_loop_are_found():
    found = inspect.nonfinite(lambda x: jnp.exp(x * 100).sum(), X)
    assert found.primitive == "exp" and found.outputs[0].inf == 8
    looped = inspect.nonfinite(lambda x: jax.lax.fori_loop(0, 1000, lambda i, x: x * 2, x), X)
    assert looped.primitive == "mul" and looped.outputs[0].inf == 8
    branch = inspect.nonfinite(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.log(x - 1), lambda: x), X)
    assert branch.primitive == "log"


def test_a_weight_that_is_not_finite_is_named():
    layer = mlax.Series(up=nn.Linear(4))
    trainables, _ = layer.init(jax.random.key(0), X)
    trainables["up"]["kernel"] = trainables["up"]["kernel"].at[0, 0].set(jnp.nan)
    found = inspect.nonfinite(lambda trainables, x: layer.fwd(x, trainables)[0], trainables, X)
    assert str(found).startswith("the first NaN is in the argument 0/up/kernel: float32[4, 4]:")


def test_buffers_that_a_jitted_function_donates_are_kept():
    x = jnp.zeros(3)
    found = inspect.nonfinite(jax.jit(lambda x: x + 0 * jnp.log(x), donate_argnums=0), x)
    assert found.cause.primitive == "log" and not x.is_deleted()


@pytest.mark.parametrize("options", [{"steps_per_call": 2}, {"plan": place.fsdp()}])
def test_a_training_step_names_the_layer_although_its_result_is_finite(options):
    model = mlax.Series(norm=nn.BatchNorm(), up=nn.Linear(4), act=mlax.F(lambda x: jnp.log(jnp.abs(x) - 1e-9)))

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        y, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return y.sum(-1), new

    step = train.step(objective, optim.SGD(0.1), **options)
    batch = {"x": jnp.arange(32.0).reshape(8, 4)}
    state = step.init(jax.random.key(1), *model.init(jax.random.key(0), batch["x"]))
    if "steps_per_call" in options:
        batch = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
    assert inspect.nonfinite(step, state, batch) is None
    state = state._replace(trainables=jax.tree.map(jnp.zeros_like, state.trainables))
    found = step.nonfinite(state, batch)
    assert (found.path, found.primitive) == ("act", "log")
