"""The variables of a model made straight in their places."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from mlax._jax import name_hash, named_key
from mlax.core import (
    Composite,
    Layer,
    Map,
    Repeat,
    Tree,
    Wrapper,
    error_scope,
    find_layers,
    flatten_paths,
    part_inputs,
    parts_of,
    replace_leaves,
    shape_dtypes,
    unflatten_paths,
)
from mlax.place._rules import host, memory_kind
from mlax.place._stream import Stream


class InitSignature(NamedTuple):
    """What tells apart the programs that make variables."""

    layer: Layer
    times: tuple[int, ...]  # of each Repeat around it, the outermost first
    inputs: tuple[Any, ...]  # shapes and dtypes
    structure: Any  # of the inputs
    places: tuple[Sharding, ...]
    trees: Any  # the structure of the places


class PartInit(NamedTuple):
    """A part whose variables one program makes."""

    names: tuple[tuple[str, ...], ...]  # of its path: those before the first Repeat, then those within it, and so on
    kind: InitSignature

    @property
    def path(self) -> str:
        """Where its variables go."""
        return "/".join(name for names in self.names for name in names)


def init_sharded(layer: Layer, rng: jax.Array, x: Any, shardings: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """What `layer.init(rng, x)` makes, bit by bit, each array where its sharding says.

    Each kind of part is compiled once, whatever the number of parts of that kind, and all kinds at the same time.
    """
    pieces = list(_collect_parts(layer, ((),), (), x, shardings))
    if not pieces:
        return None, None
    keys, starts = _keys(rng, pieces)
    _compile([piece for piece in pieces if not _is_streamed(piece)], keys, x)
    made: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for piece, start in zip(pieces, starts, strict=True):
        with error_scope(piece.path, x):
            variables = _init_streamed(piece, rng) if _is_streamed(piece) else _program(piece.kind).run(keys, start)
        for leaves, tree in zip(made, variables, strict=True):
            leaves |= {"/".join(filter(None, (piece.path, name))): leaf for name, leaf in flatten_paths(tree).items()}
    return unflatten_paths(made[0].items()), unflatten_paths(made[1].items())


def with_memory_kinds(model: Layer, variables: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """The shapes of a model's variables, those that are streamed marked as lying in host memory."""
    device = jax.local_devices()[0]
    there = SingleDeviceSharding(device, memory_kind=memory_kind(host, device))
    paths = [path for path, _ in find_layers(model, Stream)]

    def marked(path: str, leaf: Any) -> Any:
        streamed = any(not each or path.startswith(f"{each}/") for each in paths)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there) if streamed else leaf

    leaves = {path: marked(path, leaf) for path, leaf in flatten_paths(variables[0]).items()}
    return replace_leaves(variables[0], leaves), variables[1]


def _collect_parts(
    layer: Layer, names: tuple[tuple[str, ...], ...], times: tuple[int, ...], x: Any, shardings: tuple[Tree, Tree]
) -> Iterator[PartInit]:
    if isinstance(layer, Wrapper) and type(layer).init is Wrapper.init:
        yield from _collect_parts(layer.layer, names, times, x, shardings)
    elif isinstance(layer, Repeat):
        yield from _collect_parts(layer.layer, (*names, ()), (*times, layer.times), x, shardings)
    elif isinstance(layer, Map) and layer.variables == 0:
        size, inner = layer.slices(x)
        yield from _collect_parts(layer.layer, (*names, ()), (*times, size), inner, shardings)
    elif isinstance(layer, Composite) and type(layer).init is Composite.init:
        layer, inputs = layer.sized(x), part_inputs(layer, x)
        for name, part in parts_of(layer).items():
            own = (shardings[0] or {}).get(name), (shardings[1] or {}).get(name)
            yield from _collect_parts(part, (*names[:-1], (*names[-1], name)), times, inputs[name], own)
    elif places := jax.tree.leaves(shardings):
        leaves, structure = jax.tree.flatten(shape_dtypes(x))
        inputs = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        yield PartInit(
            names, InitSignature(layer, times, inputs, structure, tuple(places), jax.tree.structure(shardings))
        )


def _keys(rng: jax.Array, pieces: Sequence[PartInit]) -> tuple[jax.Array, list[int]]:
    """The keys of all pieces in a row, of each time for those within a Repeat, and where those of each begin.

    They are folded in a program of their own: within each draw they would take XLA longer to compile than the draw.
    """
    folded = [_fold_data(piece) for piece in pieces]
    lengths = np.repeat([rows.shape[1] for rows in folded], [len(rows) for rows in folded])
    depth = max(lengths, default=0)
    salts = np.concatenate([np.pad(rows, ((0, 0), (0, depth - rows.shape[1]))) for rows in folded])
    starts = np.cumsum([0, *(len(rows) for rows in folded)])
    return _fold_keys(rng, salts, np.arange(depth) < lengths[:, None]), starts[:-1].tolist()


@jax.jit
def _fold_keys(rng: jax.Array, salts: jax.Array, counts: jax.Array) -> jax.Array:
    def fold(key: jax.Array, own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        salt, count = own
        return jnp.where(count, jax.random.fold_in(key, salt), key), None

    return jax.vmap(lambda *own: lax.scan(fold, rng, own)[0])(salts, counts)


def _fold_data(piece: PartInit) -> np.ndarray:
    """What is folded into the key for each time of a piece: (times, depth), the names of its path and the times."""
    kind = piece.kind
    times = np.indices(kind.times, np.uint32).reshape(len(kind.times), math.prod(kind.times))
    columns = []
    for names, *time in itertools.zip_longest(piece.names, times):
        columns += [np.full(times.shape[1], name_hash(name)) for name in names] + [
            each for each in time if each is not None
        ]
    return np.array(columns, np.uint32).reshape(-1, times.shape[1]).T


class InitProgram:
    """The `init` of one kind of part, as a function of the keys of all pieces and of where its own begin."""

    def __init__(self, kind: InitSignature):
        init: Any = functools.partial(kind.layer.init, x=_inputs(kind))
        for _ in kind.times:
            init = jax.vmap(init)

        def made(keys: jax.Array, start: jax.Array) -> tuple[Tree, Tree]:
            own = lax.dynamic_slice_in_dim(keys, start, math.prod(kind.times))
            return init(own.reshape(*kind.times, *keys.shape[1:]))

        self.run = jax.jit(made, out_shardings=jax.tree.unflatten(kind.trees, kind.places))
        self.is_compiled = False


@functools.lru_cache(maxsize=1024)
def _program(kind: InitSignature) -> InitProgram:
    return InitProgram(kind)


def _compile(pieces: Sequence[PartInit], keys: jax.Array, x: Any) -> None:
    """Compile what is new: tracing is Python's and takes turns, then XLA compiles all at the same time."""
    lowered = []
    for piece in pieces:
        program = _program(piece.kind)
        if not program.is_compiled:
            with error_scope(piece.path, x):
                lowered.append(program.run.lower(keys, 0))
            program.is_compiled = True
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: each.compile(), lowered))  # where `run` finds them


def _inputs(kind: InitSignature) -> Any:
    return jax.tree.unflatten(kind.structure, [jax.ShapeDtypeStruct(*leaf) for leaf in kind.inputs])


def _is_streamed(piece: PartInit) -> bool:
    """Whether it is made layer by layer, since all of it might not fit on its device."""
    kind = piece.kind
    return isinstance(kind.layer, Stream) and not kind.times and all(len(each.device_set) == 1 for each in kind.places)


def _init_streamed(piece: PartInit, rng: jax.Array) -> tuple[Tree, Tree]:
    kind = piece.kind
    (device,) = kind.places[0].device_set
    with jax.default_device(device):
        own = functools.reduce(named_key, piece.names[0], rng)
        return jax.device_put(kind.layer.init(own, _inputs(kind)), jax.tree.unflatten(kind.trees, kind.places))
