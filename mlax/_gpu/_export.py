"""Kernels in Pallas as programs of `jax.export`, which are kept beside the persistent compilation cache.

Pallas takes most of the time in which Python traces and lowers a step for a GPU: docs/design/cold-start.md.
"""

import contextlib
import functools
import hashlib
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from mlax._gpu._records import Record, find_record, hash_files

PLATFORM = "cuda"
PLAIN = (bool, int, float, str, type(None))  # types of options whose text tells all of them
CONFIG = ("jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_pallas_enable_debug_checks")
DIGEST_SIZE = 32  # bytes before a program: one with a wrong bit might run, and compute something else
# hashed on import: the files may be edited before a kernel is first called
SOURCES = hash_files(*sorted(Path(__file__).parent.glob("*.py")))

F = TypeVar("F", bound=Callable[..., Any])


def exported(kernel: F) -> F:
    """`kernel`, called as a program of `jax.export` that is kept beside the persistent compilation cache.

    `kernel` is a function of a module, of arrays by position and plain values by keyword. The first process that calls
    it traces and lowers it, and the next one reads its program. Without such a cache, over a mesh, or where
    `jax.export` refuses, it is traced where it is called. The constants of all modules with kernels are part of the
    cache key, so that a tuning script may set them; their functions are not, and must not be patched.
    """

    @functools.wraps(kernel)
    def call(*arrays: Any, **options: Any) -> Any:
        program = None
        with contextlib.suppress(Exception):  # an error of the kernel itself is raised again below
            described = KernelCall.describe(kernel, arrays, options)
            record = described.find_record()
            program = None if record is None else read_or_export(described, record)
        if program is None:
            return kernel(*arrays, **options)
        # it sets MOSAIC_GPU_RUNTIME_LIB_PATH, by which XLA finds the library that kernels are linked with
        importlib.import_module("jax.experimental.mosaic.gpu")
        return program.call(*jax.tree.leaves(arrays))

    return call  # pyright: ignore[reportReturnType]


class KernelCall(NamedTuple):
    """What the program of a call of a kernel depends on, besides the device and the versions."""

    kernel: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of the leaves of the arrays
    tree: Any
    options: tuple[tuple[str, Any], ...]
    key: tuple[str, ...]  # all of the above, JAX's options and the constants of modules with kernels, as text
    context: tuple[Any, ...]  # of tracing

    @classmethod
    def describe(cls, kernel: Callable[..., Any], arrays: Any, options: Mapping[str, Any]) -> "KernelCall":
        leaves, tree = jax.tree.flatten(arrays)
        types = map(jax.typeof, leaves)
        shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type) for each in types)
        config: Any = jax.config
        name, chosen = f"{kernel.__module__}.{kernel.__qualname__}", [getattr(config, each, None) for each in CONFIG]
        items = tuple(sorted(options.items()))
        key = name, repr(shapes), str(tree), repr(items), repr(chosen), _describe_constants(kernel.__module__)
        return cls(kernel, shapes, tree, items, key, (config.jax_enable_x64, jax.sharding.get_abstract_mesh()))

    def find_record(self) -> Record | None:
        """Where its program is kept; None if it is kept nowhere, or if its key would not tell all of it."""
        _, mesh = self.context
        if not mesh.empty or not all(type(value) in PLAIN for _, value in self.options):
            return None
        return find_record("kernel", *self.key, SOURCES)

    def run(self, *leaves: Any) -> Any:
        return self.kernel(*jax.tree.unflatten(self.tree, leaves), **dict(self.options))


@functools.lru_cache(maxsize=1024)
def read_or_export(call: KernelCall, record: Record | None, *custom_calls: str) -> Any:
    """The program of a call, from its record, or exported and written there.

    `custom_calls` are targets in it that `jax.export` would refuse.
    """
    from jax import export

    program = None if record is None else _read(record)
    if program is None:
        checks = list(map(export.DisabledSafetyCheck.custom_call, custom_calls))
        program = export.export(jax.jit(call.run), platforms=[PLATFORM], disabled_checks=checks)(*call.shapes)
        if record is not None:
            _write(record, program)
    return program


def _read(record: Record) -> Any | None:
    content = record.read() or b""
    digest, data = content[:DIGEST_SIZE], content[DIGEST_SIZE:]
    with contextlib.suppress(Exception):  # written by another version of flatbuffers, say: it is exported again
        if digest == hashlib.sha256(data).digest():
            from jax import export

            return export.deserialize(bytearray(data))
    return None


def _write(record: Record, program: Any) -> None:
    with contextlib.suppress(Exception):  # nothing that is only kept may stop a run
        data = bytes(program.serialize())
        record.write(hashlib.sha256(data).digest() + data)


def _describe_constants(module: str) -> str:
    """The constants of a kernel's module and of those of this package, as text."""
    package = f"{__name__.rpartition('.')[0]}."
    modules = sorted(name for name in sys.modules if name == module or name.startswith(package))
    values = [(module, *item) for module in modules for item in vars(sys.modules[module]).items()]
    return repr([(module, name, value) for module, name, value in values if name.isupper() and _is_plain(value)])


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in PLAIN
