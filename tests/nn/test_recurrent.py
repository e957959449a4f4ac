"""Recurrent cells against PyTorch and their definitions, beyond the contract."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlax
from mlax import nn
from tests.catalogue import recurrent as reference
from tests.layers import Cell

RNG = jax.random.key(0)
STORED = np.load(Path(__file__).parents[1] / "references" / "recurrent.npz")
LENGTHS = jnp.asarray([6, 1, 4])  # of the references whose name ends so


def case(name):
    return {key.split("/")[1]: STORED[key] for key in STORED.files if key.split("/")[0] == name}


def weights(found, kind, suffix, grad=""):
    """PyTorch's weights, or their gradients, as mlax stores them: transposed, both biases in one where that does."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    kernel, recurrent, bias, other = (found[f"{name}_{suffix}{grad}"] for name in names)
    tree = {"input": {"kernel": kernel.T, "bias": bias}, "recurrent": {"kernel": recurrent.T}}
    if kind == "gru":
        tree["recurrent"]["bias"] = other
    elif not grad:
        tree["input"]["bias"] = bias + other  # the gradient of each is that of their sum
    if f"weight_hr_{suffix}" in found:
        tree["project"] = {"kernel": found[f"weight_hr_{suffix}{grad}"].T}
    return tree


def carry(found, kind, place, grad=""):
    if kind == "lstm":
        return found[f"first_0{grad}"][place], found[f"first_1{grad}"][place]
    return found[f"first_0{grad}"][place]


def compare(layer, found, trainables, first, wanted_weights, wanted_first, lengths=None):
    """Outputs, last carries and every gradient, within 1e-5."""
    factors = [found[f"factor_{place}"] for place in range(3) if f"factor_{place}" in found]

    def flat(last):
        """The last carries as PyTorch stacks them, each over layers and directions."""
        leaves = jax.tree.leaves(last)
        return [jnp.stack(leaves[place :: len(factors) - 1]) for place in range(len(factors) - 1)]

    def loss(trainables, first, x):
        given = (first, x) if lengths is None else (first, x, lengths)
        (last, y), _ = layer.fwd(given, trainables)
        outs = [y, *flat(last)]
        return sum((factor * out).sum() for factor, out in zip(factors, outs, strict=True)), outs

    grads, outs = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(trainables, first, found["x"])
    wanted = (wanted_weights, wanted_first, found["x_grad"])
    wanted_outs = [found["y"], *(found[f"last_{place}"] for place in range(len(factors) - 1))]
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # noqa: E731
    jax.tree.map(close, outs, wanted_outs)
    jax.tree.map(close, grads, wanted)


@pytest.mark.parametrize(
    ("name", "kind", "cell"),
    [
        ("rnn_tanh", "rnn", nn.RNNCell(5)),
        ("rnn_relu", "rnn", nn.RNNCell(5, activation="relu")),
        ("gru", "gru", nn.GRUCell(5)),
        ("gru_lengths", "gru", nn.GRUCell(5)),
        ("lstm", "lstm", nn.LSTMCell(5)),
        ("lstm_lengths", "lstm", nn.LSTMCell(5)),
        ("lstm_projected", "lstm", nn.LSTMCell(5, projection=2)),
    ],
)
def test_a_layer_and_its_gradients_agree_with_pytorch(name, kind, cell):
    found = case(name)
    long = name.endswith("lengths")
    compare(
        mlax.Recurrent(cell, carry=True, lengths=long),
        found,
        weights(found, kind, "l0"),
        carry(found, kind, 0),
        weights(found, kind, "l0", "_grad"),
        carry(found, kind, 0, "_grad"),
        LENGTHS if long else None,
    )


@pytest.mark.parametrize("name", ["gru_both", "gru_both_lengths"])
def test_bidirectional_agrees_with_pytorch(name):
    found = case(name)
    long = name.endswith("lengths")
    ways = [mlax.Recurrent(nn.GRUCell(5), reverse=reverse, carry=True, lengths=long) for reverse in (False, True)]
    ahead, back = "l0", "l0_reverse"

    def both(grad=""):
        return {
            "forward": weights(found, "gru", ahead, grad),
            "backward": weights(found, "gru", back, grad),
        }

    def carries(grad=""):
        return carry(found, "gru", 0, grad), carry(found, "gru", 1, grad)

    layer = nn.Bidirectional(*ways)
    compare(layer, found, both(), carries(), both("_grad"), carries("_grad"), LENGTHS if long else None)


def test_stacked_agrees_with_pytorch():
    found = case("lstm_two")
    layer = nn.Stacked(*[mlax.Recurrent(nn.LSTMCell(5), carry=True)] * 2, carry=True)

    def both(grad=""):
        return {f"layer_{place}": weights(found, "lstm", f"l{place}", grad) for place in (0, 1)}

    def carries(grad=""):
        return carry(found, "lstm", 0, grad), carry(found, "lstm", 1, grad)

    compare(layer, found, both(), carries(), both("_grad"), carries("_grad"))


CELLS = [
    (nn.RNNCell, reference.rnn),
    (nn.GRUCell, reference.gru),
    (lambda features: nn.GRUCell(features, reset="before"), reference.gru_before),
    (nn.MGUCell, reference.mgu),
    (nn.LSTMCell, reference.lstm),
    (lambda features: nn.LSTMCell(features, peephole=True, projection=1), reference.lstm),
]


@settings(max_examples=8, deadline=None)
@given(
    which=st.integers(0, len(CELLS) - 1),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    reverse=st.booleans(),
    unroll=st.integers(1, 3),
    data=st.data(),
)
def test_any_cell_over_time_equals_a_loop_that_stops_at_each_length(which, sizes, reverse, unroll, data):
    batch, times, width, features = sizes
    build, step = CELLS[which]
    lengths = data.draw(st.lists(st.integers(0, times), min_size=batch, max_size=batch))
    cell = build(features)
    layer = mlax.Recurrent(cell, reverse=reverse, unroll=unroll, carry=True, lengths=True)
    x = np.random.default_rng(0).normal(size=(batch, times, width)).astype(np.float32)
    first = jax.tree.map(lambda leaf: leaf + 0.3, cell.initial_carry(jax.ShapeDtypeStruct((batch, width), x.dtype)))
    trainables, _ = layer.init(RNG, (first, x, jnp.asarray(lengths)))
    (last, y), _ = jax.jit(layer.fwd)((first, x, jnp.asarray(lengths)), trainables)

    flat = {path: np.asarray(mlax.get(trainables, path), np.float64) for path in mlax.paths(trainables)}
    for example, length in enumerate(lengths):
        carry = jax.tree.map(lambda leaf: np.asarray(leaf[example : example + 1], np.float64), first)
        want = np.zeros((times, y.shape[-1]))
        for t in reversed(range(length)) if reverse else range(length):
            carry, want[t : t + 1] = step(carry, x[example : example + 1, t], flat)
        np.testing.assert_allclose(y[example], want, rtol=1e-5, atol=1e-5)
        jax.tree.map(
            lambda got, wanted: np.testing.assert_allclose(got[example], wanted[0], rtol=1e-5, atol=1e-5), last, carry
        )


def test_an_empty_batch_and_zero_steps_work():
    layer = mlax.Recurrent(nn.LSTMCell(5), carry=True)
    for shape in ((0, 6, 3), (2, 0, 3)):
        x = jnp.ones(shape)
        first = nn.LSTMCell(5).initial_carry(jax.ShapeDtypeStruct((shape[0], 3), x.dtype))
        trainables, _ = layer.init(RNG, (first, x))

        def loss(trainables, first, x):
            last, y = layer.fwd((first, x), trainables)[0]
            return y.sum() + sum(leaf.sum() for leaf in last)

        assert layer.fwd((first, x), trainables)[0][1].shape == (*shape[:2], 5)
        grads, by_first = jax.grad(loss, (0, 1))(trainables, first, x)
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))
        assert all((leaf == 1).all() for leaf in jax.tree.leaves(by_first))


def test_steps_beyond_a_length_change_nothing():
    layer = nn.Bidirectional(
        mlax.Recurrent(nn.GRUCell(5), lengths=True), mlax.Recurrent(nn.MGUCell(4), lengths=True, reverse=True)
    )
    x = jax.random.normal(RNG, (3, 6, 4))
    trainables, _ = layer.init(RNG, (x, LENGTHS))
    beyond = jnp.arange(6)[None, :, None] >= LENGTHS[:, None, None]

    def loss(trainables, x):
        return (layer.fwd((x, LENGTHS), trainables)[0] ** 2).sum()

    clean = jax.jit(jax.value_and_grad(loss, (0, 1)))(trainables, x)
    spoilt = jax.jit(jax.value_and_grad(loss, (0, 1)))(trainables, jnp.where(beyond, 7.0, x))
    jax.tree.map(np.testing.assert_array_equal, clean, spoilt)
    np.testing.assert_array_equal(clean[1][1][jnp.broadcast_to(beyond, x.shape)], 0)


@pytest.mark.parametrize("cell", [nn.LSTMCell(4), Cell(4)], ids=lambda cell: type(cell).__name__)
def test_a_stateful_layer_continues_each_row_where_it_ended(cell):
    x = jax.random.normal(RNG, (3, 6, 4))
    layer = mlax.Recurrent(cell, carry=True, lengths=True)
    first = jax.tree.map(jnp.zeros_like, cell.initial_carry(x[:, 0]))
    trainables, own = layer.init(RNG, (first, x, LENGTHS))
    (carry, wanted), _ = layer.fwd((first, x, LENGTHS), trainables, own)
    (_, wanted_next), _ = layer.fwd((carry, x[:, :1], jnp.ones(3, int)), trainables, own)
    stateful = mlax.Recurrent(cell, lengths=True, stateful=True)
    _, state = stateful.init(RNG, (x, LENGTHS))
    step = jax.jit(stateful.fwd)
    y, state = step((x, LENGTHS), trainables, state)
    y_next, _ = step((x[:, :1], jnp.ones(3, int)), trainables, state)
    np.testing.assert_allclose(y, wanted, atol=1e-6)
    np.testing.assert_allclose(y_next, wanted_next, atol=1e-6)
    with pytest.raises(ValueError, match=r"the carry in non_trainables is .* pass what init returned"):
        stateful.fwd((x[:2], LENGTHS[:2]), trainables, state)


EACH = (nn.RNNCell(4), nn.GRUCell(4), nn.MGUCell(4), nn.LSTMCell(4), nn.ConvLSTMCell(4))


@pytest.mark.parametrize("cell", [*EACH, Cell(4)], ids=lambda cell: type(cell).__name__)
def test_nan_beyond_a_length_spoils_no_gradient(cell):
    layer = mlax.Recurrent(cell, lengths=True)
    x = jax.random.normal(RNG, (3, 6, 2, 4) if isinstance(cell, nn.ConvLSTMCell) else (3, 6, 4))
    beyond = (jnp.arange(6)[None, :] >= LENGTHS[:, None]).reshape(3, 6, *[1] * (x.ndim - 2))
    trainables, _ = layer.init(RNG, (x, LENGTHS))

    @jax.jit
    def gradients(trainables, x):
        return jax.value_and_grad(lambda *at: (layer.fwd((at[1], LENGTHS), at[0])[0] ** 2).sum(), (0, 1))(trainables, x)

    jax.tree.map(
        np.testing.assert_array_equal, gradients(trainables, x), gradients(trainables, jnp.where(beyond, jnp.nan, x))
    )


def test_a_convolutional_lstm_can_be_differentiated_on_an_explicit_mesh():
    layer = mlax.Recurrent(nn.ConvLSTMCell(2), lengths=True)
    trainables, _ = layer.init(RNG, (jnp.ones((4, 3, 6, 3)), jnp.asarray([3, 1, 2, 3])))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    batch = jax.NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh):
        x, lengths = jax.device_put((jnp.ones((4, 3, 6, 3)), jnp.asarray([3, 1, 2, 3])), batch)
        gradient = jax.grad(lambda x: (layer.fwd((x, lengths), trainables)[0] ** 2).sum())
        assert jax.typeof(jax.eval_shape(jax.jit(gradient), x)).sharding.spec[0] == "data"


@pytest.mark.parametrize("cell", EACH[:4], ids=lambda cell: type(cell).__name__)
def test_a_sequence_without_features_is_refused_by_init_and_by_fwd(cell):
    trainables, _ = mlax.Recurrent(cell).init(RNG, jnp.ones((3, 6, 4)))
    for call in (lambda x: mlax.Recurrent(cell).init(RNG, x), lambda x: mlax.Recurrent(cell).fwd(x, trainables)):
        with pytest.raises(
            ValueError, match=r"a step's input has the shape \(4,\).*needs an axis of features: x\[\.\.\., None\]"
        ):
            call(jnp.ones((4, 4)))


def test_a_cell_refuses_an_input_that_is_not_its_carry_and_x():
    x = jnp.ones((3, 4))
    for cell in (nn.RNNCell(5), nn.GRUCell(5), nn.LSTMCell(5)):
        carry = cell.initial_carry(x)
        with pytest.raises(ValueError, match=r"the input is float32\[3, 4\], but must be the pair \(carry, x\)"):
            cell.init(RNG, x)
        with pytest.raises(ValueError, match=r"the carry is .*, but must be .*cell\.initial_carry\(x\) makes one"):
            cell.init(RNG, (x, carry if isinstance(carry, jax.Array) else carry[0]))
        trainables, _ = cell.init(RNG, (carry, x))
        wide = jax.tree.map(lambda leaf: jnp.ones((3, 6)), carry)
        for layer, inputs in ((cell, (wide, x)), (mlax.Recurrent(cell, carry=True), (wide, x[:, None]))):
            with pytest.raises(ValueError, match=r"the carry is .*\[3, 6\].*, but must be .*\[3, 5\]"):
                layer.fwd(inputs, trainables)


def test_stacks_and_both_directions_check_what_they_unpack():
    x = jnp.ones((3, 6, 4))
    one = mlax.Recurrent(nn.RNNCell(5), carry=True)
    both = nn.Bidirectional(one, mlax.Recurrent(nn.RNNCell(5), carry=True, reverse=True))
    first = nn.RNNCell(5).initial_carry(x[:, 0])
    for layer, number in ((nn.Stacked(one, one, carry=True), 2), (both, 2)):
        with pytest.raises(ValueError, match=r"with carry=True must be the tuple \(carry, x\)"):
            layer.init(RNG, x)
        with pytest.raises(ValueError, match=rf"the carry is .*, but must be a tuple of {number}"):
            layer.init(RNG, ((first,), x))
    lengths = nn.Stacked(mlax.Recurrent(nn.RNNCell(5), lengths=True), lengths=True)
    with pytest.raises(ValueError, match=r"with lengths=True must be the tuple \(x, lengths\)"):
        lengths.init(RNG, x)
    with pytest.raises(TypeError, match=r"pass the layers themselves, nn\.Stacked\(\*layers\)"):
        nn.Stacked([one, one])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Stacked: layer 0 is the class Dropout, .* did you mean Dropout\(\)"):
        nn.Stacked(nn.Dropout)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Recurrent: layer is the class LSTMCell, .* did you mean LSTMCell\(\.\.\.\)"):
        mlax.Recurrent(nn.LSTMCell)  # pyright: ignore[reportArgumentType]


def test_a_stack_passes_lengths_only_to_its_recurrent_layers():
    layers = mlax.Recurrent(nn.RNNCell(5), lengths=True), nn.LayerNorm(), mlax.Recurrent(nn.RNNCell(2), lengths=True)
    stack = nn.Stacked(*layers, lengths=True)
    x = jax.random.normal(RNG, (3, 6, 4))
    trainables, _ = stack.init(RNG, (x, LENGTHS))
    y, _ = stack.fwd((x, LENGTHS), trainables)
    by_hand = x
    for place, layer in enumerate(layers):
        given = by_hand if place == 1 else (by_hand, LENGTHS)
        by_hand, _ = layer.fwd(given, trainables[f"layer_{place}"])
    np.testing.assert_array_equal(y, by_hand)
    assert (y[1, 1:] == 0).all() and (y[1, 0] != 0).all()


def test_the_forget_gate_is_open_at_first():
    trainables, _ = nn.LSTMCell(3).init(RNG, (nn.LSTMCell(3).initial_carry(jnp.ones((2, 4))), jnp.ones((2, 4))))
    np.testing.assert_array_equal(trainables["input"]["bias"], [0] * 3 + [1] * 3 + [0] * 6)


def test_convolutions_may_have_two_spatial_axes_and_any_window():
    layer = mlax.Recurrent(nn.ConvLSTMCell(2, window=(3, 1)))
    x = jax.random.normal(RNG, (2, 3, 4, 5, 3))
    trainables, _ = layer.init(RNG, x)
    assert trainables["recurrent"]["kernel"].shape == (8, 3, 1, 2)
    y, _ = layer.fwd(x, trainables)
    assert y.shape == (2, 3, 4, 5, 2)
    # the window is 1 wide, so each column is an independent sequence
    column, _ = layer.fwd(x[:, :, :, 1:2], trainables)
    np.testing.assert_allclose(y[:, :, :, 1:2], column, rtol=1e-5, atol=1e-6)


def test_weights_may_be_wider_than_the_input():
    layer = mlax.Recurrent(nn.LSTMCell(5, param_dtype="float32", peephole=True))
    x = jnp.ones((2, 3, 4), jnp.bfloat16)
    trainables, _ = layer.init(RNG, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainables)} == {jnp.dtype("float32")}
    y, grads = jax.value_and_grad(lambda trainables: layer.fwd(x, trainables)[0].sum())(trainables)
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.RNNCell(5, activation="gelu"), "activation is 'gelu', but must be 'tanh' or 'relu'"),
        (lambda: nn.GRUCell(5, reset="never"), "reset is 'never', but must be 'after' or 'before'"),
        (lambda: nn.LSTMCell(5, projection=6), "projection is 6, but must be from 1 to features, 5"),
        (lambda: nn.LSTMCell(5, projection=0), "projection is 0, but must be from 1"),
        (lambda: mlax.Recurrent(nn.RNNCell(5), carry=True, stateful=True), "leave carry and reverse False"),
        (lambda: nn.Bidirectional(*[mlax.Recurrent(nn.RNNCell(5))] * 2), "backward is .* with reverse=True"),
        (
            lambda: nn.Bidirectional(
                mlax.Recurrent(nn.RNNCell(5)), mlax.Recurrent(nn.RNNCell(5), reverse=True, lengths=True)
            ),
            "differ in `lengths`",
        ),
        (lambda: nn.Stacked(mlax.Recurrent(nn.RNNCell(5)), lengths=True), "a layer has carry=False and lengths=False"),
    ],
)
def test_invalid_descriptions_are_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("cell", [nn.GRUCell(64), nn.MGUCell(64)], ids=["GRU", "MGU"])
def test_on_a_cpu_the_loop_of_the_gates_does_not_slice_the_sequence(cell):
    x, layer = jnp.ones((4, 8, 64)), mlax.Recurrent(cell)
    compiled = jax.jit(layer.fwd).lower(x, *layer.init(RNG, x)).compile().as_text()
    computations = compiled.split("\n}\n")
    gates = [text for text in computations if " tanh(" in text]
    assert gates
    assert not any("dynamic-slice" in text for text in gates)
