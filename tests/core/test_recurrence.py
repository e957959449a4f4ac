"""Recurrent: a cell over time, beyond the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import mlax
from mlax import nn
from mlax._jax import scan_with_residuals
from tests.arrays import normal
from tests.asserts import assert_close
from tests.layers import Cell, Count

RNG = jax.random.key(1)
TIME = normal(2, 7, 3, seed=1)


def test_a_carry_can_be_passed_and_returned():
    whole, steps = mlax.Recurrent(Cell(5)), mlax.Recurrent(Cell(5), carry=True)
    trainables, _ = whole.init(RNG, TIME)
    carry = Cell(5).initial_carry(TIME[:, 0])
    same, _ = steps.init(RNG, (carry, TIME))
    jax.tree.map(np.testing.assert_array_equal, same, trainables)
    (carry, first), _ = steps.fwd((carry, TIME[:, :4]), trainables)
    (carry, second), _ = steps.fwd((carry, TIME[:, 4:]), trainables)
    y, _ = whole.fwd(TIME, trainables)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(carry, y[:, -1], rtol=1e-5, atol=1e-6)


def test_reverse_reads_from_the_end():
    forward, backward = mlax.Recurrent(Cell(5)), mlax.Recurrent(Cell(5), reverse=True, unroll=3)
    trainables, _ = forward.init(RNG, TIME)
    flipped = jnp.flip(forward.fwd(jnp.flip(TIME, 1), trainables)[0], 1)
    np.testing.assert_allclose(backward.fwd(TIME, trainables)[0], flipped, rtol=1e-5, atol=1e-6)


def test_time_may_be_another_axis():
    by_axis = mlax.Recurrent(Cell(5), axis=0)
    trainables, _ = by_axis.init(RNG, TIME.swapaxes(0, 1))
    y, _ = by_axis.fwd(TIME.swapaxes(0, 1), trainables)
    np.testing.assert_allclose(y.swapaxes(0, 1), mlax.Recurrent(Cell(5)).fwd(TIME, trainables)[0], rtol=1e-6)


def test_a_layer_that_is_not_a_cell_is_an_error():
    with pytest.raises(TypeError, match=r"is not an mlax\.Cell"):
        mlax.Recurrent(nn.Linear(3))


@mlax.frozen
class Gated(mlax.CompositeCell):
    """A cell with all that a step may hold: a part used twice, one with a key, one without weights, two carries."""

    features: int
    rate: float = 0.0

    def parts(self):
        return {
            "input": nn.Linear(self.features),
            "mix": nn.Linear(self.features),
            "drop": nn.Dropout(self.rate),
            "tanh": mlax.F(jnp.tanh),
        }

    def initial_carry(self, x):
        return jnp.zeros((*x.shape[:-1], self.features), x.dtype), jnp.zeros(x.shape[:1], jnp.int32)

    def ahead(self, sub, x):
        return sub.drop(sub.input(x))

    def feedback(self, sub, carry):
        return sub.mix(carry[0])

    def step(self, sub, carry, ahead):
        h, time = carry
        h = sub.tanh(ahead + sub.mix(sub.drop(sub.tanh(h))))
        return (h, time + 1), (h, time)


@mlax.frozen
class Whole(mlax.Cell):
    """The same cell unsplit, which a scan differentiates step by step."""

    cell: Gated

    def initial_carry(self, x):
        return self.cell.initial_carry(x)

    def init(self, rng, x):
        return self.cell.init(rng, x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return self.cell.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)


LENGTHS = jnp.asarray([7, 3])


def loss(layer):
    def scalar(trainables, x):
        y, time = layer.fwd((x, LENGTHS), trainables, rng=RNG)[0]
        assert time.dtype == jnp.int32
        return (y**2).sum()

    return scalar


@pytest.fixture(scope="module")
def split_and_whole():
    """A recurrent layer with a split cell, the same with an unsplit one, variables and an input in float64."""
    with jax.enable_x64(True):
        split, whole = (mlax.Recurrent(cell, lengths=True) for cell in (Gated(5), Whole(Gated(5))))
        x = jnp.asarray(TIME, jnp.float64)
        trainables, _ = split.init(RNG, (x, LENGTHS))
        yield loss(split), loss(whole), trainables, x


def test_the_split_cell_computes_what_the_whole_cell_does(split_and_whole):
    split, whole, *at = split_and_whole
    assert_close(split(*at), whole(*at), rtol=1e-9)


def test_weight_gradients_batched_after_the_scan_equal_those_of_the_scan(split_and_whole):
    split, whole, *at = split_and_whole
    assert_close(jax.jit(jax.grad(split, (0, 1)))(*at), jax.jit(jax.grad(whole, (0, 1)))(*at), rtol=1e-9)


def test_forward_mode_works(split_and_whole):
    split, whole, *at = split_and_whole
    ones = jax.tree.map(jnp.ones_like, at)
    assert_close(jax.jvp(split, at, ones), jax.jvp(whole, at, ones), rtol=1e-9)


def test_second_derivatives_agree_in_both_modes(split_and_whole):
    split, _, trainables, x = split_and_whole
    along = jax.tree.map(jnp.ones_like, trainables)

    def slope(trainables):
        return jax.jvp(lambda trainables: split(trainables, x), (trainables,), (along,))[1]

    forward_over_backward = jax.jit(lambda t: jax.jvp(lambda t: jax.grad(split)(t, x), (t,), (along,))[1])
    assert_close(forward_over_backward(trainables), jax.jit(jax.grad(slope))(trainables), rtol=1e-9)


def test_per_example_gradients_work(split_and_whole):
    split, whole, trainables, x = split_and_whole
    each = jnp.stack([x, 2 * x])
    gradients = [jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(trainables, each) for loss in (split, whole)]
    assert_close(*gradients, rtol=1e-9)


def test_the_backward_scan_does_not_carry_weight_gradients():
    layer = mlax.Recurrent(Gated(5))
    trainables, _ = layer.init(RNG, TIME)
    jaxpr = jax.make_jaxpr(jax.grad(lambda t: layer.fwd(TIME, t, inference_mode=True)[0][0].sum()))(trainables)

    def scans(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                yield eqn
            for value in eqn.params.values():
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    yield from scans(getattr(value, "jaxpr", value))

    given = {var.aval.shape for eqn in scans(jaxpr.jaxpr) for var in eqn.outvars}  # what is not carried is (7, ...)
    assert (2, 5) in given
    assert not given & {leaf.shape for leaf in jax.tree.leaves(trainables)}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("times", [0, 1, 4])
def test_a_scan_stores_its_carry_once(times, reverse):
    def body(carry, x):
        after = {"shown": carry["shown"] + x, "hidden": carry["hidden"] * 2}
        return after, (after["shown"], carry)

    carry = {"shown": jnp.full((2,), 3.0), "hidden": jnp.ones(2)}
    xs = jnp.arange(2.0 * times).reshape(times, 2)
    jaxpr = jax.make_jaxpr(lambda *args: scan_with_residuals(body, *args, reverse=reverse, unroll=1))(carry, xs)
    (scan,) = (eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    assert sum(var.aval.shape == (times, 2) for var in scan.outvars) == 2  # "shown" and "hidden"
    found = scan_with_residuals(body, carry, xs, reverse=reverse, unroll=1)
    assert_close(found, jax.lax.scan(body, carry, xs, reverse=reverse), rtol=1e-9)


def test_parts_get_a_new_key_at_each_step_and_each_call():
    @mlax.frozen
    class Noise(mlax.CompositeCell):
        def parts(self):
            return {"drop": nn.Dropout(0.5)}

        def initial_carry(self, x):
            return jnp.ones(x.shape, x.dtype)

        def ahead(self, sub, x):
            return sub.drop(x)

        def feedback(self, sub, carry):
            return 8 * sub.drop(carry)

        def step(self, sub, carry, ahead):
            return carry, ahead + 64 * sub.drop(carry) + 512 * sub.drop(carry)

    y, _ = mlax.Recurrent(Noise()).fwd(jnp.ones((64, 3, 5)), None, rng=RNG)
    digits = np.stack([np.asarray(y, np.int64) // 8**place % 8 for place in range(4)])  # one for each draw, 0 or 2
    assert set(digits.ravel()) == {0, 2}
    draws = np.concatenate(digits.swapaxes(1, 2).swapaxes(0, 1)).reshape(12, -1)  # four calls at three steps
    agreements = (draws[:, None] == draws[None]).mean(-1)[~np.eye(12, dtype=bool)]
    assert agreements.min() > 0.3 and agreements.max() < 0.7


def test_gradients_through_random_parts_agree_with_finite_differences():
    with jax.enable_x64(True):
        layer, x = mlax.Recurrent(Gated(5, rate=0.5)), jnp.asarray(TIME, jnp.float64)
        trainables, _ = layer.init(RNG, x)
        y = jax.jit(lambda trainables, x: layer.fwd(x, trainables, rng=RNG)[0][0])
        check_grads(y, (trainables, x), order=1, modes=("rev",))


def test_a_part_carries_its_state_from_step_to_step():
    @mlax.frozen
    class Counting(mlax.CompositeCell):
        def parts(self):
            return {"mix": nn.Linear(3), "count": Count()}

        def initial_carry(self, x):
            return jnp.zeros_like(x)

        def ahead(self, sub, x):
            return x

        def step(self, sub, carry, ahead):
            h = sub.count(sub.mix(carry) + ahead)
            return h, h

    layer = mlax.Recurrent(Counting())
    trainables, state = layer.init(RNG, TIME)
    _, state = layer.fwd(TIME, trainables, state)
    assert state["count"]["calls"] == 7


def test_an_error_in_a_part_names_its_path_and_its_input():
    layer = mlax.Recurrent(Gated(5, rate=0.5))
    trainables, _ = layer.init(RNG, TIME)
    with pytest.raises(ValueError, match="dropout needs a key") as caught:
        layer.fwd(TIME, trainables)
    assert caught.value.__notes__[0].startswith("in drop, called on float32[")
    with pytest.raises(ValueError, match="trainables lacks kernel") as caught:
        layer.fwd(TIME, {**trainables, "mix": {"bias": trainables["mix"]["bias"]}}, inference_mode=True)
    assert caught.value.__notes__[0].startswith("in mix, called on float32[")


def test_every_product_carries_the_path_of_its_part():
    model = mlax.Series(encoder=mlax.Recurrent(Gated(5)))
    trainables, _ = model.init(RNG, TIME)
    step = jax.jit(jax.grad(lambda trainables: model.fwd(TIME, trainables, inference_mode=True)[0][0].sum()))
    text = step.lower(trainables).compile().as_text()
    products = [line.split('op_name="')[1].split('"')[0] for line in text.splitlines() if " dot(" in line]
    assert len(products) >= 4  # of some devices' compilers, which join two
    for path in products:
        assert "encoder" in path and ("input" in path or "mix" in path), path


def test_a_cell_that_changes_the_shape_of_its_carry_is_an_error():
    @mlax.frozen
    class Growing(mlax.Cell):
        def initial_carry(self, x):
            return x

        def init(self, rng, x):
            return None, None

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            h, x = x
            return (jnp.concatenate([h, x], -1), x), non_trainables

    with pytest.raises(ValueError, match=r"maps a carry of float32\[2, 3\] to float32\[2, 6\]"):
        mlax.Recurrent(Growing()).fwd(TIME, None)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (np.asarray([7, 8]), "lengths range from 7 to 8, but the input has 7 time steps"),
        (np.asarray([-1, 2]), "lengths range from -1 to 2"),
        (np.asarray([1, 2, 3], np.int32), r"lengths is int32\[3\], but must be integers of the shape \(2,\)"),
        (np.asarray([1.0, 2.0], np.float32), r"lengths is float32\[2\], but must be integers"),
    ],
)
def test_invalid_lengths_are_errors(lengths, message):
    layer = mlax.Recurrent(Cell(5), lengths=True)
    trainables, _ = layer.init(RNG, (TIME, LENGTHS))
    with pytest.raises(ValueError, match=message):
        layer.fwd((TIME, jnp.asarray(lengths)), trainables)


def test_an_input_that_does_not_match_the_fields_is_an_error():
    with pytest.raises(ValueError, match=r"with carry=True and lengths=True must be the tuple \(carry, x, lengths\)"):
        mlax.Recurrent(Cell(5), carry=True, lengths=True).init(RNG, TIME)
    with pytest.raises(ValueError, match="which has no axis 3"):
        mlax.Recurrent(Cell(5), axis=3).init(RNG, TIME)
    with pytest.raises(ValueError, match="unroll is 0, but must be an integer"):
        mlax.Recurrent(Cell(5), unroll=0)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_nan_in_a_step_is_located_by_its_index(reverse):
    @mlax.frozen
    class Root(mlax.Cell):
        def initial_carry(self, x):
            return jnp.ones_like(x)

        def init(self, rng, x):
            return None, None

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            carry, x = x
            y = jnp.sqrt(carry + x)
            return (y, y), non_trainables

    x = jnp.zeros((2, 5, 3)).at[:, 3].set(-2)
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        mlax.Series(cell=mlax.Recurrent(Root(), reverse=reverse)).fwd(x, None)
    assert any(note.startswith("in cell/3, called on") for note in caught.value.__notes__)
