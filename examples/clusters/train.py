"""Train on all devices of all processes: on one machine, under Slurm, Kubernetes or MPI, without changes.

    mlax train examples/clusters/train.py                            one process
    mlax launch -n 2 --devices 4 examples/clusters/train.py          two processes on this machine, simulated devices
    srun python examples/clusters/train.py                           under Slurm; see slurm.sh, kubernetes.yaml

All processes must share the run directory. It takes about 20 seconds on two CPU cores.
"""

import dataclasses

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import mlax
from mlax import nn, optim, place, train


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings; each field is a command-line option."""

    steps: int = 200
    batch: int = 64  # global batch size
    run: str = "runs/cluster"  # the run directory


MODEL = mlax.Series(up=nn.Linear(128), gelu=jax.nn.gelu, drop=nn.Dropout(0.1), norm=nn.LayerNorm(), head=nn.Linear(10))


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    """The loss of each example, and whether it is classified correctly."""
    logits, non_trainables = MODEL.fwd(
        batch["pixels"], trainables, non_trainables, rng=rng, inference_mode=inference_mode
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["digit"])
    return {"loss": losses, "accuracy": train.accuracy(logits, batch["digit"])}, non_trainables


def main(config: Config):
    """Train, or resume a run that was started on any number of processes and devices."""
    place.initialize_distributed()
    plan = place.data()  # over the devices of all processes
    pixels, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    source = {"pixels": pixels[order].astype(np.float32) / 16, "digit": digits[order].astype(np.int32)}
    feed = train.Feed({k: v[448:] for k, v in source.items()}, config.batch, seed=0, sharding=plan.batch_sharding)
    test = train.Feed({k: v[:448] for k, v in source.items()}, 448, sharding=plan.batch_sharding)

    step = train.step(objective, optim.AdamW(optim.WarmupCosine(3e-3, warmup=20, total=config.steps)), plan=plan)
    state = step.init(jax.random.key(1), *plan.init(MODEL, jax.random.key(0), feed.example["pixels"]))
    return train.fit(step, state, feed, steps=config.steps, run=config.run, evaluate=test, save_every=20).scores


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
