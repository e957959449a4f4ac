"""Fingerprints: they differ where two experiments do, and nowhere else."""

import argparse
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import nn, optim, train
from mlax.core import F, Layer, frozen, replace
from mlax.train import differences, fingerprint
from tests.train.tasks import MODEL, arrays, feed, init_state, objective

SCALE = 1.0


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    steps: int = 10


@pytest.fixture(scope="module")
def state():
    return init_state(train.step(objective, optim.SGD(0.1)))


@pytest.fixture
def changed(state):
    """The names under which the fingerprints of two objectives, feeds or states differ."""

    def compare(first, second, part="objective"):
        parts = {"objective": objective, "state": state, "feed": feed(), "feeds": {}}
        marks = [fingerprint(**{**parts, part: each}) for each in (first, second)]
        return [name for name, _, _ in differences(*marks)]

    return compare


def closing_over(value):
    return lambda batch: value


def reading(config):
    return lambda batch: batch * config.rate


def own_layer(factor):
    @frozen
    class Own(Layer):
        def init(self, rng, x):
            return None, None

        def fwd(self, x, trainables=None, non_trainables=None, *, rng=None, inference_mode=False):
            return x * factor, None

    return Own()


def multiply(batch):
    return batch * SCALE


def call_multiply(batch):
    return multiply(batch)


def cyclic(batch):
    return cyclic(batch) if batch else closing_over(cyclic)


def compiled(source):
    return eval(f"lambda batch: {source}", {})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1, 1.0),
        ("a", "b"),
        (np.arange(3), np.arange(3) + 1),
        (jnp.ones(3), jnp.zeros(3)),
        (jnp.ones(3), np.ones(3, np.float64)),
        (jax.random.key(0), jax.random.key(1)),
        ([1, [2]], [1, [3]]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (Config(0.1), Config(0.2)),
        (MODEL, replace(MODEL, "drop", nn.Dropout(0.3))),
        (MODEL, replace(MODEL, "tanh", F(lambda x: 2 * x))),
        (jnp.tanh, jnp.sin),
        (lambda x: x, lambda x: -x),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (own_layer(1), own_layer(2)),
        (MODEL.fwd, replace(MODEL, "drop", nn.Dropout(0.3)).fwd),
        (jax.jit(lambda x: x), jax.jit(lambda x: -x)),
        (argparse.Namespace(a=1), argparse.Namespace(a=2)),
    ],
)
def test_values_that_differ_are_told_apart_and_equal_ones_are_not(changed, first, second):
    assert changed(closing_over(first), closing_over(second)) == ["the objective: value"]
    assert changed(closing_over(first), closing_over(first)) == []


def test_equal_descriptions_and_arrays_made_twice_are_alike(changed):
    assert changed(closing_over(replace(MODEL, "drop", nn.Dropout(0.1))), closing_over(MODEL)) == []
    assert changed(closing_over(np.arange(9)), closing_over(np.arange(9).copy())) == []
    assert changed(closing_over({3, 1, 2}), closing_over({2, 3, 1})) == []
    assert changed(cyclic, cyclic) == []


def test_what_cannot_be_told_is_not_refused(changed):
    assert changed(closing_over(object()), closing_over(object())) == []
    assert changed(closing_over(iter([1])), closing_over(open)) == []
    assert changed(print, max) == []


def test_of_a_configuration_only_what_the_objective_reads_counts(changed):
    assert changed(reading(Config(steps=10)), reading(Config(steps=20))) == []
    assert changed(reading(Config(rate=0.1)), reading(Config(rate=0.2))) == ["the objective: config.rate"]


def test_globals_and_the_functions_that_are_called_count(changed, monkeypatch):
    from tests.train import test_fingerprint

    before = functools.partial(fingerprint, state=init_state(train.step(objective, optim.SGD(0.1))), feed=feed())
    marks = {each: before(each, feeds={}) for each in (multiply, call_multiply)}
    monkeypatch.setattr(test_fingerprint, "SCALE", 2.0)
    names = {each: [name for name, *_ in differences(marks[each], before(each, feeds={}))] for each in marks}
    assert names == {multiply: ["the objective: SCALE"], call_multiply: ["the objective: multiply"]}


def test_code_of_another_version_of_python_is_not_compared(state):
    now = fingerprint(multiply, state, feed(), {})
    code = {name: mark for name, mark in now.items() if "Python 3." in mark}
    before = {name: mark.replace("Python 3.", "Python 2.").replace("#", "#0") for name, mark in code.items()}
    assert list(differences(before, now)) == []
    assert [name for name, *_ in differences({**before, "the objective: SCALE": "3.0"}, now)] == [
        "the objective: SCALE"
    ]


def test_changes_are_described_in_the_number_of_their_subject():
    describe_change = inspect.getmodule(fingerprint).describe_change
    assert describe_change("the key", "1", "2") == "the key was 1 and is now 2"
    assert describe_change("the first weights", "w 1", "2") == "the first weights were w 1 and are now 2"
    assert describe_change("the data", "Feed #12", "Feed #34") == "the data have changed"


def test_weights_that_other_devices_round_differently_are_alike(changed, state):
    def scaled(by):
        return state._replace(trainables=jax.tree.map(lambda leaf: leaf * np.float32(by), state.trainables))

    assert changed(state, scaled(1 + 1e-6), "state") == []
    assert changed(state, scaled(1.5), "state") == ["the first weights"]
    later = scaled(1.5)._replace(step=jnp.int32(3))
    assert changed(state, later, "state") == [], "a later state is not the first"


class Rows:
    """A source that is not arrays; with `noise` it never returns the same twice."""

    def __init__(self, value, noise=False):
        self.value, self.draws = value, np.random.default_rng(0) if noise else None

    def __len__(self):
        return 100

    def __getitem__(self, ids):
        extra = 0.0 if self.draws is None else self.draws.normal()
        return {"x": np.full((len(ids), 2), self.value + extra)}


class Stored:
    """An array that is not NumPy's, as those of h5py and zarr."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __len__(self):
        return len(self.array)

    def __getitem__(self, ids):
        return self.array[ids]


def test_the_data_are_compared_by_their_contents(changed):
    def with_last(value):
        x = np.zeros((50, 3), np.float32)
        x[-1, -1] = value
        return train.Feed({"x": x}, batch=8)

    assert changed(with_last(0), with_last(0), "feed") == []
    assert changed(with_last(0), with_last(1), "feed") == ["the data"]
    assert changed(train.Feed(Rows(1), batch=8), train.Feed(Rows(2), batch=8), "feed") == ["the data"]
    stored = [train.Feed({"x": Stored(np.full((40, 2), value))}, batch=8) for value in (1.0, 1.0, 2.0)]
    assert changed(stored[0], stored[1], "feed") == []
    assert changed(stored[0], stored[2], "feed") == ["the data"], "arrays on disk are sampled"
    noisy = [train.Feed(Rows(value, noise=True), batch=8) for value in (1, 2)]
    assert changed(*noisy, "feed") == [], "what differs each time cannot be compared"
    assert changed({"": train.Feed(arrays(), batch=8)}, {"": train.Feed(arrays(seed=1), batch=8)}, "feeds") == [
        "the data of evaluations"
    ]


def test_of_large_arrays_blocks_are_compared(changed, monkeypatch):
    import inspect

    monkeypatch.setattr(inspect.getmodule(fingerprint), "MAX_HASHED_BYTES", 1 << 12)
    x = np.random.default_rng(0).normal(size=(10_000, 2))
    assert changed(train.Feed({"x": x}, batch=8), train.Feed({"x": x.copy()}, batch=8), "feed") == []
    assert changed(train.Feed({"x": x}, batch=8), train.Feed({"x": x + 1}, batch=8), "feed") == ["the data"]


LINEAR = nn.Linear(1)
TRACES, SEEN = 0, []


def linear_objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    global TRACES
    TRACES += 1
    SEEN.append(0)
    y, _ = LINEAR.fwd(batch["x"], trainables, non_trainables)
    return SCALE * y[:, 0] ** 2, non_trainables


def test_a_model_that_changed_since_the_step_was_compiled_is_refused(monkeypatch):
    change = functools.partial(monkeypatch.setitem, globals())

    def fit(step, steps=1):
        return train.fit(step, init_state(step, LINEAR), feed(), steps=steps, evaluate=feed(), show=False)

    step = train.step(linear_objective, optim.SGD(0.1))
    change("SCALE", 2.0)  # not compiled yet
    fit(step)
    fit(step, 2)  # what tracing changes, TRACES and SEEN, does not count
    change("LINEAR", nn.Linear(1, bias=False))
    with pytest.raises(ValueError, match=r"fit: .*LINEAR was .* and is now .*bias=False.*; make the step and"):
        fit(step)
    change("LINEAR", nn.Linear(1))  # equal to the first
    fit(step)
    evaluated = train.step(linear_objective, optim.SGD(0.1))
    evaluated.evaluation(init_state(evaluated, LINEAR), [feed().source[np.arange(8)]])
    change("SCALE", 1.0)
    with pytest.raises(ValueError, match=r"fit: the objective: SCALE was 2\.0 and is now 1\.0"):
        fit(evaluated)


def test_a_donated_array_that_the_objective_refers_to_is_left_out(changed):
    before, after = jnp.ones(3), jnp.ones(3)
    after.delete()
    assert changed(closing_over(before), closing_over(jnp.zeros(3)))
    assert not changed(closing_over({"w": before}), closing_over({"w": after}))
