"""Checkpoints restored onto other shardings, devices and processes, each of which reads only what it needs."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlax import train
from tests.processes import outputs_of, reserved_port, start_python


def tree(seed=0):
    draws = np.random.default_rng(seed)
    return {
        "kernel": draws.normal(size=(16, 8)).astype(jnp.bfloat16),
        "table": draws.normal(size=(8, 3)).astype(np.float32),
        "scale": np.float32(draws.normal()),
        "empty": np.zeros((0, 8), np.float32),
    }


def placed(devices, seed=0):
    """The tree sharded over some of the devices, its kernel over both axes."""
    mesh = jax.make_mesh((max(1, devices // 2), min(2, devices)), ("a", "b"), devices=jax.devices()[:devices])
    specs = {"kernel": P("a", "b"), "table": P(("a", "b")), "scale": P(), "empty": P(None, "b")}
    arrays = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in tree(seed).items()}
    keys = jax.random.split(jax.random.key(seed), 8)
    return {**arrays, "keys": jax.device_put(keys, NamedSharding(mesh, P(("a", "b"))))}


def data(tree):
    return {name: jax.random.key_data(leaf) if name == "keys" else leaf for name, leaf in tree.items()}


def test_a_state_moves_over_eight_four_one_and_eight_devices_bitwise_unchanged(tmp_path):
    checkpoints = train.Checkpoints(tmp_path)
    state = placed(8, seed=3)
    for step, devices in enumerate((8, 4, 1, 8)):
        target = placed(devices, seed=4)
        checkpoints.save(step, state)
        state = checkpoints.restore(target).tree
        for name, leaf in data(state).items():
            assert np.asarray(leaf).tobytes() == np.asarray(data(placed(8, seed=3))[name]).tobytes()
            assert state[name].sharding == target[name].sharding and state[name].committed


def test_a_sharded_array_is_saved_once_and_read_where_it_is_needed(tmp_path):
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(1, placed(8))
    checkpoints.wait()
    manifest = train.checkpoints.read_manifest(str(tmp_path / "step-00000001" / "manifest.json"))
    assert len(manifest.arrays["kernel"].pieces) == 8 and len(manifest.arrays["scale"].pieces) == 1
    described = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in placed(4).items()
    }
    restored = checkpoints.restore(described).tree
    assert restored["kernel"].sharding == described["kernel"].sharding
    plain = checkpoints.restore({name: jnp.zeros_like(x) for name, x in tree().items()}, only=("kernel",))
    assert not plain.tree["kernel"].committed and (np.asarray(plain.tree["kernel"]) == tree()["kernel"]).all()


def test_an_array_in_host_memory_is_restored_there(tmp_path):
    sharding = placed(8)["kernel"].sharding.with_memory_kind("pinned_host")
    state = {"kernel": jax.device_put(tree()["kernel"], sharding)}
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(1, state)
    restored = checkpoints.restore(state).tree["kernel"]
    assert restored.sharding.memory_kind == "pinned_host" and (np.asarray(restored) == tree()["kernel"]).all()


OTHER = """
import sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from mlax import train
from tests.train.test_checkpoint_shardings import data, placed
checkpoints = train.Checkpoints(sys.argv[2])
state = checkpoints.restore(placed(int(sys.argv[1]), seed=1)).tree
for name, leaf in data(state).items():
    assert np.asarray(leaf).tobytes() == np.asarray(data(placed(1, seed=5))[name]).tobytes(), name
checkpoints.save(checkpoints.latest() + 1, state)  # the interpreter waits for it at exit
"""


def test_processes_with_fewer_devices_restore_what_eight_devices_saved(tmp_path, request):
    checkpoints = train.Checkpoints(tmp_path)
    checkpoints.save(0, placed(8, seed=5))
    checkpoints.wait()
    counts = (4, 1) if request.config.getoption("--thorough") else (1,)
    for devices in counts:
        outputs_of(start_python("-c", OTHER, devices, tmp_path))
    restored = checkpoints.restore(placed(8)).tree
    assert checkpoints.latest() == len(counts)
    for name, leaf in data(restored).items():
        assert np.asarray(leaf).tobytes() == np.asarray(data(placed(8, seed=5))[name]).tobytes()


SEVERAL = """
import sys, jax, numpy as np, os
index, port, folder, part = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from jax.sharding import NamedSharding, PartitionSpec as P
from mlax import files, train
from tests.train.test_checkpoint_shardings import tree
mesh = jax.make_mesh((4,), ("a",))
specs = {"kernel": P("a"), "table": P("a"), "scale": P(), "empty": P()}
def over(values):
    made = {name: jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, specs[name]), lambda i, x=x: x[i])
            for name, x in values.items()}
    return {**made, "local": np.arange(3), "key": jax.random.key(7)}
checkpoints = train.Checkpoints(folder, keep=2, timeout=20)
if part == "write":
    for step in (1, 2, 3):
        checkpoints.save(step, over(tree(step)))
    checkpoints.wait()
    assert checkpoints.latest() == 3
else:
    restored = checkpoints.restore(over(tree(0)))
    assert restored.step == int(part), restored
    for name, leaf in restored.tree.items():
        if name in specs:
            for shard in leaf.addressable_shards:
                wanted = np.asarray(tree(int(part))[name])[shard.index]
                assert np.asarray(shard.data).tobytes() == wanted.tobytes(), name
    if index == 1:  # only one of them has a full disk
        def full(*_):
            raise OSError(28, "full")
        real, os.fsync = os.fsync, full
    checkpoints.save(9, over(tree(9)))
    try:
        checkpoints.wait()
        raise SystemExit("the save should have failed")
    except (files.NotEnoughSpace if index == 1 else RuntimeError) as failure:
        print(failure)
    if index == 1:
        os.fsync = real
    assert checkpoints.latest() == 3
    checkpoints.save(10, over(tree(10)))
    checkpoints.wait()
    assert checkpoints.latest() == 10
"""


def test_two_processes_write_their_shards_and_any_number_reads_them(tmp_path):
    def both(part):
        with reserved_port() as port:
            outputs_of(*(start_python("-c", SEVERAL, index, port, tmp_path, part) for index in (0, 1)))

    both("write")
    checkpoints = train.Checkpoints(tmp_path, report=lambda words: None)
    assert checkpoints.steps() == (2, 3)
    found = sorted(os.listdir(tmp_path / "step-00000003"))
    assert found == ["arrays-00001-of-00002.safetensors", "arrays-00002-of-00002.safetensors", "manifest.json"]
    target = {**tree(), "local": np.zeros(3, np.int64), "key": jax.random.key(0)}
    restored = checkpoints.restore(target).tree
    assert all(np.asarray(restored[name]).tobytes() == np.asarray(x).tobytes() for name, x in tree(3).items())
    path = tmp_path / "step-00000003" / "arrays-00002-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # corrupts what only one of the two reads
    both("2")
    assert train.Checkpoints(tmp_path).latest() == 10 and not [n for n in os.listdir(tmp_path) if "saving" in n]


@pytest.mark.parametrize("missing", [0, 7])
def test_shards_that_do_not_cover_the_array_are_rejected(missing):
    blocks = [((row, column), (2, 4)) for row in (0, 2, 4, 6) for column in (0, 4)]
    assert train.checkpoints.is_partition((8, 8), blocks)
    assert not train.checkpoints.is_partition((8, 8), blocks[:missing] + blocks[missing + 1 :])
    assert not train.checkpoints.is_partition((8, 8), [*blocks, blocks[missing]])
    assert not train.checkpoints.is_partition((8, 8), [*blocks[1:], ((1, 0), (2, 4))])
