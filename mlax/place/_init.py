"""The variables of a model, created sharded."""

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
    STACKED,
    Composite,
    Layer,
    Map,
    Repeat,
    Tree,
    Wrapper,
    error_scope,
    find_layers,
    flatten_paths,
    get_stack,
    part_inputs,
    parts_of,
    replace_leaves,
    shape_dtypes,
    split_parts,
    unflatten_paths,
)
from mlax.place._rules import host, memory_kind
from mlax.place._stream import Stream


class InitSignature(NamedTuple):
    """What determines the program that initializes a part; equal parts of a model share one compilation."""

    layer: Layer
    times: tuple[int, ...]  # of each Repeat or Map around it, the outermost first
    inputs: tuple[Any, ...]  # shapes and dtypes
    input_structure: Any
    shardings: tuple[Sharding, ...]
    structure: Any  # of the variables


class PartInit(NamedTuple):
    """A part whose variables one program creates."""

    names: tuple[tuple[str, ...], ...]  # of its path: those before the first Repeat, those within it, and so on
    signature: InitSignature

    @property
    def path(self) -> str:
        """The path of the part."""
        outer, *inner = self.names
        return "/".join([*outer, *(name for names in inner for name in (STACKED, *names))])


def init_sharded(layer: Layer, rng: jax.Array, x: Any, shardings: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """The variables of `layer.init(rng, x)`, bitwise equal, each created with its sharding.

    Each distinct part is compiled once, and all of them are compiled in parallel.
    """
    parts = list(_collect_parts(layer, ((),), (), x, shardings))
    if not parts:
        return None, None
    keys, starts = _part_keys(rng, parts)
    _compile_parts([part for part in parts if not _is_streamed(part)], keys, x)
    created: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for part, start in zip(parts, starts, strict=True):
        with error_scope(part.path, x):
            streamed = _is_streamed(part)
            variables = _init_streamed(part, rng) if streamed else _init_program(part.signature).run(keys, start)
        for leaves, tree in zip(created, variables, strict=True):
            leaves |= {"/".join(filter(None, (part.path, name))): leaf for name, leaf in flatten_paths(tree).items()}
    return unflatten_paths(created[0].items()), unflatten_paths(created[1].items())


def with_memory_kinds(model: Layer, variables: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """The shapes of a model's variables, with those that are streamed marked as in host memory."""
    device = jax.local_devices()[0]
    in_host = SingleDeviceSharding(device, memory_kind=memory_kind(host, device))
    streams = [path for path, _ in find_layers(model, Stream)]

    def mark(path: str, leaf: Any) -> Any:
        streamed = any(not stream or path.startswith(f"{stream}/") for stream in streams)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_host) if streamed else leaf

    leaves = {path: mark(path, leaf) for path, leaf in flatten_paths(variables[0]).items()}
    return replace_leaves(variables[0], leaves), variables[1]


def _collect_parts(
    layer: Layer, names: tuple[tuple[str, ...], ...], times: tuple[int, ...], x: Any, shardings: tuple[Tree, Tree]
) -> Iterator[PartInit]:
    """The parts of a layer that create their own variables: all but those that only pass on what their parts create."""
    if isinstance(layer, Wrapper) and type(layer).init is Wrapper.init:
        yield from _collect_parts(layer.layer, names, times, x, shardings)
    elif isinstance(layer, Repeat):
        below = get_stack(shardings[0]), get_stack(shardings[1])
        yield from _collect_parts(layer.layer, (*names, ()), (*times, layer.times), x, below)
    elif isinstance(layer, Map) and layer.has_stack:
        below = get_stack(shardings[0]), get_stack(shardings[1])
        size, inner = layer.slices(x)
        yield from _collect_parts(layer.layer, (*names, ()), (*times, size), inner, below)
    elif isinstance(layer, Composite) and type(layer).init is Composite.init:
        layer, inputs = layer.infer_sizes(x), part_inputs(layer, x)
        own = [split_parts(layer, tree) for tree in shardings]
        for name, part in parts_of(layer).items():
            each = own[0].get(name), own[1].get(name)
            yield from _collect_parts(part, (*names[:-1], (*names[-1], name)), times, inputs[name], each)
    elif leaves := jax.tree.leaves(shardings):
        shapes, input_structure = jax.tree.flatten(shape_dtypes(x))
        inputs = tuple((leaf.shape, leaf.dtype) for leaf in shapes)
        structure = jax.tree.structure(shardings)
        yield PartInit(names, InitSignature(layer, times, inputs, input_structure, tuple(leaves), structure))


def _part_keys(rng: jax.Array, parts: Sequence[PartInit]) -> tuple[jax.Array, list[int]]:
    """The keys of all parts in one array, one for each repetition of a part, and the index of each part's first key.

    They are folded in a separate program: within each initializer they would take XLA longer to compile than the rest.
    """
    rows = [_fold_data(part) for part in parts]
    depths = np.repeat([each.shape[1] for each in rows], [len(each) for each in rows])
    depth = max(depths, default=0)
    data = np.concatenate([np.pad(each, ((0, 0), (0, depth - each.shape[1]))) for each in rows])
    starts = np.cumsum([0, *(len(each) for each in rows)])
    return _fold_keys(rng, data, np.arange(depth) < depths[:, None]), starts[:-1].tolist()


@jax.jit
def _fold_keys(rng: jax.Array, data: jax.Array, used: jax.Array) -> jax.Array:
    def fold(key: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        datum, is_used = xs
        return jnp.where(is_used, jax.random.fold_in(key, datum), key), None

    return jax.vmap(lambda *xs: lax.scan(fold, rng, xs)[0])(data, used)


def _fold_data(part: PartInit) -> np.ndarray:
    """What is folded into the key of each repetition: (repetitions, depth), hashes of names and indices in turn."""
    times = part.signature.times
    indices = np.indices(times, np.uint32).reshape(len(times), math.prod(times))
    columns = []
    for names, *index in itertools.zip_longest(part.names, indices):
        columns += [np.full(indices.shape[1], name_hash(name)) for name in names]
        columns += [each for each in index if each is not None]
    return np.array(columns, np.uint32).reshape(-1, indices.shape[1]).T


class InitProgram:
    """The `init` of a part, as a jitted function of the keys of all parts and the index of its own first key."""

    def __init__(self, signature: InitSignature):
        init: Any = functools.partial(signature.layer.init, x=_inputs(signature))
        for _ in signature.times:
            init = jax.vmap(init)

        def run(keys: jax.Array, start: jax.Array) -> tuple[Tree, Tree]:
            own = lax.dynamic_slice_in_dim(keys, start, math.prod(signature.times))
            return init(own.reshape(*signature.times, *keys.shape[1:]))

        self.run = jax.jit(run, out_shardings=jax.tree.unflatten(signature.structure, signature.shardings))
        self.is_compiled = False


@functools.lru_cache(maxsize=1024)
def _init_program(signature: InitSignature) -> InitProgram:
    return InitProgram(signature)


def _compile_parts(parts: Sequence[PartInit], keys: jax.Array, x: Any) -> None:
    """Compile the programs that are not compiled yet: trace one after another, for the GIL, then compile in threads."""
    lowered = []
    for part in parts:
        program = _init_program(part.signature)
        if not program.is_compiled:
            with error_scope(part.path, x):
                lowered.append(program.run.lower(keys, 0))
            program.is_compiled = True
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: each.compile(), lowered))  # into the cache that `run` reads


def _inputs(signature: InitSignature) -> Any:
    shapes = [jax.ShapeDtypeStruct(*leaf) for leaf in signature.inputs]
    return jax.tree.unflatten(signature.input_structure, shapes)


def _is_streamed(part: PartInit) -> bool:
    """Whether a part is initialized layer by layer, since all of it might not fit on its device."""
    layer, times, shardings = part.signature.layer, part.signature.times, part.signature.shardings
    return isinstance(layer, Stream) and not times and all(len(each.device_set) == 1 for each in shardings)


def _init_streamed(part: PartInit, rng: jax.Array) -> tuple[Tree, Tree]:
    signature = part.signature
    (device,) = signature.shardings[0].device_set
    with jax.default_device(device):
        key = functools.reduce(named_key, part.names[0], rng)
        variables = signature.layer.init(key, _inputs(signature))
        return jax.device_put(variables, jax.tree.unflatten(signature.structure, signature.shardings))
