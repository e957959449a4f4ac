"""Count the frames, files and Python calls behind four ordinary uses of mlax, and measure the layout of its files.

    python scripts/walk.py             # the call paths
    python scripts/walk.py --layout    # the files
    python scripts/walk.py --names     # the names that --layout counts

Each use runs once, in a fresh process, under `sys.setprofile` in all of its threads. A function counts if its source
file belongs to the mlax that this Python imports. Comprehensions, methods that `dataclasses` generates, and whatever
runs while a module is imported do not count. The columns are:

    frames   mlax frames on the stack at the first call of the target function, or on the deepest stack if it has none
    through  distinct files of those frames
    files    distinct files in which a function was called, from start to end
    calls    function calls, from start to end; resuming a generator is a call

`train.fit` compiles ahead of time, so its frames are those of the trace; later steps run compiled code.

In the layout, a room is a folder of mlax, and a shared name is one that several files define at the top level. The
count of participles is a heuristic: functions, but not properties, whose name matches PARTICIPLE, a participle or
adjective alone (`filled`) or with prepositions (`laid_like`).
"""

import argparse
import ast
import inspect
import multiprocessing
import re
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp

import mlax
from mlax import nn, ops, optim, train

PACKAGE = Path(mlax.__file__).parent
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # some have no frame since Python 3.12
PARTICIPLE = re.compile(
    "_*(?!(?:embed|feed|need|seed|speed)(?:_|$))"
    "(?:[a-z]+ed|among|apart|begun|built|chosen|drawn|found|given|gone|heard|held|kept|known|laid|led|lost|made|meant|met|"
    "seen|sent|shown|taken|told|whole|written)"
    "(?:_(?:all|among|as|at|away|by|for|from|in|into|like|of|off|on|out|over|to|up|with))*"
)


class Profile:
    """Counts the mlax functions called in this thread, and in those started meanwhile."""

    def __init__(self, target: Callable[..., Any] | None = None):
        self.target = inspect.unwrap(target).__code__ if target else None
        self.calls: Counter[str] = Counter()  # by file
        self.stack: list[str] = []  # the file of each mlax frame

    def __enter__(self) -> Self:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not (_counts(frame.f_code) or frame.f_code is self.target):
            return
        stack = [code for code in _stack(frame) if _counts(code)]
        if any(code.co_name == "<module>" for code in stack):
            return
        if _counts(frame.f_code):
            self.calls[frame.f_code.co_filename] += 1
        if (frame.f_code is self.target and not self.stack) if self.target else len(stack) > len(self.stack):
            self.stack = [code.co_filename for code in stack]


def _counts(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{PACKAGE}/") and code.co_name not in COMPREHENSIONS


def _stack(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


@mlax.frozen
class Block(mlax.Composite):
    """A residual block with one linear map."""

    width: int

    def parts(self):
        return {"norm": nn.LayerNorm(), "linear": nn.Linear(self.width)}

    def wire(self, sub, x):
        return x + sub.linear(sub.norm(x))


MODEL = mlax.Series(blocks=mlax.Repeat(Block(8), 4), head=nn.Linear(1))


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    """The squared error of each example."""
    y, new = MODEL.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
    return jnp.mean((y - batch["y"]) ** 2, axis=-1), new


def training() -> tuple[Any, Any, train.Feed]:
    """A step, its first state and a feed."""
    rng, x = jax.random.key(0), jnp.ones((32, 8))
    step = train.step(objective, optim.AdamW(1e-3))
    return step, step.init(rng, *MODEL.init(rng, x)), train.Feed({"x": x, "y": x[:, :1]}, batch=8, seed=0)


def linear() -> Profile:
    """A batch to ops.linear inside Repeat, from the smallest train.fit."""
    step, state, feed = training()
    with Profile(ops.linear) as profile:
        train.fit(step, state, feed, steps=1, show=False)
    return profile


def adamw() -> Profile:
    """A gradient to the square root in AdamW, in the update of 8 leaves."""
    optimizer, leaves = optim.AdamW(1e-3), {f"layer{i}": {"kernel": jnp.ones((8, 8))} for i in range(8)}
    state = optimizer.init(leaves)
    with Profile(jax.lax.sqrt) as profile:
        optimizer.update(leaves, state, leaves)
    return profile


def save() -> Profile:
    """Checkpoints.save, until the state is on disk."""
    _, state, _ = training()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = train.Checkpoints(folder)
        with Profile() as profile:
            checkpoints.save(1, state)
            checkpoints.wait()
    return profile


def fit() -> Profile:
    """A train.fit that evaluates, saves and writes its report."""
    step, state, feed = training()
    with tempfile.TemporaryDirectory() as folder, Profile() as profile:
        train.fit(step, state, feed, steps=8, run=f"{folder}/run", evaluate=feed, show=False)
    return profile


def measure(use: Callable[[], Profile]) -> tuple[int, int, int, int, str]:
    """One row of the table of call paths."""
    profile = use()
    return len(profile.stack), len({*profile.stack}), len(profile.calls), profile.calls.total(), use.__doc__ or ""


def print_paths() -> None:
    """Print a row for each use."""
    print(f"{'frames':>8}{'through':>8}{'files':>8}{'calls':>8}")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        for *counts, use in processes.map(measure, (linear, adamw, save, fit)):
            print("".join(f"{count:8,}" for count in counts), "", use)


def print_layout(names: bool) -> None:
    """Print a row for each room, then what is counted over the whole package, and the names behind that if asked."""
    texts = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    print(f"{'room':12}{'files':>8}{'median':>8}{'lines':>8}")
    for room in [*sorted({_room(path) for path in texts}), "all"]:
        sizes = [size for path, size in lines.items() if room in ("all", _room(path))]
        print(f"{room:12}{len(sizes):8}{statistics.median(sizes):8.0f}{sum(sizes):8,}")
    largest = max(lines, key=lines.__getitem__)
    print(f"\n{sum(size <= 40 for size in lines.values()) / len(lines):.0%} of the files have 40 lines or fewer")
    print(f"{lines[largest]} lines in the largest file, {largest}")
    trees = {path: ast.parse(text) for path, text in texts.items()}
    defined = Counter(name for tree in trees.values() for name in set(_top_level_names(tree)))
    counts = {
        "top-level names are defined in several files": [f"{name} ({n})" for name, n in defined.items() if n > 1],
        "functions are named by a participle": [name for tree in trees.values() for name in _participles(tree)],
        "imports cross rooms into underscore files": [line for path in trees for line in _crossings(path, trees[path])],
    }
    for what, found in counts.items():
        print(len(found), f"{what}: {', '.join(sorted(found))}" if names else what)


def _room(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else "mlax"


def _top_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        for target in targets:
            name = getattr(target, "id", getattr(target, "name", "_"))
            if name != "_" and not name.startswith("__"):
                yield name


def _participles(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and PARTICIPLE.fullmatch(node.name) and not _is_property(node):
            yield node.name


def _is_property(function: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def _crossings(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                package, *rest = module.split(".")
                room, *inside = *rest, *(each.name for each in names)
                if package == "mlax" and room != _room(path) and any(name.startswith("_") for name in inside):
                    yield f"{path}: {module}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="store_true", help="measure the files instead")
    parser.add_argument("--names", action="store_true", help="with the names behind the counts of --layout")
    options = parser.parse_args()
    if options.layout or options.names:
        print_layout(options.names)
    else:
        print_paths()
