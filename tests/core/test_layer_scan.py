"""The scan of layers that is for GPUs: the values and derivatives of lax.scan, and residuals that only stacks take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mlax
from mlax import nn
from mlax._jax import layer_scan, prefers_layer_scan, recomputable, with_layer_form, with_vjp
from tests.arrays import normal
from tests.layers import Block

LAYERS, BATCH, WIDTH = 3, 4, 6
X, W, B = normal(BATCH, WIDTH), normal(LAYERS, WIDTH, WIDTH), normal(LAYERS, WIDTH)
SCALE = np.float32(0.3)


def run(scan, x, w, b, scale):
    """Integers and a key in the carry and in xs, a closed-over tracer, an output that is not differentiable."""

    def step(carry, own):
        (x, count), (w, b, key, index) = carry, own
        h = jnp.tanh(x @ w + b).reshape(BATCH, 2, WIDTH // 2)
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        y = x + scale * (jnp.where(keep, h, 0.0).reshape(BATCH, WIDTH) @ w.T + b)
        return (y, count + 1), (h.sum(), index * 2)

    xs = (w, b, jax.random.split(jax.random.key(0), LAYERS), jnp.arange(LAYERS))
    (y, count), (sums, indices) = scan(step, (x, jnp.int32(0)), xs, length=LAYERS)
    return (y * y).sum() * sums.sum(), (count, indices)


def value(scan):
    return lambda *args: run(scan, *args)[0]


def tangent(function):
    return lambda *args: jax.jvp(function, args, (X, W, B, SCALE))


def gradient(function):
    return jax.grad(function, (0, 1, 2, 3))


def run_gated(scan, x, w, b, scale):
    """A product that is multiplied by another one before it is added to the carry, so that both are residuals."""

    def step(x, own):
        w, b = own
        return x + scale * (jnp.tanh(x @ w + b) * (x @ w.T)), None

    y, _ = scan(step, x, (w, b), length=LAYERS)
    return (y * y).sum()


DERIVATIVES = {
    "value": lambda function: function,
    "gradient": gradient,
    "gradient of the weights alone": lambda function: jax.grad(function, 1),
    "tangent": tangent,
    "Hessian-vector product": lambda function: tangent(gradient(function)),
    "gradient of a gradient": lambda function: gradient(lambda *args: (jax.grad(function, 1)(*args) ** 2).sum()),
    "vmap of the gradient": lambda f: jax.vmap(gradient(f), (0, None, None, None), axis_size=BATCH),
    "gradient of the vmap": lambda f: gradient(lambda x, *rest: jax.vmap(lambda s: f(x, *rest[:2], s))(rest[2]).sum()),
    "gradient of a checkpoint": lambda function: gradient(jax.checkpoint(function)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_the_scan_of_layers_has_the_values_and_derivatives_of_a_scan(name):
    args = [X, W, B, SCALE]
    if name == "vmap of the gradient":
        args[0] = jnp.stack([X] * BATCH)
    if name == "gradient of the vmap":
        args[3] = jnp.array([0.1, 0.2], np.float32)
    expected, found = (jax.jit(DERIVATIVES[name](value(scan)))(*args) for scan in (lax.scan, layer_scan))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def test_a_product_that_is_a_residual_of_a_gate_is_stored():
    expected, found = (gradient(functools.partial(run_gated, scan))(X, W, B, SCALE) for scan in (lax.scan, layer_scan))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize("name", ["gradient", "Hessian-vector product", "gradient of a gradient"])
def test_a_function_with_a_hand_written_gradient_keeps_all_derivatives(name):
    sine = with_vjp(lambda x, _: jnp.sin(x), lambda x, _: (jnp.sin(x), jnp.cos(x)), lambda cos, x, _, grad: grad * cos)

    def run(scan, x, w, b, scale):
        return scan(lambda x, w: (sine(x @ w) * x + sine(x) @ w, None), x, w, length=LAYERS)[0].sum() * scale

    expected, found = (
        jax.jit(DERIVATIVES[name](functools.partial(run, scan)))(X, W, B, SCALE) for scan in (lax.scan, layer_scan)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_function_with_a_form_for_the_scan_of_layers_has_all_derivatives(name):
    def forward(x, _):
        return with_layer_form(lambda x: (jnp.sin(x), [jnp.cos(x)]), lambda x: (jnp.sin(x), [jnp.cos(x)]))(x)

    sine = with_vjp(lambda x, _: jnp.sin(x), forward, lambda residuals, x, _, grad: grad * residuals[0])

    def run(scan, x, w, b, scale):
        return scan(lambda x, w: (sine(x @ w) * x + sine(x) @ w, None), x, w, length=LAYERS)[0].sum() * scale

    args = [X, W, B, SCALE]
    if name == "vmap of the gradient":
        args[0] = jnp.stack([X] * BATCH)
    if name == "gradient of the vmap":
        args[3] = jnp.array([0.1, 0.2], np.float32)
    expected, found = (
        jax.jit(DERIVATIVES[name](functools.partial(run, scan)))(*args) for scan in (lax.scan, layer_scan)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
    if name == "gradient":
        exported = jax.export.export(jax.jit(gradient(functools.partial(run, layer_scan))))(*args)
        again = exported.call(*args)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), again, found)


def test_the_second_form_computes_each_layer_where_residuals_are_stored_and_the_first_one_everything_else():
    def forward(x, _):
        return with_layer_form(lambda x: (x, jnp.ones_like(x)), lambda x: (x + 1, jnp.ones_like(x)))(x)

    mark = with_vjp(lambda x, _: x, forward, lambda ones, x, _, grad: grad * ones)

    def count(scan, wrap=lambda f: f):
        """How many layers of the gradient's forward pass are computed by the second form."""
        step = wrap(lambda x, w: (mark(x) * w, None))
        run = lambda x, w: scan(step, x, w, length=LAYERS)[0]  # noqa: E731
        return jax.value_and_grad(run, (0, 1)), (np.float32(0), jnp.ones(LAYERS)), run

    found, args, run = count(layer_scan)
    assert found(*args)[0] == jax.jit(found)(*args)[0] == LAYERS
    assert str(jax.make_jaxpr(found)(*args)).count("= layer_form[") == 1
    assert run(*args) == 0
    np.testing.assert_array_equal(jax.vmap(found, (0, None))(np.zeros(2, np.float32), args[1])[0], [0, 0])
    for ordinary in (count(lax.scan), count(layer_scan, jax.checkpoint), count(layer_scan, jax.jit)):
        assert jax.jit(ordinary[0])(*args)[0] == 0


def test_the_operations_of_a_function_with_two_forms_count_once():
    product = with_layer_form(jnp.matmul, jnp.matmul)
    assert mlax.inspect.flops(jax.make_jaxpr(product)(X, W[0])) == 2 * BATCH * WIDTH * WIDTH


def test_the_gradient_of_a_batched_scan_of_scans_of_layers_is_that_of_scans():
    def loss(scan, scale):
        def step(x, k):
            z, ys = scan(lambda x, w: (jnp.tanh(x * w), x), x * scale, jnp.stack([k, k]), length=2)
            return z * ys.sum(), x

        return lax.scan(step, 0.5, jnp.array([0.3, 0.9, 1.4]))[0]

    for number in (2, 3):  # as many as the scan has steps, and others
        scales = jnp.linspace(0.5, 1.5, number)
        expected, found = (
            jax.grad(lambda scales, scan=scan: jax.vmap(functools.partial(loss, scan))(scales).sum())(scales)
            for scan in (lax.scan, layer_scan)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_scan_of_no_layers_has_a_gradient():
    loss = lambda x, w: layer_scan(lambda x, w: (x * w, None), x, w, length=0)[0].sum()  # noqa: E731
    grads = jax.grad(loss, (0, 1))(jnp.ones(2), jnp.ones((0, 2)))
    np.testing.assert_array_equal(grads[0], jnp.ones(2))
    assert grads[1].shape == (0, 2)


def test_outputs_that_are_not_differentiable_are_those_of_a_scan():
    (_, (count, indices)), _ = jax.value_and_grad(functools.partial(run, layer_scan), has_aux=True)(X, W, B, SCALE)
    assert count == LAYERS
    np.testing.assert_array_equal(indices, [0, 2, 4])


def normalize(x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1)


norm = with_vjp(
    lambda primals, consts=None: normalize(*primals),
    lambda primals, consts: (normalize(*primals), None),
    lambda residuals, primals, consts, dy: jax.vjp(normalize, *primals)[1](dy),
)


def normalize_recomputably(x):
    return recomputable(norm((x,)), norm, (x,))


with_recomputable_forward = with_vjp(
    lambda primals, consts=None: normalize(*primals),
    lambda primals, consts: (normalize_recomputably(*primals), None),
    lambda residuals, primals, consts, dy: jax.vjp(normalize, *primals)[1](dy),
)
FORMS = {
    "a norm": normalize_recomputably,
    "the norm of a norm": lambda x: normalize_recomputably(2 * normalize_recomputably(x)),
    "inside of a forward pass": lambda x: with_recomputable_forward((x,)),
    "behind a stop_gradient": lambda x: normalize_recomputably(lax.stop_gradient(x)),
}


def run_normalized(scan, x, w, v, normalize=normalize_recomputably):
    """A normalized array that two products read, of a sum."""

    def step(x, own):
        w, v = own
        x = x + x @ w
        y = normalize(x)
        return x + (y @ w) * (y @ v), None

    return (scan(step, x, (w, v), length=LAYERS)[0] ** 2).sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gradient", "gradient of a gradient", "vmap of the gradient", "tangent"])
def test_what_several_products_read_is_computed_again_from_what_is_stored(name, form):
    transforms = {
        "gradient": lambda f: jax.grad(f, (0, 1, 2)),
        "gradient of a gradient": lambda f: jax.grad(lambda *args: (jax.grad(f, 1)(*args) ** 2).sum(), (0, 1, 2)),
        "vmap of the gradient": lambda f: (
            lambda x, *rest: jax.vmap(jax.grad(f, (0, 1)), (0, None, None))(jnp.stack([x, 2 * x]), *rest)
        ),
        "tangent": lambda f: lambda *args: jax.jvp(f, args, args),
    }
    found, expected = (
        jax.jit(transforms[name](functools.partial(run_normalized, scan, normalize=FORMS[form])))(X, 0.3 * W, 0.3 * W)
        for scan in (layer_scan, lax.scan)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def test_a_constant_that_a_forward_pass_returns_has_no_derivative_where_others_use_it():
    constant = np.full((BATCH, WIDTH), 1.5, np.float32)
    straight_through = with_vjp(  # the derivative of the identity
        lambda primals, consts=None: constant + primals[0] - lax.stop_gradient(primals[0]),
        lambda primals, consts: (jnp.asarray(constant), None),
        lambda residuals, primals, consts, dy: (dy,),
    )

    def run(scan, x, w):
        def step(x, w):
            z = x @ w
            return x + jnp.sin(z * constant) + straight_through((z,)) @ w, None

        return (scan(step, x, w, length=LAYERS)[0] ** 2).sum()

    def bent(scan):
        loss = functools.partial(run, scan)
        return jax.jit(jax.grad(lambda *args: (jax.grad(loss, 1)(*args) ** 2).sum(), (0, 1)))(X, 0.3 * W)

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), bent(layer_scan), bent(lax.scan))


def test_what_is_computed_again_is_not_stored_and_what_it_is_computed_from_is_written_by_nothing_else():
    pull_back = jax.make_jaxpr(lambda *args: jax.vjp(functools.partial(run_normalized, layer_scan), *args))(X, W, W)
    stacks = [eqn.outvars[0].aval.shape[0] for eqn in pull_back.jaxpr.eqns if eqn.primitive.name == "empty"]
    assert sorted(stacks) == [LAYERS] * 3 + [LAYERS + 1]  # the sum, two products and the carry
    (loop,) = [eqn.params["jaxpr"].jaxpr for eqn in pull_back.jaxpr.eqns if eqn.primitive.name == "scan"]
    total = next(eqn.outvars[0] for eqn in loop.eqns if eqn.primitive.name == "add" and eqn.outvars[0].aval.ndim == 2)
    takers = [eqn for eqn in loop.eqns if any(atom is total for atom in eqn.invars)]
    assert len(takers) == 1 and "update" in str(takers[0].params.get("name", takers[0].primitive.name))


def test_a_carry_that_the_step_promotes_is_that_of_a_scan():
    def run(scan):
        return scan(lambda x, w: (x + w.sum(), x), 1, W, length=LAYERS)

    jax.tree.map(np.testing.assert_array_equal, run(layer_scan), run(lax.scan))


def test_a_residual_of_a_call_with_several_results_and_no_arguments_is_stored():
    shapes = [jax.ShapeDtypeStruct((), np.float32)] * 2

    def step(x, w):
        a, b = jax.pure_callback(lambda: (np.float32(2), np.float32(3)), shapes)
        return jnp.sin(x @ w) * b + x * x * a, None

    def loss(scan, x, w):
        return scan(step, x, w, length=LAYERS)[0].sum()

    found = [jax.grad(functools.partial(loss, scan), (0, 1))(0.1 * X, W) for scan in (layer_scan, lax.scan)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *found)


def forward_loop():
    """The shapes of the stacks of a forward pass with residuals x and h, and the equations of its loop."""

    def step(x, own):
        w, v = own
        h = (x @ w).reshape(BATCH, 2, WIDTH // 2)
        return x + h.reshape(BATCH, WIDTH) @ v, None

    def loss(x, w, v):
        return layer_scan(step, x, (w, v), length=LAYERS)[0].sum()

    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(loss, *args))(X, W, W).jaxpr
    stacks = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "empty"]
    (loop,) = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    return stacks, loop.eqns


def test_each_residual_is_stored_once_and_weights_are_not():
    stack = (LAYERS, BATCH, WIDTH)
    assert sorted(forward_loop()[0]) == [
        stack,
        (LAYERS + 1, BATCH, WIDTH),
    ]  # that of the carry has the last output, too


def test_nothing_but_the_stack_takes_a_residual_in_the_forward_pass():
    _, eqns = forward_loop()
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    takers = [eqn for eqn in eqns if any(atom is products[0].outvars[0] for atom in eqn.invars)]
    assert len(products) == 2 and len(takers) == 1
    assert "update" in str(takers[0].params.get("name", takers[0].primitive.name))


def choose_layer_scan(monkeypatch):
    """As in a program of one GPU; returns a list that grows with each choice."""
    chosen = []

    def prefers(*trees):
        chosen.append(trees)
        return True

    monkeypatch.setitem(mlax.Repeat.apply_with_keys.__globals__, "prefers_layer_scan", prefers)
    return chosen


@pytest.mark.parametrize("transform", ["value_and_grad", "jvp"])
def test_a_repeat_on_a_gpu_computes_what_an_unrolled_one_does(monkeypatch, transform):
    chosen = choose_layer_scan(monkeypatch)

    def compute(mode):
        layer = mlax.Repeat(Block(WIDTH), LAYERS, mode=mode)
        trainables, state = layer.init(jax.random.key(0), X)

        def loss(trainables, x):
            y, new = layer.fwd(x, trainables, state, rng=jax.random.key(1))
            return (y * y).sum(), new

        if transform == "jvp":
            return jax.jit(lambda *args: jax.jvp(lambda *args: loss(*args)[0], args, args))(trainables, X)
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(trainables, X)

    found, expected = compute("scan"), compute("unroll")
    assert chosen
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), found, expected)


def test_outputs_inside_of_a_repeat_on_a_gpu_are_captured(monkeypatch):
    layer = mlax.Repeat(mlax.Residual(nn.Linear(WIDTH)), LAYERS)
    variables = layer.init(jax.random.key(0), X)
    expected = mlax.capture(layer, "**")(X, *variables)
    choose_layer_scan(monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, mlax.capture(layer, "**")(X, *variables), expected)


def test_the_scan_of_layers_is_for_one_gpu(monkeypatch):
    assert not prefers_layer_scan(X)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert not prefers_layer_scan(X)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert prefers_layer_scan(X)
