"""Copies that nobody asked for, and the names of what would be copied."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mlax import nn, optim, place, train
from mlax.place._culprit import Refused, refused

MODEL = nn.Linear(4)


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def split():
    return NamedSharding(mesh(), P("data"))


def whole():
    return NamedSharding(mesh(), P())


def numpy_batch():
    return {"image": np.ones((16, 8), np.float32), "label": np.ones((16, 4), np.float32)}


@jax.jit
def scaled(scale, batch):
    return jax.tree.map(lambda leaf: leaf * scale, batch)


@contextlib.contextmanager
def refused_as(words):
    with pytest.raises(place.UnplannedTransfer, match=words), place.guard():
        yield


@pytest.fixture
def scale():
    return jax.device_put(jnp.float32(2), whole())


@pytest.mark.parametrize("compiled", [False, True], ids=["jit", "compiled"])
@pytest.mark.parametrize("again", [False, True], ids=["first call", "later call"])
def test_a_numpy_array_given_to_a_compiled_function_is_named(scale, compiled, again):
    batch, other = jax.device_put(numpy_batch(), split()), numpy_batch()
    function = scaled.lower(scale, batch).compile() if compiled else jax.jit(lambda *args: scaled(*args))
    if again:
        function(scale, batch)
    batch = {**batch, "image": np.ones((16, 8), np.float32)}
    with pytest.raises(place.UnplannedTransfer) as caught, place.guard():
        function(scale, batch)
    assert str(caught.value).startswith(
        "batch/image, float32[16, 8], would be copied from the host to 8 devices at test_guard.py:"
    )
    assert "train.Feed(sharding=...)" in str(caught.value)
    del other


def test_an_array_on_other_devices_is_named_and_its_neighbour_is_not(scale):
    batch = {"image": jnp.ones((16, 8)), "also": jax.device_put(jnp.ones((16, 8)), split())}
    with refused_as(r"^batch/image, .* copied from other devices to 8 devices at"):
        scaled(scale, batch)


def test_a_number_and_an_array_without_a_name_are_called_that(scale):
    unused = np.ones((3, 3), np.float32)
    with refused_as(r"^an array without a name, float32\[3, 3\], .* the host to 8"):
        scaled(scale, np.zeros((3, 3), np.float32))
    with refused_as(r"^a number, float32\[\], .* inside of the compiled function"):
        jnp.ones((4,))
    rate = 0.5
    with refused_as(r"^rate, float32\[\], would be copied from the host"):
        scaled(scale, rate)
    del unused


def test_a_wider_numpy_array_is_named_though_jax_narrows_it_first(scale):
    pixels = np.ones((16, 8), np.float64)
    with refused_as(r"^pixels, float32\[16, 8\]"):
        scaled(scale, pixels)


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    y, non_trainables = MODEL.fwd(batch["image"], trainables, non_trainables)
    return jnp.mean((y - batch["label"]) ** 2), non_trainables


def begun():
    step = train.step(objective, optim.AdamW(1e-3))
    variables = MODEL.init(jax.random.key(0), jnp.ones((1, 8)))
    return step, step.init(jax.random.key(1), *jax.device_put(variables, whole()))


def test_a_training_step_names_the_leaf_of_the_batch_and_goes_on_after_it():
    step, state = begun()
    placed = jax.device_put(numpy_batch(), split())
    state, _ = step(state, placed)
    batch = {**placed, "label": numpy_batch()["label"]}
    with refused_as(r"^batch/label, float32\[16, 4\], .* at test_guard.py"):
        step(state, batch)
    with place.guard():
        state, metrics = step(state, placed)
        loss = metrics["loss"]
    assert np.isfinite(jax.device_get(loss))


def test_steps_fed_as_planned_run_under_the_guard():
    step, state = begun()
    feed = train.Feed(numpy_batch(), 8, seed=0, sharding=split())
    with place.guard(), feed.stream() as stream:
        for _ in range(3):
            state, _ = step(state, next(stream))
    assert int(state.step) == 3


def test_what_is_asked_for_is_allowed():
    with place.guard():
        x = jax.device_put(np.ones(3, np.float32), jax.devices()[1])
        x = jax.device_put(x, jax.devices()[2])
        assert jax.device_get(x).sum() == 3


def test_other_errors_pass_unchanged():
    with pytest.raises(ZeroDivisionError), place.guard():
        _ = 1 // 0
    with pytest.raises(RuntimeError, match=r"^mine$"), place.guard():
        raise RuntimeError("mine")


def test_after_the_block_and_in_other_threads_everything_is_allowed():
    done = []
    with place.guard():
        thread = threading.Thread(target=lambda: done.append(jnp.ones(3).sum()))
        thread.start()
        thread.join()
    assert done and jnp.ones(3).sum() == done[0]


def test_what_jax_says_is_understood():
    def said(text):
        return refused(RuntimeError(f"INVALID_ARGUMENT: Disallowed {text}"))

    mesh = "NamedSharding(mesh=Mesh('a': 2, 'b': 4, axis_types=(Auto, Auto)), spec=P('a',), memory_kind=device)"
    array = "aval=ShapedArray(bfloat16[3,4], weak_type=True)"
    assert said(f"host-to-device transfer: {array}, dst_sharding={mesh}") == Refused(
        "host", "device", "bfloat16", (3, 4), 8
    )
    assert said("device-to-host transfer: shape=(2), dtype=F32") == Refused("device", "host", None, (), 1)
    assert refused(RuntimeError("RESOURCE_EXHAUSTED")) is None


class OnAnAccelerator:
    """Stands for an array that only an accelerator refuses to give to NumPy: a CPU's memory is the host's."""

    def read(self, loss):
        raise RuntimeError("Disallowed device-to-host transfer: shape=(), dtype=F32, device=cuda:0")


def test_an_array_that_is_read_is_named():
    loss = jnp.ones((2,))
    with refused_as(r"^loss would be copied from a device to the host at .*device_get"):
        OnAnAccelerator().read(loss)


def test_check_passes_what_is_as_planned():
    batch = jax.device_put(numpy_batch(), split())
    place.check_shardings(batch, split())
    place.check_shardings(batch, {"image": split(), "label": NamedSharding(mesh(), P("data", None))})
    place.check_shardings({}, split())


def test_check_names_the_first_leaf_that_is_elsewhere_and_what_that_costs():
    batch = jax.device_put(numpy_batch(), split())
    batch["label"] = jax.device_put(batch["label"], whole())
    with pytest.raises(place.UnplannedTransfer) as caught:
        place.check_shardings(batch, split(), "batch")
    assert str(caught.value).startswith(
        "batch/label, float32[16, 4], is on 8 devices, as P(), but is planned on 8 devices, as P('data',): "
        "each use would copy 256 bytes."
    )
    with pytest.raises(place.UnplannedTransfer, match=r"^image, .* is on the host, .* copy 4 KiB.* So are 1 more.$"):
        place.check_shardings(numpy_batch(), whole())
    where = f"^an array, .* is on {jax.devices()[0]} in pinned_host memory, but"
    with pytest.raises(place.UnplannedTransfer, match=where):
        place.check_shardings(jax.device_put(jnp.ones(8), jax.memory.Space.Host), split())
    with pytest.raises(ValueError, match="'label' is only in one of the two trees"):
        place.check_shardings(batch, {"image": split()})
