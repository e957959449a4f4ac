"""One of several processes that train by plans and write what they observe; test_processes.py runs it.

python two_processes.py <index> <processes> <port> <devices> <folder> <plan>...
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from mlax import place

PLANS = {
    "fsdp": lambda task: place.fsdp(min_size=1),
    "tensor": lambda task: place.data(2) * place.tensor(task.model, task.x, 4),
    "1f1b": lambda task: place.pipeline(task.model, 4, microbatches=4) * place.data(2),
}


def observe(name, folder):
    """What one process observes of three steps by a plan and of a checkpoint."""
    from mlax import train  # both after `place.initialize_distributed`
    from tests.place.models import OPTIMIZER, objective_of, perceptron

    task = perceptron()
    plan = PLANS[name](task)
    step = train.step(objective_of(plan.parallelize(task.model, task.x)), OPTIMIZER, plan=plan)
    trainables, non_trainables = plan.init(task.model, jax.random.key(1), task.x)
    state = step.init(jax.random.key(0), trainables, non_trainables)
    here = sum(shard.data.nbytes for leaf in jax.tree.leaves(state.trainables) for shard in leaf.addressable_shards)
    described = plan.describe(task.model, task.x, OPTIMIZER, compile=False)
    feed = train.Feed(task.arrays, 16, seed=0, sharding=plan.batch_sharding)
    losses = []
    with feed.stream(0, 3) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    checkpoints = train.Checkpoints(folder / name)
    checkpoints.save(3, state)
    checkpoints.wait()
    again = checkpoints.restore(state).tree
    same = all(
        np.array_equal(a.data, b.data)
        for x, y in zip(jax.tree.leaves(again.trainables), jax.tree.leaves(state.trainables), strict=True)
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
    )
    return {"losses": losses, "here": here, "each": described.bytes_of("weights"), "restored": same}


def main(index, processes, port, devices, folder, plans):
    place.initialize_distributed(f"localhost:{port}", processes, index, devices=devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    found = {name: observe(name, folder) for name in plans}
    (folder / f"{index}.json").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), Path(sys.argv[5]), sys.argv[6:])
