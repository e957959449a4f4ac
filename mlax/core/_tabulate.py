"""tabulate: a pytree of arrays as a table of paths, shapes, dtypes and bytes, never of numbers."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mlax.core._display import Node, align_columns, count_of, format_bytes, print_pretty, tree_html
from mlax.core._errors import short_repr
from mlax.core._layer import Layer

T = TypeVar("T", bound=type)
ROWS = 40  # fits a screen


def tabulate(tree: Any, *, rows: int | None = ROWS) -> "Table":
    """A table of the parameters, or of any other pytree: path, shape, dtype and bytes of each leaf, and their totals.

        print(mlax.tabulate(trainables))
        print(mlax.tabulate(jax.eval_shape(model.init, rng, x)))  # before anything is allocated

    Leaves are arrays, `jax.ShapeDtypeStruct`s, keys, or anything else, of which the type is shown. Where a leaf is
    stored is shown if that is not the default device. A subtree with the paths and shapes of an earlier one is one row,
    as the slots of an optimizer are, and so are the deepest subtrees if there would be more than `rows` rows; None
    shows every leaf.
    """
    if isinstance(tree, Layer):
        raise TypeError(
            f"tabulate: got the model {short_repr(tree)}, which holds no arrays; print(model) shows its layers. Pass "
            "variables, or their shapes: jax.eval_shape(model.init, rng, x)."
        )
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    leaves = [_describe_leaf(tuple(jax.tree_util.keystr((key,), simple=True) for key in keys), x) for keys, x in found]
    return Table(tuple(leaves), rows)


class Leaf(NamedTuple):
    """What a table shows of one leaf."""

    path: tuple[str, ...]
    shape: str
    dtype: str
    elements: int
    bytes: int
    local_bytes: int  # on each device
    where: str  # empty for the default device
    is_array: bool = True
    is_value: bool = True  # anything but None


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """The leaves of a pytree; `print` it, or leave it as the last expression of a notebook's cell."""

    leaves: tuple[Leaf, ...]
    rows: int | None = ROWS
    title: str = ""

    def __str__(self) -> str:
        cells = [("path", "shape", "dtype", "bytes", "where"), *_fold_rows(_Group((), self.leaves), self.rows)]
        if not any(row[-1] for row in cells[1:]):
            cells = [row[:-1] for row in cells]
        lines = align_columns(cells, right=(3,)) if any(leaf.is_value for leaf in self.leaves) else []
        return "\n".join([*[self.title] * bool(self.title), *lines, self.summary()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        root = _Group((), self.leaves)
        return tree_html(_node(root, "", f"{self.title}: {self.summary()}" if self.title else self.summary()))

    def summary(self) -> str:
        """The totals: leaves, elements and bytes, also those on each device if leaves are sharded."""
        number = sum(leaf.is_value for leaf in self.leaves)
        if not number:
            return "no leaves"
        whole, local = (sum(getattr(leaf, kind) for leaf in self.leaves) for kind in ("bytes", "local_bytes"))
        elements = sum(leaf.elements for leaf in self.leaves)
        text = f"{count_of(number, 'leaf')}, {count_of(elements, 'element')}, {format_bytes(whole)}"
        return f"{text}, {format_bytes(local)} on each device" if local != whole else text


def print_as_table(kind: T) -> T:
    """Make a NamedTuple of arrays print as a table, in a notebook too; its repr, as in a traceback, is one line."""
    methods: Any = kind
    methods.__repr__ = lambda self: f"{kind.__name__}({short_summary(self)})"
    methods.__str__ = lambda self: str(dataclasses.replace(tabulate(self), title=kind.__name__))
    methods._repr_html_ = lambda self: dataclasses.replace(tabulate(self), title=kind.__name__)._repr_html_()
    methods._repr_pretty_ = lambda self, printer, cycle: print_pretty(self, printer)
    return kind


def short_summary(tree: Any) -> str:
    """`16 leaves, 475 MiB`: a pytree in a few words."""
    leaves = tabulate(tree).leaves
    number = sum(leaf.is_value for leaf in leaves)
    return f"{count_of(number, 'leaf')}, {format_bytes(sum(leaf.bytes for leaf in leaves))}"


class _Group(NamedTuple):
    """The leaves below one path."""

    path: tuple[str, ...]
    leaves: tuple[Leaf, ...]

    @property
    def is_leaf(self) -> bool:
        return len(self.leaves) == 1 and self.leaves[0].path == self.path

    def children(self) -> list["_Group"]:
        depth = len(self.path) + 1
        below: dict[tuple[str, ...], list[Leaf]] = {}
        for leaf in self.leaves:
            below.setdefault(leaf.path[:depth], []).append(leaf)
        return [_Group(path, tuple(leaves)) for path, leaves in below.items()]

    def first_branch(self) -> "_Group":
        """The group below this one, or itself, where its path branches or ends."""
        below = [] if self.is_leaf else self.children()
        return below[0].first_branch() if len(below) == 1 else self

    def cells(self) -> tuple[str, ...]:
        """The row that sums these leaves, or that of the only one."""
        dtypes, where = (_join(each) for each in zip(*((leaf.dtype, leaf.where) for leaf in self.leaves), strict=True))
        has_bytes = any(leaf.is_array for leaf in self.leaves)
        size = format_bytes(sum(leaf.bytes for leaf in self.leaves)) if has_bytes else ""
        if self.is_leaf:
            return "/".join(self.path) or ".", self.leaves[0].shape, dtypes, size, where
        return "/".join((*self.path, "**")), count_of(len(self.leaves), "leaf"), dtypes, size, where

    def structure(self) -> tuple[Any, ...]:
        """Paths below this one, and shapes: equal for a tree of weights and the slots of an optimizer."""
        return tuple((leaf.path[len(self.path) :], leaf.shape) for leaf in self.leaves)


class _Row(NamedTuple):
    """A leaf, a folded subtree, or several in a row that are like an earlier one."""

    groups: tuple[_Group, ...]
    like: str = ""

    def cells(self) -> tuple[str, ...]:
        first, *others = self.groups
        path, shape, *rest = _Group(first.path, tuple(leaf for each in self.groups for leaf in each.leaves)).cells()
        return f"{path} and {len(others)} more" if others else path, f"like {self.like}" if self.like else shape, *rest


def _fold_rows(root: _Group, limit: int | None) -> list[tuple[str, ...]]:
    """The rows of the greatest depth at which there are at most `limit`; of a tree that is too wide, both ends."""
    depths = range(1, max((len(leaf.path) for leaf in root.leaves), default=0) + 1)
    if limit is None or not depths:
        return [_Group(leaf.path, (leaf,)).cells() for leaf in root.leaves]
    rows: list[_Row] = []
    for depth in depths:
        deeper = _merge_rows(_rows_to_depth(root, depth, {}))
        if len(deeper) > limit and len(rows) > limit // 4:
            break
        rows = deeper
        if len(rows) > limit:
            break
    cells = [row.cells() for row in rows]
    if len(cells) > limit > 2:
        head, tail = cells[: limit // 2], cells[limit // 2 + 1 - limit :]
        cells = [*head, ("...", f"{len(cells) - len(head) - len(tail)} more rows", "", "", ""), *tail]
    return cells


def _rows_to_depth(group: _Group, depth: int, seen: dict[Any, str]) -> Iterator[_Row]:
    """The rows of a subtree, in which what is deeper, or like an earlier one in `seen`, is summed."""
    path = "/".join(group.path)
    like = seen.setdefault(group.structure(), path) if len(group.leaves) > 2 else path
    if group.is_leaf or like != path or len(group.path) >= depth:
        yield _Row((group,), like if like != path else "")
    else:
        for below in group.children():
            yield from _rows_to_depth(below, depth, seen)


def _merge_rows(rows: Iterable[_Row]) -> list[_Row]:
    """Rows of which more than three in succession, like the same subtree, are one."""
    merged: list[_Row] = []
    for like, run in itertools.groupby(rows, key=lambda row: row.like):
        found = list(run)
        is_long = bool(like) and len(found) > 3
        merged += [_Row(tuple(group for row in found for group in row.groups), like)] if is_long else found
    return merged


def _join(words: Iterable[str]) -> str:
    few = [word for word in dict.fromkeys(words) if word]
    return ", ".join(few[:3]) + ", ..." * (len(few) > 3)


def _node(group: _Group, name: str, text: str) -> Node:
    """The tree of a group, in which a path without branches, such as `blocks/stacked`, is one name."""
    below = [each.first_branch() for each in group.children()] if not group.is_leaf else []
    names = ["/".join(each.path[len(group.path) :]) for each in below]
    width = max(map(len, names), default=0)
    lines = align_columns([each.cells()[1:] for each in below], right=(2,))
    texts = [" " * (width - len(path)) + line for path, line in zip(names, lines, strict=True)]
    return Node(name, text, tuple(map(_node, below, names, texts)))


def _describe_leaf(path: tuple[str, ...], leaf: Any) -> Leaf:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        where = _describe_sharding(leaf) if isinstance(leaf, PartitionSpec | Sharding) else ""
        shape, name = ("None", "") if leaf is None else ("", type(leaf).__name__)
        return Leaf(path, shape, name, 0, 0, 0, where, is_array=False, is_value=leaf is not None)
    elements = math.prod(shape)
    size = elements * dtype.itemsize
    sharding = getattr(leaf, "sharding", None)
    local = size
    if isinstance(sharding, Sharding) and not isinstance(leaf, Tracer):
        local = math.prod(sharding.shard_shape(shape)) * dtype.itemsize
    return Leaf(path, str(shape), str(dtype), elements, size, local, _where(leaf, sharding))


def _where(leaf: Any, sharding: Any) -> str:
    if isinstance(leaf, Tracer):
        return "traced"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "deleted"
    if isinstance(leaf, np.ndarray | np.generic):
        return "NumPy"
    return _describe_sharding(sharding) if isinstance(sharding, Sharding) else ""


def _describe_sharding(sharding: Any) -> str:
    """Where an array is stored, in a few words; empty for the default device."""
    if isinstance(sharding, PartitionSpec):
        return f"P({', '.join(map(repr, sharding))})"
    devices = sharding.device_set
    first = next(iter(devices))
    if len(devices) == 1:
        words = "" if first == jax.devices()[0] else f"{first.platform}:{first.id}"
    elif sharding.is_fully_replicated:
        words = f"copied to {len(devices)} devices"
    else:
        is_named = isinstance(sharding, NamedSharding)
        words = _describe_sharding(sharding.spec) if is_named else f"sharded over {len(devices)} devices"
    kind = sharding.memory_kind
    in_memory = "" if kind in (None, first.default_memory().kind) else f"in {kind}"
    return " ".join(word for word in (words, in_memory) if word)
