"""Claims: `train.step` trains as fast as the same model in Flax NNX, Equinox and PyTorch; the loop costs nothing.

    python benchmarks/train.py [python-with-torch] [--rounds N]      # 5 minutes on two cores

The models are the network of examples/digits.py, without dropout, and the transformer of examples/characters.py, in
float32 with AdamW. All libraries begin with the same weights and see the same batches, and the losses after some steps
are compared, so that all do the same work. Each has the loop that its documentation shows (train_peers); mlax has a
plain loop around `train.step`, with its guard against what is not finite, and `train.fit`. Then:

- the loop's own cost: what `train.fit`, with a bar, a log and a run folder, does for each step beyond what a bare loop
  does should take at most 2% of a step of 10 ms;
- the stall of a checkpoint: `Checkpoints.save` should take at most 5 ms more than copying the arrays off the device.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import Process, in_turns, seconds, serve, show, verdict

RATE, DECAY, DEPTH, HEADS, CHANNELS = 1e-3, 0.01, 4, 4, 32
STEPS = {"digits": 60, "characters": 8}  # in a turn
PEERS = {"Flax": "of_flax", "Equinox": "of_equinox"}
PACE, LIMIT, STALL = 10e-3, 0.02, 5e-3


def main(torch_python: str | None, rounds: int) -> None:
    from rich import print

    rows, worst = [], {}
    for name in STEPS:
        times = throughput(name, torch_python, rounds)
        own = times["mlax"]
        rows += [(name, library, seconds(took), f"{own / took:.2f}") for library, took in times.items()]
        worst[name] = max(own / took for library, took in times.items() if library in (*PEERS, "PyTorch"))
    show(f"A training step, median of {rounds} turns", ("model", "library", "a step", "mlax / this"), rows)
    for name, ratio in worst.items():
        print(verdict(f"{name}: train.step is no slower than the fastest of the others ({ratio:.2f})", ratio <= 1.05))

    bare, fitted = overhead(rounds)
    more = [f - b for b, f in zip(bare, fitted, strict=True)]
    show(
        f"What a loop does for a step beside computing it, median of {2 * rounds} turns",
        ("loop", "a step", "lowest to highest"),
        [
            (name, seconds(statistics.median(turns)), f"{seconds(min(turns))} to {seconds(max(turns))}")
            for name, turns in (("bare", bare), ("train.fit", fitted))
        ],
    )
    cost, low, high = (each / PACE for each in (statistics.median(more), min(more), max(more)))
    words = f"{cost * PACE * 1e3:.3f} ms, {cost:.2%} of a step of {PACE * 1e3:.0f} ms ({low:.2%} to {high:.2%})"
    print(verdict(f"train.fit adds {words}, at most {LIMIT:.0%}", cost <= LIMIT))

    size, copied, saved = stall(rounds)
    more = statistics.median(s - c for c, s in zip(copied, saved, strict=True))
    show(
        f"What a checkpoint of {size / 2**20:.0f} MiB holds up training for, median of {2 * rounds} turns",
        ("", "time", ""),
        [("copy", seconds(statistics.median(copied)), ""), ("save", seconds(statistics.median(saved)), "")],
    )
    print(verdict(f"a save takes {more * 1e3:.1f} ms more than the copy, at most {STALL * 1e3:.0f}", more <= STALL))


def throughput(name: str, torch_python: str | None, rounds: int) -> dict[str, float]:
    """The seconds of a step in each library, each measured over turns of many."""
    weights, loops = own_loops(name)
    batches = batches_of(name)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "weights.npz", allow_pickle=False, **weights)
        for peer, module in PEERS.items():
            with contextlib.suppress(ModuleNotFoundError):
                loops[peer] = partial(loop, peer_step(name, module, weights), batches)
        torch = Process(torch_python, "--peer", name, folder) if torch_python else None
        if torch:
            loops["PyTorch"] = partial(torch.ask, "go")
        first = {library: run() for library, run in loops.items()}  # compiles
        losses = {library: loss for library, (_, loss) in first.items() if loss is not None}
        for library, loss in losses.items():
            if abs(loss - losses["mlax"]) > 2e-3 * losses["mlax"]:
                raise AssertionError(f"{name}: the loss is {loss} in {library}, but {losses['mlax']} in mlax")
        found = in_turns(loops, rounds=rounds)
        if torch:
            torch.end()
    return {library: statistics.median(took for took, _ in turns) for library, turns in found.items()}


def loop(step: Callable[[Any, Any], Any], batches: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """The seconds of a step over all batches, and the last loss."""
    start = time.perf_counter()
    for x, y in batches:
        loss = step(x, y)
    value = float(loss)
    return (time.perf_counter() - start) / len(batches), value


def own_loops(name: str) -> tuple[dict[str, np.ndarray], dict[str, Callable[[], tuple[float, float | None]]]]:
    """The weights to begin with, and the loops of mlax."""
    import jax

    from mlax import train
    from mlax.core import flatten_paths

    batches, model = batches_of(name), own_model(name)
    step, state = own_step(model, batches[0][0])
    weights = {path: np.array(leaf) for path, leaf in flatten_paths(state.trainables).items()}
    held = {"plain": state, "fit": jax.tree.map(jax.numpy.copy, state)}

    def plain(x, y):
        held["plain"], metrics = step(held["plain"], {"x": x, "y": y})
        return metrics["loss"]

    x, y = (np.concatenate(each) for each in zip(*batches, strict=True))
    feed = Clocked(train.Feed({"x": x, "y": y}, len(batches[0][0]), seed=0))
    other, _ = own_step(model, batches[0][0])  # its batches have a mask: another program

    def fit():
        done = int(held["fit"].step)
        with quiet(), tempfile.TemporaryDirectory() as folder:
            result = train.fit(other, held["fit"], feed, steps=done + len(batches), run=folder, evaluate_every=10**6)
        held["fit"] = result.state
        return feed.a_step(), None

    return weights, {"mlax": partial(loop, plain, batches), "mlax, train.fit": fit}


def own_step(model: Any, x: Any) -> tuple[Any, Any]:
    import jax
    import optax

    from mlax import optim, train

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, non_trainables = model.fwd(batch["x"], trainables, non_trainables, inference_mode=inference_mode)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), non_trainables

    step = train.step(objective, optim.AdamW(RATE, decay=DECAY, decayed=("**",)))
    return step, step.init(jax.random.key(1), *model.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype)))


def own_model(name: str) -> Any:
    import jax

    import mlax
    from mlax import nn

    if name == "characters":
        sys.path.append(str(Path(__file__).parents[1] / "examples"))
        from characters import LanguageModel

        return LanguageModel(128, DEPTH, HEADS)
    relu = mlax.F(jax.nn.relu)
    return mlax.Series(
        edges=nn.Conv(CHANNELS, 3),
        relu1=relu,
        corners=nn.Conv(CHANNELS, 3),
        relu2=relu,
        halve=nn.MaxPool(2),
        strokes=nn.Conv(2 * CHANNELS, 3),
        relu3=relu,
        flat=nn.Flatten(),
        head=nn.Linear(10),
    )


def peer_step(name: str, module: str, weights: dict[str, np.ndarray]) -> Callable[[Any, Any], Any]:
    import importlib

    peer = importlib.import_module(f"train_peers.{module}")
    if name == "digits":
        return peer.build(peer.cnn(weights), RATE, DECAY)
    blocks = [
        {path.removeprefix("blocks/"): leaf[i] for path, leaf in weights.items() if path.startswith("blocks/")}
        for i in range(DEPTH)
    ]
    return peer.build(peer.Writer(weights, blocks, HEADS), RATE, DECAY)


def batches_of(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    if name == "digits":
        x = rng.random((STEPS[name], 64, 8, 8, 1), np.float32)
        return list(zip(x, rng.integers(0, 10, x.shape[:2], np.int32), strict=True))
    text = rng.integers(0, 256, (STEPS[name], 16, 129), np.int32)
    return [(each[:, :-1].copy(), each[:, 1:].copy()) for each in text]


class Clocked:
    """A feed that notes when each batch was asked for."""

    def __init__(self, feed: Any):
        self.feed = feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def __repr__(self) -> str:
        return repr(self.feed)

    def stream(self, *given: Any, **options: Any) -> Any:
        self.stream_of, self.times = self.feed.stream(*given, **options), []
        return self

    def __enter__(self) -> Any:
        self.stream_of.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stream_of.__exit__(*error)

    def __iter__(self) -> Any:
        for batch in self.stream_of:
            self.times.append(time.perf_counter())
            yield batch

    def position(self) -> Any:
        return self.stream_of.position()

    def a_step(self) -> float:
        """The seconds between two batches, once the loop is in its stride."""
        times = self.times[len(self.times) // 5 :]
        return (times[-1] - times[0]) / (len(times) - 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def quiet() -> Any:
    """A terminal that nobody looks at, so that the bar is drawn."""
    return contextlib.redirect_stdout(Terminal())


class Paced(Clocked):
    """A feed that waits, then hands out a batch that lies on the device, and notes how long the loop keeps it."""

    def __init__(self, feed: Any):
        super().__init__(feed)
        with feed.stream(0, 1) as batches:
            (self.held,) = batches

    def stream(self, start: int, stop: int, **options: Any) -> Any:
        self.steps_left, self.times = stop - start, []
        return contextlib.nullcontext(self)

    def __iter__(self) -> Any:
        for _ in range(self.steps_left):
            time.sleep(PACE)
            start = time.perf_counter()
            yield self.held
            self.times.append(time.perf_counter() - start)

    def position(self) -> Any:
        return {"step": 0}

    def a_step(self) -> float:
        """The seconds that the loop keeps a batch, once it is in its stride."""
        return statistics.mean(self.times[len(self.times) // 5 :])


def overhead(rounds: int) -> tuple[list[float], list[float]]:
    """The seconds that a bare loop and `train.fit` keep each batch of a step that computes next to nothing.

    A step as long as what is asked about would drown it in its own noise. So the step is tiny and the feed waits for
    10 ms before each batch: `fit` reads its metrics and draws its bar as often as beside a step of that length. The
    batch is always the same one, ready on the device, in both loops: what a feed costs is in benchmarks/feed.py, and a
    loop that waits for its feed would hide its own work in that time. The bare loop waits for nothing.
    """
    import jax

    from mlax import nn, train

    rng = np.random.default_rng(0)
    source = {"x": rng.standard_normal((64, 16), np.float32), "y": rng.integers(0, 10, 64, np.int32)}
    feed = Paced(train.Feed(source, 8, seed=0))
    step, state = own_step(nn.Linear(10), feed.example["x"])
    held = {"state": state}

    def bare(steps=250):
        with feed.stream(0, steps) as batches:
            for batch in batches:
                held["state"], _ = step(held["state"], batch)
        jax.block_until_ready(held["state"])
        return feed.a_step()

    def fitted(steps=250):
        done = int(held["state"].step)
        with quiet(), tempfile.TemporaryDirectory() as folder:
            held["state"] = train.fit(
                step, held["state"], feed, steps=done + steps, run=folder, evaluate_every=10**6
            ).state
        return feed.a_step()

    bare(20), fitted(20)
    found = in_turns({"bare": bare, "fit": fitted}, rounds=2 * rounds)
    return found["bare"], found["fit"]


def stall(rounds: int) -> tuple[int, list[float], list[float]]:
    """The bytes of a checkpoint, and the seconds of copying it to the host and of saving it, turn by turn."""
    import jax
    import jax.numpy as jnp

    from mlax import train

    tree = {f"{i}": jax.random.normal(jax.random.key(i), (1024, 1024)) for i in range(24)}

    def fresh():
        """The same values in other arrays: JAX remembers what it has brought to the host."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, tree))

    def copy():
        leaves = jax.tree.leaves(fresh())
        start = time.perf_counter()
        for leaf in leaves:
            leaf.copy_to_host_async()
        copies = [np.array(leaf) for leaf in leaves]
        took = time.perf_counter() - start
        del copies
        return took

    with tempfile.TemporaryDirectory() as folder:
        checkpoints, numbers = train.Checkpoints(folder, keep=1), iter(range(10**6))

        def save():
            number, state = next(numbers), fresh()
            start = time.perf_counter()
            checkpoints.save(number, state)
            took = time.perf_counter() - start
            checkpoints.wait()
            return took

        copy(), save()
        found = in_turns({"copy": copy, "save": save}, rounds=2 * rounds)
    return sum(leaf.nbytes for leaf in tree.values()), found["copy"], found["save"]


def peer(name: str, folder: str) -> None:
    """Answer each line with the seconds of a step of PyTorch, and the last loss."""
    with np.load(Path(folder) / "weights.npz") as file:
        step = peer_step(name, "of_torch", dict(file))
    serve(lambda _: loop(step, batches_of(name)))


if __name__ == "__main__":
    if "--peer" in sys.argv:
        peer(*sys.argv[2:])
    else:
        arguments = argparse.ArgumentParser()
        arguments.add_argument("torch_python", nargs="?", help="a Python that has PyTorch")
        arguments.add_argument("--rounds", type=int, default=7)
        parsed = arguments.parse_args()
        main(parsed.torch_python, parsed.rounds)
