"""MLP, GLU, activations, Flatten and Reshape, and Linear on many axes, beyond the contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, nn, ops
from tests.asserts import assert_close
from tests.references.experts import assert_agrees_with_torch, cases

RNG = jax.random.key(0)
FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("case", cases("mlp"))
def test_mlp_agrees_with_torch(case):
    assert_agrees_with_torch(case, nn.MLP((9, 4)))


@pytest.mark.parametrize("case", cases("glu"))
def test_every_glu_agrees_with_torch(case):
    assert_agrees_with_torch(case, nn.GLU(4, activation=getattr(jax.nn, case.split()[1])))


def test_an_mlp_of_one_width_is_a_linear_and_its_parts_can_be_edited():
    x = jnp.ones((2, 3))
    layer = nn.MLP((4,))
    trainables, _ = layer.init(RNG, x)
    np.testing.assert_array_equal(layer.fwd(x, trainables)[0], nn.Linear(4).fwd(x, trainables["linear_0"])[0])
    edited = mlax.override(nn.MLP((4, 2)), nn.Linear, kernel_init=mlax.Zeros())
    assert not any(leaf.any() for leaf in jax.tree.leaves(edited.init(RNG, x)[0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_relu_in_the_form_for_a_gpu_has_the_values_and_derivatives_of_jax_nn_relu(dtype, monkeypatch):
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0, jnp.inf, -jnp.inf, jnp.nan], dtype)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    relu = functools.partial(ops.activate, bias=None, activation=jax.nn.relu)
    for form in (
        lambda f: f,
        lambda f: lambda x: jax.jvp(f, (x,), (x + 2,))[1],
        lambda f: jax.grad(lambda x: jnp.sum(f(x))),
    ):
        np.testing.assert_array_equal(*(np.asarray(form(f)(x), np.float64) for f in (relu, jax.nn.relu)))
    curved = jax.hessian(lambda x: jnp.sum(relu(x) ** 2))
    np.testing.assert_array_equal(curved(x[:5]), jax.hessian(lambda x: jnp.sum(jax.nn.relu(x) ** 2))(x[:5]))


def test_an_mlp_of_relus_has_the_same_gradients_on_a_gpu(monkeypatch):
    layer, x = nn.MLP((7, 7, 2), activation=jax.nn.relu), jnp.linspace(-1, 1, 15).reshape(5, 3)
    trainables, _ = layer.init(RNG, x)
    expected = jax.grad(lambda trainables: layer.fwd(x, trainables)[0].sum())(trainables)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jaxpr = str(jax.make_jaxpr(lambda trainables: layer.fwd(x, trainables)[0])(trainables))
    assert jaxpr.count("relu_from_output") == 2
    assert_close(jax.grad(lambda trainables: layer.fwd(x, trainables)[0].sum())(trainables), expected)


REFERENCES = {
    "squared_relu": (ops.squared_relu, lambda x: np.maximum(x, 0) ** 2),
    "quick_gelu": (ops.quick_gelu, lambda x: x / (1 + np.exp(-1.702 * x))),
    "snake": (lambda x: ops.snake(x, 2.5), lambda x: x + np.sin(2.5 * x) ** 2 / 2.5),
    "soft_cap": (lambda x: ops.soft_cap(x, 3.0), lambda x: 3 * np.tanh(x / 3)),
}


@pytest.mark.parametrize("wrap", [lambda layer: layer, lambda layer: nn.LoRA(layer, 2), "quantize"])
def test_the_activation_of_a_linear_layer_comes_after_its_bias_and_its_adapter(wrap):
    x = jax.random.normal(RNG, (4, 8))
    plain, active = nn.Linear(6), nn.Linear(6, activation=ops.exact_gelu)
    if wrap == "quantize":
        trainables = active.init(RNG, x)[0]
        (plain, weights), (active, _) = (nn.quantize(layer, trainables) for layer in (plain, active))
    else:
        plain, active = wrap(plain), wrap(active)
        weights = jax.tree.map(lambda leaf: leaf + 0.1, plain.init(RNG, x)[0])
    assert_close(active.fwd(x, weights)[0], jax.nn.gelu(plain.fwd(x, weights)[0], approximate=False), 1e-6)


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_is_that_of_jax_and_its_backward_pass_keeps_the_input_alone(approximate):
    theirs = functools.partial(jax.nn.gelu, approximate=approximate)
    with jax.enable_x64(True):
        x = jnp.linspace(-30.0, 30.0, 601, dtype="float64")
        (y, dx), (expected, slope) = (
            jax.jvp(each, (x,), (x,)) for each in (functools.partial(ops.gelu, approximate=approximate), theirs)
        )
        np.testing.assert_allclose([y, dx], [expected, slope], atol=1e-12)
        ours = jax.vmap(jax.grad(lambda x: ops.gelu(x, approximate)))
        np.testing.assert_allclose(ours(x), jax.vmap(jax.grad(theirs))(x), atol=1e-12)
        second = jax.vmap(jax.grad(jax.grad(lambda x: ops.gelu(x, approximate))))
        np.testing.assert_allclose(second(x), jax.vmap(jax.grad(jax.grad(theirs)))(x), atol=1e-12)
    kept = jax.tree.leaves(jax.vjp(lambda x: ops.gelu(x, approximate), x.astype("float32"))[1])
    assert [leaf.shape for leaf in kept if leaf.size > 1] == [x.shape]
    large = jnp.asarray([-6e4, -300, -80, 80, 300, 6e4], "float16")  # of which the cube is infinite
    np.testing.assert_array_equal(
        jax.vjp(lambda x: ops.gelu(x, approximate), large)[1](jnp.ones_like(large))[0], [0, 0, 0, 1, 1, 1]
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", REFERENCES)
def test_activations_equal_their_formulas_in_one_dtype(name, dtype):
    function, reference = REFERENCES[name]
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(np.linspace(-4, 4, 41), dtype)
        tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-14}[dtype]
        exact = np.asarray(x, np.float64)
        np.testing.assert_allclose(np.asarray(function(x), np.float64), reference(exact), tolerance, tolerance)
        slope = jax.grad(lambda x: jax.lax.reduce_sum(function(x), (0,)))
        assert dtypes.audit(function, x) == dtypes.audit(slope, x) == ()
        if dtype == "float64":
            numeric = (reference(exact + 1e-6) - reference(exact - 1e-6)) / 2e-6
            np.testing.assert_allclose(slope(x), numeric, rtol=1e-6, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=4), b=st.integers(0, 3))
def test_flatten_and_reshape_keep_the_order_of_elements(shape, b):
    x = np.arange(b * int(np.prod(shape)), dtype=np.float32).reshape(b, *shape)
    flat, _ = nn.Flatten().fwd(x, None)
    np.testing.assert_array_equal(flat, x.reshape(b, int(np.prod(shape))))
    back, _ = nn.Reshape(tuple(shape)).fwd(flat, None)
    np.testing.assert_array_equal(back, x)
    open_, _ = nn.Reshape((1, -1)).fwd(x, None)
    np.testing.assert_array_equal(open_[:, 0], flat)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.MLP(()), "must be a tuple of integers"),
        (lambda: nn.MLP((3, 2.0)), "must be a tuple of integers"),
        (lambda: nn.MLP((3,), activation="relu"), "activation is 'relu', but must be a function"),
        (lambda: nn.GLU(3, activation=None), "activation is None, but must be a function"),
        (lambda: nn.Reshape(3), "must be a tuple of integers"),
        (lambda: nn.Reshape((-1, -1)), "at most one of them inferred"),
        (
            lambda: nn.Reshape((4, 2)).init(RNG, jnp.ones((2, 3, 3))),
            r"\(3, 3\), which is 9 elements.*cannot be reshaped to \(4, 2\)",
        ),
        (lambda: nn.Reshape((4, -1)).init(RNG, jnp.ones((2, 3, 3))), r"cannot be reshaped to \(4, -1\)"),
        (lambda: nn.Flatten().init(RNG, jnp.ones(())), "needs a batch axis"),
    ],
)
def test_errors_say_what_is_wrong(build, words):
    with pytest.raises((TypeError, ValueError), match=words):
        build()


def reshapes(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("= reshape[")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only on a CPU is the input flattened")
def test_linear_flattens_an_input_of_many_axes_on_one_device():
    x, kernel = jnp.ones((4, 3, 2, 6)), jnp.ones((6, 5))
    assert reshapes(ops.linear, x, kernel) == 2
    assert reshapes(ops.linear, x[0, 0], kernel) == 0
    assert ops.linear(x, kernel).shape == (4, 3, 2, 5)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("spec", [P("data"), P("data", "time"), P(None, "time"), P(("data", "time"))])
def test_linear_over_a_sharded_sequence_gathers_nothing(kind, spec):
    draws = np.random.default_rng(0)
    x, kernel, bias = (jnp.asarray(draws.normal(size=s), jnp.float32) for s in ((8, 4, 6), (6, 5), (5,)))

    def loss(x, kernel, bias):
        y = jnp.tanh(ops.linear(x, kernel, bias))
        return (y * y).sum(), y

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, want), grads = step(x, kernel, bias)
    mesh = jax.make_mesh((4, 2), ("data", "time"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        shared = jax.device_put((kernel, bias), NamedSharding(mesh, P()))
        compiled = step.lower(placed, *shared).compile()
        (_, got), got_grads = compiled(placed, *shared)
    assert "all-gather" not in compiled.as_text() and "all-to-all" not in compiled.as_text()
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert_close((got, got_grads), (want, grads), 1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 2, 1, 3), (2, 0, 3), (0, 2, 2), (2, 1, 2, 2, 1)])
def test_gradients_of_linear_agree_with_numpy_for_many_axes(shape):
    draws = np.random.default_rng(0)
    x, kernel = draws.normal(size=shape).astype(np.float32), draws.normal(size=(shape[-1], 4)).astype(np.float32)
    probe = draws.normal(size=(*shape[:-1], 4)).astype(np.float32)
    dx, dk = jax.jit(jax.grad(lambda x, k: (ops.linear(x, k) * probe).sum(), (0, 1)))(x, kernel)
    np.testing.assert_allclose(dx, probe @ kernel.T, rtol=1e-5, atol=1e-5)
    rows = int(np.prod(shape[:-1]))
    want = x.reshape(rows, shape[-1]).T @ probe.reshape(rows, 4)
    np.testing.assert_allclose(dk, want, rtol=1e-5, atol=1e-5)
