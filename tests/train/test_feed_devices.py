"""A Feed over several devices and processes: the same examples, and each process loads only its rows."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mlax import train
from tests.processes import outputs_of, reserved_port, start_python

ARRAYS = {"x": np.arange(38 * 4, dtype=np.float32).reshape(38, 4), "id": np.arange(38)}


def over(devices):
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), PartitionSpec("data"))


def jittered(batch, generator):
    return {**batch, "x": batch["x"] + generator.random(batch["x"].shape, np.float32)}


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_the_examples_are_the_same_on_any_number_of_devices(devices, steps_per_call):
    plain = train.Feed(ARRAYS, batch=8, seed=0, map_batch=jittered)
    feed = train.Feed(ARRAYS, batch=8, seed=0, map_batch=jittered, sharding=over(devices))
    with (
        plain.stream(stop=10, steps_per_call=steps_per_call) as wanted,
        feed.stream(stop=10, steps_per_call=steps_per_call) as given,
    ):
        for a, b in zip(wanted, given, strict=True):
            for name in a:
                assert np.array_equal(a[name], b[name])
                rows = b[name].sharding.shard_shape(b[name].shape)[steps_per_call > 1]
                assert len(b[name].devices()) == devices and rows == 8 // devices


def test_a_sharding_is_truncated_to_the_rank_of_each_array():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "time"))
    feed = train.Feed(ARRAYS, batch=8, sharding=NamedSharding(mesh, PartitionSpec("data", "time")))
    (batch,) = feed.stream(stop=1)
    assert batch["x"].sharding.shard_shape((8, 4)) == (2, 2) and batch["id"].sharding.shard_shape((8,)) == (2,)


def test_a_device_is_accepted_as_a_sharding():
    device = jax.devices()[5]
    for sharding in (device, SingleDeviceSharding(device)):
        with train.Feed(ARRAYS, batch=8, sharding=sharding).stream(stop=2, steps_per_call=2) as stream:
            assert next(stream)["x"].devices() == {device}


def test_iterable_feeds_and_buckets_are_sharded_too():
    (batch,) = train.IterableFeed([{"x": np.arange(8)}], sharding=over(4)).stream(stop=1)
    assert batch["x"].sharding == over(4) and batch["mask"].sharding == over(4)
    (batch,) = train.Buckets([[1, 2, 3]] * 8, (4,), 8, sharding=over(8)).stream(stop=1)
    assert batch["tokens"].sharding.shard_shape((8, 4)) == (1, 4)


PROCESS = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from mlax import train

class Source:
    def __init__(self):
        self.read = []
    def __len__(self):
        return 38
    def __getitem__(self, ids):
        self.read.append(ids.tolist())
        return {"id": ids, "x": np.repeat(ids[:, None], 3, 1).astype(np.float32)}

def draws(example, generator):
    return {**example, "drawn": generator.random(dtype=np.float32)}

def jittered(batch, generator):
    return {**batch, "drawn": generator.random(len(batch["id"]), np.float32)}

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, PartitionSpec("data"))
for steps_per_call, map_example, map_batch in ((1, draws, None), (2, None, jittered)):
    source = Source()
    maps = {"map_example": map_example, "map_batch": map_batch}
    feed = train.Feed(source, batch=8, seed=0, **maps, workers=1, sharding=sharding)
    feed.example
    source.read.clear()
    with feed.stream(stop=8, steps_per_call=steps_per_call) as stream:
        shards = [
            [name, s.index[steps_per_call > 1].start or 0, np.asarray(s.data).tolist()]
            for batch in stream for name in ("id", "drawn") for s in batch[name].addressable_shards
        ]
    print(json.dumps({"read": source.read, "shards": shards}), flush=True)
jax.distributed.shutdown()
"""


def test_each_of_two_processes_loads_only_its_rows_of_the_same_batches(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    with reserved_port() as port:
        outputs = outputs_of(*(start_python(script, port, index) for index in range(2)))
    by_example, by_batch = zip(*([json.loads(line) for line in out.splitlines()] for out in outputs), strict=True)

    def draws(example, generator):
        return {**example, "drawn": generator.random(dtype=np.float32)}

    def drawn(batch, generator):
        return {**batch, "drawn": generator.random(len(batch["id"]), np.float32)}

    alone = train.Feed({"id": np.arange(38)}, batch=8, seed=0, map_example=draws)
    for process, said in enumerate(by_example):
        held = slice(4 * process, 4 * process + 4)
        for step, read in enumerate(said["read"]):
            assert read == alone.batch_at(step)["id"][held].tolist()
        assert len(said["read"]) == 8
        shards = iter(said["shards"])
        for step in range(8):
            for name in ("id", "drawn"):
                for _, start, values in (next(shards), next(shards)):
                    assert held.start <= start < held.stop
                    assert np.array_equal(np.array(values, np.float32), alone.batch_at(step)[name][start : start + 2])

    alone = train.Feed({"id": np.arange(38)}, batch=8, seed=0, map_batch=drawn)
    for said in by_batch:
        shards = iter(said["shards"])
        for step in range(0, 8, 2):
            for name in ("id", "drawn"):
                for _, start, values in (next(shards), next(shards)):
                    wanted = [alone.batch_at(s)[name][start : start + 2] for s in (step, step + 1)]
                    assert np.array_equal(np.array(values, np.float32), np.stack(wanted))
