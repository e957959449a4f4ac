"""Variables from PyTorch's state dicts: every layer with a counterpart computes what PyTorch does."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn

FIRST = {"layout": "channel_first"}


def tanh(x):
    return jnp.tanh(x)


def block():
    return mlax.Residual(mlax.Series(norm=nn.LayerNorm(), up=nn.Linear(8), act=mlax.F(tanh), down=nn.Linear(4)))


def blocks():
    model = mlax.Series(embed=nn.Embed(7, 4), blocks=mlax.Repeat(block(), 3), head=nn.Linear(7))
    return mlax.Tied(model, mlax.Tie("head/kernel", to="embed/table", transpose=True))


def both_ways(cell):
    return nn.Bidirectional(mlax.Recurrent(cell), mlax.Recurrent(cell, reverse=True))


LAYERS = {
    "linear": nn.Linear(5),
    "linear_plain": nn.Linear(5, bias=False),
    "sequential": mlax.Series(nn.Linear(5), jax.nn.relu, nn.Dropout(0.5), nn.Linear(3)),
    "mlp": nn.MLP((5, 3)),
    "conv": nn.Conv(6, (3, 2), strides=2, padding=1, **FIRST),
    "conv_line": nn.Conv(6, 3, groups=2, padding="VALID", **FIRST),
    "conv_depthwise": nn.Conv(8, 3, groups="depthwise", padding="VALID", bias=False, **FIRST),
    "transpose": nn.ConvTranspose(6, 3, strides=2, padding="VALID", **FIRST),
    "transpose_groups": nn.ConvTranspose(6, 3, strides=2, padding=1, output_padding=1, groups=2, **FIRST),
    "batch_norm": nn.BatchNorm(axis=1),
    "layer_norm": nn.LayerNorm(),
    "layer_norm_axes": nn.LayerNorm(axes=(-2, -1)),
    "rms_norm": nn.RMSNorm(eps=1e-6),
    "group_norm": nn.GroupNorm(2, axis=1),
    "instance_norm": nn.InstanceNorm(axis=1),
    "prelu": nn.PReLU(),
    "prelu_channels": nn.PReLU(axes=(-2,)),
    "embedding": nn.Embed(7, 4),
    "embedding_padded": nn.Embed(7, 4, padding=2),
    "bag_sum": nn.EmbedBag(7, 4, by="sum"),
    "bag_mean": nn.EmbedBag(7, 4, by="mean", padding=2),
    "bag_max": nn.EmbedBag(7, 4, by="max", padding=2),
    "attention": nn.MultiHeadAttention(2),
    "attention_cross": nn.MultiHeadAttention(2),
    "rnn": mlax.Recurrent(nn.RNNCell(3, activation="relu")),
    "gru": nn.Stacked(both_ways(nn.GRUCell(3)), both_ways(nn.GRUCell(3))),
    "lstm": nn.Stacked(mlax.Recurrent(nn.LSTMCell(3)), nn.Dropout(0.1), mlax.Recurrent(nn.LSTMCell(3))),
    "lstm_projected": mlax.Recurrent(nn.LSTMCell(3, projection=2)),
    "lstm_plain": mlax.Recurrent(nn.LSTMCell(3, bias=False)),
    "gru_cell": nn.GRUCell(3),
    "blocks": blocks(),
}
NAMES = {"blocks": {"blocks/stacked/layer": ""}}


@functools.cache
def stored():
    with np.load(Path(__file__).parents[1] / "references" / "torch_layers.npz") as file:
        return dict(file)


def case(name):
    """The layer, its input, PyTorch's state dict and output, and the names of the modules."""
    inputs = [jnp.asarray(value) for key, value in stored().items() if key.startswith(f"{name}/x")]
    if name == "attention":
        inputs = inputs[:1]
    elif name == "attention_cross":
        inputs = inputs[:2]
    elif name == "gru_cell":
        inputs = inputs[::-1]  # the carry comes first
    x = inputs[0] if len(inputs) == 1 else tuple(inputs)
    prefix = f"{name}/state/"
    state = {key.removeprefix(prefix): value for key, value in stored().items() if key.startswith(prefix)}
    return LAYERS[name], x, state, stored()[f"{name}/y"], NAMES.get(name)


def test_every_case_is_compared():
    assert {key.split("/")[0] for key in stored()} == LAYERS.keys()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_the_weights_of_pytorch_computes_the_same(name):
    layer, x, state, y, names = case(name)
    trainables, non_trainables = nn.from_torch(layer, state, x, names=names)
    fwd = jax.jit(layer.fwd, static_argnames="inference_mode")
    found, _ = fwd(x, trainables, non_trainables, inference_mode=True)
    found = found[1] if name == "gru_cell" else found
    np.testing.assert_allclose(found, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_the_state_dict_comes_back(name):
    layer, x, state, _, names = case(name)
    found = nn.to_torch(layer, *nn.from_torch(layer, state, x, names=names), x, names=names)
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in state.items()}
    for key, value in found.items():
        if name.startswith(("lstm", "rnn")) and "bias_ih" in key:  # the sum of PyTorch's two biases
            np.testing.assert_array_equal(value, state[key] + state[key.replace("bias_ih", "bias_hh")])
        elif not (name.startswith(("lstm", "rnn")) and "bias_hh" in key) and "num_batches_tracked" not in key:
            np.testing.assert_array_equal(value, state[key])


def test_an_lstm_with_both_biases_of_pytorch_comes_back_bitwise():
    _, x, state, y, _ = case("lstm")
    cells = [mlax.Recurrent(nn.LSTMCell(3, recurrent_bias=True)) for _ in range(2)]
    layer = nn.Stacked(*cells)
    trainables, _ = nn.from_torch(layer, state, x)
    np.testing.assert_allclose(layer.fwd(x, trainables)[0], y, rtol=2e-5, atol=2e-5)
    found = nn.to_torch(layer, trainables, None, x)
    assert found.keys() == state.keys()
    for key, value in found.items():
        np.testing.assert_array_equal(value, state[key])


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith(("bag", "embedding", "prelu"))])
def test_gradients_of_tables_and_slopes_agree_with_pytorch(name):
    layer, x, state, _, _ = case(name)
    trainables, _ = nn.from_torch(layer, state, x)
    (leaf,) = jax.tree.leaves(jax.grad(lambda trainables: (layer.fwd(x, trainables)[0] ** 2).sum())(trainables))
    np.testing.assert_allclose(
        leaf.reshape(stored()[f"{name}/gradient"].shape), stored()[f"{name}/gradient"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", ["conv", "conv_line", "conv_depthwise", "transpose", "transpose_groups"])
def test_a_kernel_is_converted_to_any_layout(name):
    layer, x, state, y, _ = case(name)
    last = mlax.override(layer, type(layer), layout="channel_last")
    trainables, _ = nn.from_torch(last, state, jnp.moveaxis(x, 1, -1))
    found, _ = last.fwd(jnp.moveaxis(x, 1, -1), trainables)
    np.testing.assert_allclose(jnp.moveaxis(found, -1, 1), y, rtol=2e-5, atol=2e-5)
    back = nn.to_torch(last, trainables, None, jnp.moveaxis(x, 1, -1))
    np.testing.assert_array_equal(back["weight"], state["weight"])


def test_the_parts_of_attention_may_be_modules():
    layer, x, state, y, _ = case("attention")
    weights, biases = (np.split(state[f"in_proj_{leaf}"], 3) for leaf in ("weight", "bias"))
    names = {"query": "q", "key": "k", "value": "v", "out": "o"}
    apart = {f"{short}.weight": weight for short, weight in zip("qkv", weights, strict=True)}
    apart |= {f"{short}.bias": bias for short, bias in zip("qkv", biases, strict=True)}
    apart |= {"o.weight": state["out_proj.weight"], "o.bias": state["out_proj.bias"]}
    model = mlax.Series(attend=layer)
    under = {f"attend.{name}": value for name, value in apart.items()}
    trainables, _ = nn.from_torch(model, under, x, names={f"attend/{part}": name for part, name in names.items()})
    np.testing.assert_allclose(model.fwd(x, trainables)[0], y, rtol=2e-5, atol=2e-5)


def test_errors_say_what_is_wrong():
    x, state = jnp.ones((2, 6)), {"weight": np.ones((5, 6), np.float32), "bias": np.ones(5, np.float32)}
    for wrong, given, match in (
        (nn.Linear(5), {"weight": state["weight"]}, r"bias is looked up as 'bias', which the state dict lacks"),
        (nn.Linear(5), {**state, "gain": x}, r"the model has no place for gain"),
        (nn.Linear(4), state, r"weight give float32\[6, 5\] for kernel, which must be float32\[6, 4\]"),
        (nn.Linear(5), {**state, "bias": np.ones(5)}, r"float64\[5\] for bias, .* float32\[5\]; cast the state dict: "),
        (
            mlax.Series(up=nn.Linear(5)),
            {"up.weight": state["weight"]},
            r"'up.bias', which the state dict lacks; `names`",
        ),
        (mlax.Series(up=nn.Linear(5)), state, r"up/kernel is looked up as 'up.weight', .*`names` says what"),
        (mlax.Series(up=nn.Linear(5)), {"uo.weight": x}, r"did you mean 'uo.weight'\?"),
    ):
        with pytest.raises(ValueError, match=match):
            nn.from_torch(wrong, given, x)
    for layer in (nn.Scaler(), nn.LoRA(nn.Linear(5), 2), mlax.Recurrent(nn.MGUCell(3))):
        with pytest.raises(TypeError, match="has no counterpart in PyTorch"):
            nn.from_torch(layer, {}, jnp.ones((2, 3, 6)))


def test_a_path_in_place_of_the_state_dict_is_refused():
    with pytest.raises(TypeError, match=r"the path 'model.safetensors'; load the file first, by mlax.files.load"):
        nn.from_torch(nn.Linear(5), "model.safetensors", jnp.ones((2, 6)))


def test_names_that_are_no_parts_are_refused_and_those_inside_a_repeat_are_found():
    x, rng = jnp.ones((2, 6)), np.random.default_rng(0)
    model = mlax.Series(blocks=mlax.Repeat(mlax.Series(mix=nn.Linear(6, bias=False)), 2))
    state = {f"h.{i}.attn.weight": rng.normal(size=(6, 6)).astype(np.float32) for i in range(2)}
    trainables, _ = nn.from_torch(model, state, x, names={"blocks": "h", "blocks/stacked/mix": "attn"})
    kernels = mlax.get(trainables, "blocks/stacked/mix/kernel")
    np.testing.assert_array_equal(kernels, [each.T for each in state.values()])
    with pytest.raises(ValueError, match=r"names: 'blocks/mix' .*did you mean 'blocks/stacked/mix'\?"):
        nn.from_torch(model, state, x, names={"blocks": "h", "blocks/mix": "attn"})


def test_learned_positions_are_an_embedding_in_pytorch():
    model, x = mlax.Series(positions=nn.LearnedPositions(5)), jnp.ones((2, 3, 4))
    state = {"positions.weight": np.arange(20, dtype=np.float32).reshape(5, 4)}
    trainables, non_trainables = nn.from_torch(model, state, x)
    np.testing.assert_array_equal(mlax.get(trainables, "positions/table"), state["positions.weight"])
    assert nn.to_torch(model, trainables, non_trainables, x).keys() == state.keys()


def test_masked_indices_of_a_bag_do_not_count():
    ids, table = jnp.asarray([[1, 2, 0], [3, 3, 1]]), jnp.arange(12.0).reshape(4, 3)
    mask = jnp.asarray([[True, False, True], [False, False, False]])
    for by, wanted in (("sum", table[1] + table[0]), ("mean", (table[1] + table[0]) / 2), ("max", table[1])):
        layer = nn.EmbedBag(4, 3, by=by)
        y, _ = layer.fwd((ids, mask), {"table": table})
        np.testing.assert_array_equal(y, jnp.stack([wanted, jnp.zeros(3)]))
    with pytest.raises(ValueError, match="but a mean takes booleans only"):
        nn.EmbedBag(4, 3).fwd((ids, jnp.ones((2, 3))), {"table": table})
    with pytest.raises(ValueError, match="the weights have the shape"):
        nn.EmbedBag(4, 3).init(jax.random.key(0), (ids, mask[:, :2]))
    with pytest.raises(ValueError, match="padding is 4, but must be an index from 0 to 3"):
        nn.Embed(4, 3, padding=4)
