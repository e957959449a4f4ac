"""Implicit transfers are errors, and arrays that are not sharded as planned are named."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mlax import nn, optim, place, train

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
def test_a_numpy_array_passed_to_a_compiled_function_is_an_error(scale, compiled, again):
    batch = jax.device_put(numpy_batch(), split())
    function = scaled.lower(scale, batch).compile() if compiled else jax.jit(lambda *args: scaled(*args))
    if again:
        function(scale, batch)
    with pytest.raises(place.UnplannedTransfer) as caught, place.guard():
        function(scale, {**batch, "image": np.ones((16, 8), np.float32)})
    assert "implicit host-to-device transfer of float32[16,8] to NamedSharding(mesh=Mesh('data': 8" in str(caught.value)
    assert "put it there first, by jax.device_put" in str(caught.value)
    assert "train.Feed(sharding=...)" in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_an_array_on_another_device_is_an_error(scale):
    image = jnp.ones((16, 8))
    with refused_as(r"^implicit device-to-device transfer of .*float32\[16,8\].*Mesh\('data': 8.*put it there first"):
        scaled(scale, image)


def test_the_error_of_a_python_scalar_suggests_to_create_it_inside_the_function(scale):
    with refused_as(r"^implicit host-to-device transfer of .*float32\[\].*create the scalar inside the compiled"):
        scaled(scale, 0.5)
    with refused_as(r"float32\[\].*create the scalar inside the compiled function"):
        jnp.ones((4,))


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    y, non_trainables = MODEL.fwd(batch["image"], trainables, non_trainables)
    return jnp.mean((y - batch["label"]) ** 2), non_trainables


def begun():
    step = train.step(objective, optim.AdamW(1e-3))
    variables = MODEL.init(jax.random.key(0), jnp.ones((1, 8)))
    return step, step.init(jax.random.key(1), *jax.device_put(variables, whole()))


def test_a_training_step_names_the_leaf_of_the_batch_and_can_continue():
    step, state = begun()
    placed = jax.device_put(numpy_batch(), split())
    state, _ = step(state, placed)
    batch = {**placed, "label": numpy_batch()["label"]}
    with refused_as(r"^batch/label, float32\[16, 4\], is on the host, but is planned on 8 devices, as P\('data',\)"):
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


def test_explicit_transfers_are_allowed():
    with place.guard():
        x = jax.device_put(np.ones(3, np.float32), jax.devices()[1])
        x = jax.device_put(x, jax.devices()[2])
        assert jax.device_get(x).sum() == 3


def test_other_errors_pass_unchanged():
    with pytest.raises(ZeroDivisionError), place.guard():
        _ = 1 // 0
    with pytest.raises(RuntimeError, match=r"^mine$"), place.guard():
        raise RuntimeError("mine")


def test_outside_the_block_and_in_other_threads_everything_is_allowed():
    done = []
    with place.guard():
        thread = threading.Thread(target=lambda: done.append(jnp.ones(3).sum()))
        thread.start()
        thread.join()
    assert done and jnp.ones(3).sum() == done[0]


def test_the_error_of_reading_an_array_on_the_host_suggests_device_get():
    with refused_as(r"^implicit device-to-host transfer of shape=\(2\), dtype=F32: fetch it by jax.device_get"):
        raise RuntimeError("Disallowed device-to-host transfer: shape=(2), dtype=F32")  # as on a GPU


def test_check_accepts_shardings_of_the_plan():
    batch = jax.device_put(numpy_batch(), split())
    place.check_shardings(batch, split())
    place.check_shardings(batch, {"image": split(), "label": NamedSharding(mesh(), P("data", None))})
    place.check_shardings({}, split())
    place.check_shardings({**batch, "none": None}, {"image": split(), "label": None, "none": None})


def test_check_names_the_first_leaf_with_another_sharding_and_its_cost():
    batch = jax.device_put(numpy_batch(), split())
    batch["label"] = jax.device_put(batch["label"], whole())
    with pytest.raises(place.UnplannedTransfer) as caught:
        place.check_shardings(batch, split(), "batch")
    assert str(caught.value).startswith(
        "batch/label, float32[16, 4], is on 8 devices, as P(), but is planned on 8 devices, as P('data',): "
        "each use would copy 256 bytes."
    )
    with pytest.raises(
        place.UnplannedTransfer,
        match=r"^image, .* is on the host, .* copy 4 KiB.* 1 more array is not sharded as planned either.$",
    ):
        place.check_shardings(numpy_batch(), whole())
    where = f"^an array, .* is on {jax.devices()[0]} in pinned_host memory, but"
    with pytest.raises(place.UnplannedTransfer, match=where):
        place.check_shardings(jax.device_put(jnp.ones(8), jax.memory.Space.Host), split())
    with pytest.raises(ValueError, match="'label' is in only one of the two trees"):
        place.check_shardings(batch, {"image": split()})
