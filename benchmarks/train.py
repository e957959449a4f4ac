"""Claims: `train.step` is as fast as the same model in Flax NNX, Equinox and PyTorch; `train.fit` adds no overhead.

    python benchmarks/train.py [python-with-torch] [--rounds N]      # 5 minutes on two cores

The models are the network of examples/digits.py, without dropout, and the transformer of examples/characters.py, in
float32 with AdamW. All libraries start with the same weights and batches, and the losses after some steps are compared,
so that all do the same work. Each uses the loop from its documentation (train_peers); mlax uses a plain loop around
`train.step`, with its guard against non-finite values, and `train.fit`. The process keeps freed memory
(`train.keep_freed_memory`), from which all libraries on JAX gain. Then:

- the overhead of the loop: what `train.fit`, with a progress bar, a log and a run directory, does per step beyond a
  bare loop should take at most 2% of a step of 10 ms;
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
from harness import FAILED, Process, interleave, print_table, seconds, serve, verdict, write_rows

RATE, DECAY, DEPTH, HEADS, CHANNELS = 1e-3, 0.01, 4, 4, 32
STEPS = {"digits": 60, "characters": 8}  # per round
FIT_EPOCHS = 5  # of these steps in a run of `train.fit`: in one, its beginning and its end would count too much
PEERS = {"Flax": "flax_training", "Equinox": "equinox_training"}
PACE, LIMIT, STALL = 10e-3, 0.02, 5e-3


def main(torch_python: str | None, rounds: int, rows_path: str | None = None) -> None:
    from rich import print

    from mlax import train

    train.keep_freed_memory()
    rows, worst = [], {}
    for name in STEPS:
        times = throughput(name, torch_python, rounds)
        own = times["mlax"]
        write_rows(rows_path, "train", f"{name}, training step", times, torch_python)
        rows += [(name, library, seconds(step), f"{own / step:.2f}") for library, step in times.items()]
        peers = [own / step for library, step in times.items() if library in (*PEERS, "PyTorch")]
        if peers:  # none may be installed
            worst[name] = max(peers)
    print_table(f"A training step, median of {rounds} rounds", ("model", "library", "per step", "mlax / this"), rows)
    if len(worst) < len(STEPS):
        print("no peer to compare with: install Flax or Equinox, or pass a Python that has PyTorch")
    for name, ratio in worst.items():
        print(verdict(f"{name}: train.step is no slower than the fastest peer ({ratio:.2f})", ratio <= 1.05))

    bare, fit = overhead(rounds)
    extra = [f - b for b, f in zip(bare, fit, strict=True)]
    print_table(
        f"Overhead of a loop per step, median of {2 * rounds} rounds",
        ("loop", "per step", "range"),
        [
            (name, seconds(statistics.median(times)), f"{seconds(min(times))} to {seconds(max(times))}")
            for name, times in (("bare", bare), ("train.fit", fit))
        ],
    )
    cost, low, high = (each / PACE for each in (statistics.median(extra), min(extra), max(extra)))
    amount = f"{cost * PACE * 1e3:.3f} ms, {cost:.2%} of a step of {PACE * 1e3:.0f} ms ({low:.2%} to {high:.2%})"
    print(verdict(f"train.fit adds {amount}, at most {LIMIT:.0%}", cost <= LIMIT))

    size, copies, saves = stall(rounds)
    extra = statistics.median(s - c for c, s in zip(copies, saves, strict=True))
    print_table(
        f"How long a checkpoint of {size / 2**20:.0f} MiB blocks training, median of {2 * rounds} rounds",
        ("", "time", ""),
        [("copy", seconds(statistics.median(copies)), ""), ("save", seconds(statistics.median(saves)), "")],
    )
    print(verdict(f"a save takes {extra * 1e3:.1f} ms more than the copy, at most {STALL * 1e3:.0f}", extra <= STALL))


def throughput(name: str, torch_python: str | None, rounds: int) -> dict[str, float]:
    """The seconds per step in each library, measured over many steps per round."""
    weights, loops = mlax_loops(name)
    batches = make_batches(name)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "weights.npz", allow_pickle=False, **weights)
        for peer, module in PEERS.items():
            with contextlib.suppress(ModuleNotFoundError):
                loops[peer] = partial(run_loop, peer_step(name, module, weights), batches)
        torch = Process(torch_python, "--peer", name, folder) if torch_python else None
        if torch:
            loops["PyTorch"] = partial(torch.ask, "go")
        first = {library: run() for library, run in loops.items()}  # compiles
        losses = {library: loss for library, (_, loss) in first.items() if loss is not None}
        for library, loss in losses.items():
            if abs(loss - losses["mlax"]) > 2e-3 * losses["mlax"]:
                raise AssertionError(f"{name}: the loss is {loss} in {library}, but {losses['mlax']} in mlax")
        times = interleave(loops, rounds=rounds)
        if torch:
            torch.close()
    return {library: statistics.median(step for step, _ in repeats) for library, repeats in times.items()}


def run_loop(step: Callable[[Any, Any], Any], batches: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """The seconds per step over all batches, and the last loss."""
    start = time.perf_counter()
    for x, y in batches:
        loss = step(x, y)
    value = float(loss)
    return (time.perf_counter() - start) / len(batches), value


def mlax_loops(name: str) -> tuple[dict[str, np.ndarray], dict[str, Callable[[], tuple[float, float | None]]]]:
    """The initial weights, and the loops of mlax."""
    import jax

    from mlax import train
    from mlax.core import flatten_paths

    batches, model = make_batches(name), mlax_model(name)
    step, state = mlax_step(model, batches[0][0])
    weights = {path: np.array(leaf) for path, leaf in flatten_paths(state.trainables).items()}
    current = {"plain": state, "fit": jax.tree.map(jax.numpy.copy, state)}

    def plain(x, y):
        current["plain"], metrics = step(current["plain"], {"x": x, "y": y})
        return metrics["loss"]

    x, y = (np.concatenate(each) for each in zip(*batches, strict=True))
    feed = TimedFeed(train.Feed({"x": x, "y": y}, len(batches[0][0]), seed=0))
    masked, _ = mlax_step(model, batches[0][0])  # the batches of a feed have a mask: another program

    def fit():
        done = int(current["fit"].step)
        with fake_terminal(), tempfile.TemporaryDirectory() as folder:
            result = train.fit(
                masked, current["fit"], feed, steps=done + FIT_EPOCHS * len(batches), run=folder, evaluate_every=10**6
            )
        current["fit"] = result.state
        return feed.seconds_per_step(), None

    return weights, {"mlax": partial(run_loop, plain, batches), "mlax, train.fit": fit}


def mlax_step(model: Any, x: Any) -> tuple[Any, Any]:
    import jax

    from mlax import ops, optim, train

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, non_trainables = model.fwd(batch["x"], trainables, non_trainables, inference_mode=inference_mode)
        return ops.softmax_cross_entropy(logits, batch["y"]), non_trainables

    step = train.step(objective, optim.AdamW(RATE, decay=DECAY, decayed=("**",)))
    return step, step.init(jax.random.key(1), *model.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype)))


def mlax_model(name: str) -> Any:
    import jax

    import mlax
    from mlax import nn

    if name == "characters":
        sys.path.append(str(Path(__file__).parents[1] / "examples"))
        from characters import LanguageModel

        return LanguageModel(128, DEPTH, HEADS)
    relu = jax.nn.relu
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
        {path.removeprefix("blocks/stacked/"): leaf[i] for path, leaf in weights.items() if path.startswith("blocks/")}
        for i in range(DEPTH)
    ]
    return peer.build(peer.LanguageModel(weights, blocks, HEADS), RATE, DECAY)


def make_batches(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    if name == "digits":
        x = rng.random((STEPS[name], 64, 8, 8, 1), np.float32)
        return list(zip(x, rng.integers(0, 10, x.shape[:2], np.int32), strict=True))
    text = rng.integers(0, 256, (STEPS[name], 16, 129), np.int32)
    return [(each[:, :-1].copy(), each[:, 1:].copy()) for each in text]


class TimedFeed:
    """A feed that records when each batch is requested, and when `fit` has computed and saved all."""

    def __init__(self, feed: Any):
        self.feed = feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def __repr__(self) -> str:
        return repr(self.feed)

    def stream(self, *args: Any, **options: Any) -> Any:
        self.batches, self.times = self.feed.stream(*args, **options), []
        return self

    def __enter__(self) -> Any:
        self.batches.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        import jax

        jax.block_until_ready(jax.live_arrays())  # the last state, too
        self.times.append(time.perf_counter())
        self.batches.__exit__(*error)

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.times.append(time.perf_counter())
            yield batch

    def position(self) -> Any:
        return self.batches.position()

    def seconds_per_step(self) -> float:
        """The mean seconds of a step, from the first batch until all is computed and saved."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fake_terminal() -> Any:
    """Redirect stdout to a fake terminal, so that the progress bar is drawn."""
    return contextlib.redirect_stdout(Terminal())


class PacedFeed(TimedFeed):
    """A feed that waits, then yields a batch that is on the device, and records how long the loop keeps it."""

    def __init__(self, feed: Any):
        super().__init__(feed)
        with feed.stream(0, 1) as batches:
            (self.current,) = batches

    def stream(self, start: int, stop: int, **options: Any) -> Any:
        self.steps_left, self.times = stop - start, []
        return contextlib.nullcontext(self)

    def __iter__(self) -> Any:
        for _ in range(self.steps_left):
            time.sleep(PACE)
            start = time.perf_counter()
            yield self.current
            self.times.append(time.perf_counter() - start)

    def position(self) -> Any:
        return {"step": 0}

    def seconds_per_step(self) -> float:
        """The mean seconds that the loop keeps a batch, without the first fifth."""
        return statistics.mean(self.times[len(self.times) // 5 :])


def overhead(rounds: int) -> tuple[list[float], list[float]]:
    """The seconds that a bare loop and `train.fit` keep each batch of a step that computes almost nothing.

    The noise of a realistic step would hide the overhead. So the step is tiny and the feed waits for 10 ms before each
    batch: `fit` reads its metrics and draws its progress bar as often as with a step of that length. Both loops get the
    same batch, ready on the device: benchmarks/feed.py measures the cost of a feed, and a loop that waits for its feed
    would hide its own work in that time. The bare loop waits for nothing.
    """
    import jax

    from mlax import nn, train

    rng = np.random.default_rng(0)
    source = {"x": rng.standard_normal((64, 16), np.float32), "y": rng.integers(0, 10, 64, np.int32)}
    feed = PacedFeed(train.Feed(source, 8, seed=0))
    step, state = mlax_step(nn.Linear(10), feed.example["x"])
    current = {"state": state}

    def bare(steps=250):
        with feed.stream(0, steps) as batches:
            for batch in batches:
                current["state"], _ = step(current["state"], batch)
        jax.block_until_ready(current["state"])
        return feed.seconds_per_step()

    def fit(steps=250):
        done = int(current["state"].step)
        with fake_terminal(), tempfile.TemporaryDirectory() as folder:
            current["state"] = train.fit(
                step, current["state"], feed, steps=done + steps, run=folder, evaluate_every=10**6
            ).state
        return feed.seconds_per_step()

    bare(20), fit(20)
    times = interleave({"bare": bare, "fit": fit}, rounds=2 * rounds)
    return times["bare"], times["fit"]


def stall(rounds: int) -> tuple[int, list[float], list[float]]:
    """The bytes of a checkpoint, and the seconds of copying it to the host and of saving it, per round."""
    import jax
    import jax.numpy as jnp

    from mlax import train

    tree = {f"{i}": jax.random.normal(jax.random.key(i), (1024, 1024)) for i in range(24)}

    def copy_tree():
        """The same values in new arrays: JAX caches host copies."""
        return jax.block_until_ready(jax.tree.map(jnp.copy, tree))

    def copy():
        leaves = jax.tree.leaves(copy_tree())
        start = time.perf_counter()
        for leaf in leaves:
            leaf.copy_to_host_async()
        copies = [np.array(leaf) for leaf in leaves]
        duration = time.perf_counter() - start
        del copies
        return duration

    with tempfile.TemporaryDirectory() as folder:
        checkpoints, numbers = train.Checkpoints(folder, keep=1), iter(range(10**6))

        def save():
            number, state = next(numbers), copy_tree()
            start = time.perf_counter()
            checkpoints.save(number, state)
            duration = time.perf_counter() - start
            checkpoints.wait()
            return duration

        copy(), save()
        times = interleave({"copy": copy, "save": save}, rounds=2 * rounds)
    return sum(leaf.nbytes for leaf in tree.values()), times["copy"], times["save"]


def peer(name: str, folder: str) -> None:
    """Answer each line with the seconds per step of PyTorch, and the last loss."""
    with np.load(Path(folder) / "weights.npz") as file:
        step = peer_step(name, "torch_training", dict(file))
    serve(lambda _: run_loop(step, make_batches(name)))


if __name__ == "__main__":
    if "--peer" in sys.argv:
        peer(*sys.argv[2:])
    else:
        arguments = argparse.ArgumentParser()
        arguments.add_argument("torch_python", nargs="?", help="a Python that has PyTorch")
        arguments.add_argument("--rounds", type=int, default=7)
        arguments.add_argument("--rows", help="a file that rows are appended to")
        parsed = arguments.parse_args()
        main(parsed.torch_python, parsed.rounds, parsed.rows)
        sys.exit(1 if FAILED else 0)
