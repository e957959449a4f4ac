"""Rows of the recurrent cells, alone and over time."""

import numpy as np

import mlax
from mlax import nn
from tests.catalogue.row import LayerRow


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rnn(h, x, w, activation=np.tanh):
    h = activation(x @ w["input/kernel"] + w["input/bias"] + h @ w["recurrent/kernel"])
    return h, h


def gru(h, x, w):
    r, z, n = np.split(x @ w["input/kernel"] + w["input/bias"], 3, -1)
    by_r, by_z, by_n = np.split(h @ w["recurrent/kernel"] + w["recurrent/bias"], 3, -1)
    z = sigmoid(z + by_z)
    h = (1 - z) * np.tanh(n + sigmoid(r + by_r) * by_n) + z * h
    return h, h


def gru_before(h, x, w):
    r, z, n = np.split(x @ w["input/kernel"] + w["input/bias"], 3, -1)
    by_r, by_z = np.split(h @ w["recurrent/kernel"], 2, -1)
    z = sigmoid(z + by_z)
    h = (1 - z) * np.tanh(n + (sigmoid(r + by_r) * h) @ w["candidate/kernel"]) + z * h
    return h, h


def mgu(h, x, w):
    f, n = np.split(x @ w["input/kernel"] + w["input/bias"], 2, -1)
    f = sigmoid(f + h @ w["recurrent/kernel"])
    h = (1 - f) * h + f * np.tanh(n + (f * h) @ w["candidate/kernel"])
    return h, h


def lstm(carry, x, w):
    h, c = carry
    i, f, u, o = np.split(x @ w["input/kernel"] + w["input/bias"] + h @ w["recurrent/kernel"], 4, -1)
    peep = {gate: w.get(f"peep_{gate}/scale", 0.0) for gate in "ifo"}
    c = sigmoid(f + peep["f"] * c) * c + sigmoid(i + peep["i"] * c) * np.tanh(u)
    h = sigmoid(o + peep["o"] * c) * np.tanh(c)
    if "project/kernel" in w:
        h = h @ w["project/kernel"]
    return (h, c), h


def same(x, kernel):
    """The convolution of x (b, t, c) with an odd kernel (o, window, c), as wide as x."""
    window = kernel.shape[1]
    padded = np.pad(x, ((0, 0), (window // 2, window // 2), (0, 0)))
    return sum(padded[:, i : i + x.shape[1]] @ kernel[:, i].T for i in range(window))


def conv_lstm(carry, x, w):
    h, c = carry
    i, f, u, o = np.split(same(x, w["input/kernel"]) + w["input/bias"] + same(h, w["recurrent/kernel"]), 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(u)
    h = sigmoid(o) * np.tanh(c)
    return (h, c), h


def over_time(step, carry, x, w):
    out = []
    for t in range(x.shape[1]):
        carry, y = step(carry, x[:, t], w)
        out.append(y)
    return np.stack(out, 1)


def below(w, name):
    return {path.removeprefix(f"{name}/"): leaf for path, leaf in w.items() if path.startswith(f"{name}/")}


def both_ways(x, w):
    ahead = over_time(gru, np.zeros((4, 5)), x, below(w, "forward"))
    back = over_time(gru, np.zeros((4, 5)), x[:, ::-1], below(w, "backward"))[:, ::-1]
    return np.concatenate([ahead, back], -1)


def stack(x, w):
    y = over_time(rnn, np.zeros((4, 5)), x, below(w, "layer_0"))
    return over_time(lstm, (np.zeros((4, 2)), np.zeros((4, 2))), y, below(w, "layer_1"))


RNN = {"input/kernel": (3, 5), "input/bias": (5,), "recurrent/kernel": (5, 5)}
GRU = {"input/kernel": (3, 15), "input/bias": (15,), "recurrent/kernel": (5, 15), "recurrent/bias": (15,)}
GRU_BEFORE = {
    "input/kernel": (3, 15),
    "input/bias": (15,),
    "recurrent/kernel": (5, 10),
    "candidate/kernel": (5, 5),
}
MGU = {"input/kernel": (3, 10), "input/bias": (10,), "recurrent/kernel": (5, 5), "candidate/kernel": (5, 5)}
LSTM = {"input/kernel": (3, 20), "input/bias": (20,), "recurrent/kernel": (5, 20)}
FULL_LSTM = {
    "input/kernel": (3, 20),
    "input/bias": (20,),
    "recurrent/kernel": (2, 20),
    "peep_i/scale": (5,),
    "peep_f/scale": (5,),
    "peep_o/scale": (5,),
    "project/kernel": (5, 2),
}
CONV_LSTM = {"input/kernel": (8, 3, 3), "input/bias": (8,), "recurrent/kernel": (8, 3, 2)}

ROWS = {
    "RNNCell": LayerRow(lambda dtype: nn.RNNCell(5), ((4, 5), (4, 3)), (RNN, {}), lambda x, w: rnn(*x, w)),
    "RNNCell relu": LayerRow(
        lambda dtype: nn.RNNCell(5, activation="relu"),
        ((4, 5), (4, 3)),
        (RNN, {}),
        lambda x, w: rnn(*x, w, lambda h: np.maximum(h, 0)),
        variant=True,
    ),
    "GRUCell": LayerRow(lambda dtype: nn.GRUCell(5), ((4, 5), (4, 3)), (GRU, {}), lambda x, w: gru(*x, w)),
    "GRUCell before": LayerRow(
        lambda dtype: nn.GRUCell(5, reset="before"),
        ((4, 5), (4, 3)),
        (GRU_BEFORE, {}),
        lambda x, w: gru_before(*x, w),
        variant=True,
    ),
    "MGUCell": LayerRow(lambda dtype: nn.MGUCell(5), ((4, 5), (4, 3)), (MGU, {}), lambda x, w: mgu(*x, w)),
    "LSTMCell": LayerRow(
        lambda dtype: nn.LSTMCell(5), (((4, 5), (4, 5)), (4, 3)), (LSTM, {}), lambda x, w: lstm(*x, w)
    ),
    "LSTMCell full": LayerRow(
        lambda dtype: nn.LSTMCell(5, peephole=True, projection=2),
        (((4, 2), (4, 5)), (4, 3)),
        (FULL_LSTM, {}),
        lambda x, w: lstm(*x, w),
        variant=True,
    ),
    "ConvLSTMCell": LayerRow(
        lambda dtype: nn.ConvLSTMCell(2),
        (((4, 6, 2), (4, 6, 2)), (4, 6, 3)),
        (CONV_LSTM, {}),
        lambda x, w: conv_lstm(*x, w),
    ),
    "Recurrent GRUCell": LayerRow(
        lambda dtype: mlax.Recurrent(nn.GRUCell(5)),
        (4, 7, 3),
        (GRU, {}),
        lambda x, w: over_time(gru, np.zeros((4, 5)), x, w),
        tolerance=3e-6,
        variant=True,
    ),
    "Recurrent GRUCell before": LayerRow(
        lambda dtype: mlax.Recurrent(nn.GRUCell(5, reset="before"), unroll=2),
        (4, 7, 3),
        (GRU_BEFORE, {}),
        lambda x, w: over_time(gru_before, np.zeros((4, 5)), x, w),
        tolerance=3e-6,
        thorough=True,
    ),
    "Recurrent LSTMCell": LayerRow(
        lambda dtype: mlax.Recurrent(nn.LSTMCell(5)),
        (4, 7, 3),
        (LSTM, {}),
        lambda x, w: over_time(lstm, (np.zeros((4, 5)), np.zeros((4, 5))), x, w),
        tolerance=3e-6,
        thorough=True,
    ),
    "Recurrent LSTMCell full": LayerRow(
        lambda dtype: mlax.Recurrent(nn.LSTMCell(5, peephole=True, projection=2)),
        (4, 7, 3),
        (FULL_LSTM, {}),
        lambda x, w: over_time(lstm, (np.zeros((4, 2)), np.zeros((4, 5))), x, w),
        tolerance=3e-6,
        variant=True,
    ),
    "Recurrent ConvLSTMCell": LayerRow(
        lambda dtype: mlax.Recurrent(nn.ConvLSTMCell(2)),
        (4, 3, 6, 3),
        (CONV_LSTM, {}),
        lambda x, w: over_time(conv_lstm, (np.zeros((4, 6, 2)), np.zeros((4, 6, 2))), x, w),
        tolerance=3e-6,
        thorough=True,
    ),
    "Bidirectional": LayerRow(
        lambda dtype: nn.Bidirectional(mlax.Recurrent(nn.GRUCell(5)), mlax.Recurrent(nn.GRUCell(5), reverse=True)),
        (4, 7, 3),
        ({f"{way}/{path}": shape for way in ("forward", "backward") for path, shape in GRU.items()}, {}),
        both_ways,
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
    "Stacked": LayerRow(
        lambda dtype: nn.Stacked(mlax.Recurrent(nn.RNNCell(5)), mlax.Recurrent(nn.LSTMCell(2))),
        (4, 7, 3),
        (
            {
                **{f"layer_0/{path}": shape for path, shape in RNN.items()},
                "layer_1/input/kernel": (5, 8),
                "layer_1/input/bias": (8,),
                "layer_1/recurrent/kernel": (2, 8),
            },
            {},
        ),
        stack,
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
}
