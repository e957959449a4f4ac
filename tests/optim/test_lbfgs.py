"""LBFGS: the minima of the classic test functions, in few steps, by way of lower and lower losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import optimize

from mlax import optim
from tests.asserts import compilations
from tests.optim.test_convergence import FUNCTIONS

STEPS = 80


def ill_conditioned(kernel):
    """A quadratic with condition number 10,000, rotated so that no axis is an eigenvector."""
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    square = jnp.asarray(turned @ np.diag(np.logspace(0, 4, 6)) @ turned.T, kernel.dtype)
    off = kernel.ravel() - 1
    return off @ square @ off / 2


CASES = {**FUNCTIONS, "ill-conditioned": (ill_conditioned, np.zeros((3, 2)))}


def run(optimizer, loss, trainables, steps):
    """The last weights and the loss before each step."""

    def step(carry, _):
        trainables, state = carry
        value, grads = jax.value_and_grad(loss)(trainables)
        return optimizer.update(grads, state, trainables, value=value, loss=loss), value

    return jax.jit(lambda carry: lax.scan(step, carry, length=steps))((trainables, optimizer.init(trainables)))


@functools.cache
def losses(case, optimizer, steps):
    function, start = CASES[case]
    with jax.enable_x64(True):
        trainables = {"kernel": jnp.asarray(start, jnp.float64)}
        (trainables, _), values = run(optimizer, lambda trainables: function(trainables["kernel"]), trainables, steps)
        return np.asarray(values), np.asarray(trainables["kernel"])


@pytest.mark.parametrize("case", CASES)
def test_reaches_the_minimum_in_far_fewer_steps_than_adam(case):
    found, _ = losses(case, optim.LBFGS(), STEPS)
    by_adam, _ = losses(case, optim.Adam(0.05), 10 * STEPS)
    assert found[-1] < 1e-10
    assert by_adam[-1] > 100 * found[-1]


@pytest.mark.parametrize("case", CASES)
def test_reaches_the_minimum_of_scipy(case):
    function, start = CASES[case]
    with jax.enable_x64(True):
        objective = jax.jit(jax.value_and_grad(lambda flat: function(flat.reshape(np.shape(start)))))
        reference = optimize.minimize(
            lambda flat: tuple(np.float64(part) for part in objective(jnp.asarray(flat))),
            np.ravel(start),
            jac=True,
            method="L-BFGS-B",
            options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 500},
        )
    found, weights = losses(case, optim.LBFGS(), STEPS)
    np.testing.assert_allclose(weights.ravel(), reference.x, atol=1e-4)
    assert found[-1] <= reference.fun + 1e-9


@pytest.mark.parametrize("case", CASES)
def test_no_step_makes_the_loss_larger(case):
    found, _ = losses(case, optim.LBFGS(), STEPS)
    assert (np.diff(found) <= 0).all()


@pytest.mark.parametrize("history", [1, 3, 20])
def test_any_history_length_reaches_the_minimum(history):
    found, _ = losses("rosenbrock", optim.LBFGS(history=history), STEPS)
    assert found[-1] < 1e-8


@pytest.mark.parametrize("given", [True, False])
def test_the_value_of_the_loss_is_optional(given):
    optimizer, trainables = optim.LBFGS(), {"kernel": jnp.asarray([[-1.2], [1.0]])}
    loss = lambda trainables: FUNCTIONS["rosenbrock"][0](trainables["kernel"])  # noqa: E731
    value, grads = jax.value_and_grad(loss)(trainables)
    extra = {"value": value} if given else {}
    new, _ = optimizer.update(grads, optimizer.init(trainables), trainables, loss=loss, **extra)
    assert loss(new) < value


@pytest.mark.parametrize("start", [0.01, 3.0, 100.0])
def test_the_search_avoids_where_the_loss_is_nan(start):
    """`x - log(x)`, which is NaN for negative x, has its minimum at 1."""
    trainables = {"x": jnp.asarray(start, jnp.float32)}
    (trainables, _), values = run(
        optim.LBFGS(), lambda trainables: trainables["x"] - jnp.log(trainables["x"]), trainables, 30
    )
    assert np.isfinite(values).all() and (np.diff(values) <= 1e-6 * np.abs(values[1:])).all()
    np.testing.assert_allclose(trainables["x"], 1, rtol=1e-3)


def test_nothing_moves_if_no_step_length_lowers_the_loss():
    loss = lambda trainables: jnp.sum(trainables["x"]) * jnp.nan  # noqa: E731
    trainables = {"x": jnp.ones(3)}
    optimizer = optim.LBFGS(max_search_steps=4)
    state = optimizer.init(trainables)
    new, _ = optimizer.update({"x": jnp.ones(3)}, state, trainables, value=jnp.asarray(1.0), loss=loss)
    np.testing.assert_array_equal(new["x"], 1)


def test_at_the_minimum_it_stays():
    trainables = {"x": jnp.zeros(3)}
    (trainables, state), _ = run(optim.LBFGS(), lambda trainables: jnp.sum(trainables["x"] ** 2), trainables, 5)
    np.testing.assert_array_equal(trainables["x"], 0)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_all_steps_are_one_compilation():
    optimizer, trainables, traces = optim.LBFGS(history=3), {"x": jnp.full(4, 3.0)}, 0
    loss = lambda trainables: jnp.sum(jnp.cosh(trainables["x"]))  # noqa: E731

    @jax.jit
    def step(state, trainables):
        nonlocal traces
        traces += 1
        value, grads = jax.value_and_grad(loss)(trainables)
        return optimizer.update(grads, state, trainables, value=value, loss=loss)

    trainables, state = step(optimizer.init(trainables), trainables)
    with compilations() as found:
        for _ in range(11):
            trainables, state = step(state, trainables)
    assert traces == 1 and not found
    np.testing.assert_allclose(loss(trainables), 4, rtol=1e-6)


def test_vmap_equals_separate_runs():
    loss = lambda trainables: FUNCTIONS["rosenbrock"][0](trainables["kernel"])  # noqa: E731
    starts = jnp.asarray([[[-1.2], [1.0]], [[0.0], [0.5]], [[2.0], [2.0]]])
    one = lambda start: run(optim.LBFGS(), loss, {"kernel": start}, 12)[1]  # noqa: E731
    together, each = jax.vmap(one)(starts), jnp.stack([one(start) for start in starts])
    np.testing.assert_allclose(together, each, rtol=1e-2, atol=1e-5)


def test_without_a_search_the_step_is_the_rate():
    optimizer, trainables = optim.LBFGS(rate=0.5, max_search_steps=0), {"x": jnp.asarray([4.0, -2.0])}
    new, _ = optimizer.update(trainables, optimizer.init(trainables), trainables)
    np.testing.assert_allclose(new["x"], [2.0, -1.0])


def test_bfloat16_weights_with_a_master_reach_the_minimum():
    target = jnp.asarray([0.3, -1.7, 2.2], jnp.bfloat16)
    loss = lambda trainables: jnp.sum((trainables["x"] - target).astype(jnp.float32) ** 2)  # noqa: E731
    optimizer = optim.LBFGS(rounding=optim.MasterWeights(), max_search_steps=10)
    (trainables, _), values = run(optimizer, loss, {"x": jnp.zeros(3, jnp.bfloat16)}, 10)
    assert trainables["x"].dtype == jnp.bfloat16 and values[-1] < 1e-4
