"""The variables of a model made straight in their places."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from mlax.core import Composite, Layer, Map, Repeat, Tree, Wrapper, layers
from mlax.core._composite import part_inputs
from mlax.core._keys import named_key, salt
from mlax.core._layer import structs
from mlax.core._notes import located
from mlax.core._parts import parts_of
from mlax.core._paths import filled_in, flat, nested
from mlax.place._stream import Stream
from mlax.place._where import host, memory_kind


class Kind(NamedTuple):
    """What tells apart the programs that make variables."""

    layer: Layer
    times: tuple[int, ...]  # of each Repeat around it, the outermost first
    inputs: tuple[Any, ...]  # shapes and dtypes
    structure: Any  # of the inputs
    places: tuple[Sharding, ...]
    trees: Any  # the structure of the places


class Piece(NamedTuple):
    """A part whose variables one program makes."""

    names: tuple[tuple[str, ...], ...]  # of its path: those before the first Repeat, then those within it, and so on
    kind: Kind

    @property
    def path(self) -> str:
        """Where its variables go."""
        return "/".join(name for names in self.names for name in names)


def init_in(layer: Layer, rng: jax.Array, x: Any, shardings: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """What `layer.init(rng, x)` makes, bit by bit, each array where its sharding says.

    Each kind of part is compiled once, whatever the number of parts of that kind.
    """
    made: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for piece in _pieces(layer, ((),), (), x, shardings):
        with located(piece.path, x):
            variables = _streamed(piece, rng) if _is_streamed(piece) else _program(piece.kind)(rng, _salts(piece))
        for leaves, tree in zip(made, variables, strict=True):
            leaves |= {"/".join(filter(None, (piece.path, name))): leaf for name, leaf in flat(tree).items()}
    return nested(made[0].items()), nested(made[1].items())


def in_their_memory(model: Layer, variables: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """The shapes of a model's variables, those that are streamed marked as lying in host memory."""
    device = jax.local_devices()[0]
    there = SingleDeviceSharding(device, memory_kind=memory_kind(host, device))
    paths = [path for path, layer in {"": model, **layers(model)}.items() if isinstance(layer, Stream)]

    def marked(path: str, leaf: Any) -> Any:
        streamed = any(not each or path.startswith(f"{each}/") for each in paths)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there) if streamed else leaf

    leaves = {path: marked(path, leaf) for path, leaf in flat(variables[0]).items()}
    return filled_in(variables[0], leaves), variables[1]


def _pieces(
    layer: Layer, names: tuple[tuple[str, ...], ...], times: tuple[int, ...], x: Any, shardings: tuple[Tree, Tree]
) -> Iterator[Piece]:
    if isinstance(layer, Wrapper) and type(layer).init is Wrapper.init:
        yield from _pieces(layer.layer, names, times, x, shardings)
    elif isinstance(layer, Repeat):
        yield from _pieces(layer.layer, (*names, ()), (*times, layer.times), x, shardings)
    elif isinstance(layer, Map) and layer.variables == 0:
        size, inner = layer.slices(x)
        yield from _pieces(layer.layer, (*names, ()), (*times, size), inner, shardings)
    elif isinstance(layer, Composite) and type(layer).init is Composite.init:
        layer, inputs = layer.sized(x), part_inputs(layer, x)
        for name, part in parts_of(layer).items():
            own = (shardings[0] or {}).get(name), (shardings[1] or {}).get(name)
            yield from _pieces(part, (*names[:-1], (*names[-1], name)), times, inputs[name], own)
    elif places := jax.tree.leaves(shardings):
        leaves, structure = jax.tree.flatten(structs(x))
        inputs = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        yield Piece(names, Kind(layer, times, inputs, structure, tuple(places), jax.tree.structure(shardings)))


@functools.lru_cache(maxsize=1024)
def _program(kind: Kind) -> Any:
    """The compiled `init` of one kind of part, as a function of the key and of the names in the part's path."""
    x = _inputs(kind)

    def made(rng: jax.Array, salts: list[jax.Array], times: tuple[int, ...] = kind.times) -> tuple[Tree, Tree]:
        for each in salts[0]:
            rng = jax.random.fold_in(rng, each)
        if not times:
            return kind.layer.init(rng, x)

        def one(time: jax.Array) -> tuple[Tree, Tree]:
            return made(jax.random.fold_in(rng, time), salts[1:], times[1:])

        return jax.vmap(one)(jnp.arange(times[0], dtype=np.uint32))

    return jax.jit(made, out_shardings=jax.tree.unflatten(kind.trees, kind.places))


def _salts(piece: Piece) -> list[np.ndarray]:
    return [np.array([salt(name) for name in names], np.uint32) for names in piece.names]


def _inputs(kind: Kind) -> Any:
    return jax.tree.unflatten(kind.structure, [jax.ShapeDtypeStruct(*leaf) for leaf in kind.inputs])


def _is_streamed(piece: Piece) -> bool:
    """Whether it is made layer by layer, since all of it might not fit on its device."""
    return isinstance(piece.kind.layer, Stream) and all(len(place.device_set) == 1 for place in piece.kind.places)


def _streamed(piece: Piece, rng: jax.Array) -> tuple[Tree, Tree]:
    kind = piece.kind
    (device,) = kind.places[0].device_set
    with jax.default_device(device):
        own = functools.reduce(named_key, piece.names[0], rng)
        return jax.device_put(kind.layer.init(own, _inputs(kind)), jax.tree.unflatten(kind.trees, kind.places))
