"""Kernels in Pallas as exported programs, which are kept beside the persistent compilation cache.

Pallas takes most of the time in which Python traces and lowers a step for a GPU: docs/design/cold-start.md.
"""

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from mlax.ops._records import Record, find_record, hash_files

F = TypeVar("F", bound=Callable[..., Any])
PLATFORM = "cuda"
DIGEST = 32  # bytes before a program: one with a wrong bit might run, and compute something else


def exported(kernel: F) -> F:
    """A kernel of arrays by position and options by keyword, traced and lowered by the first process that calls it.

    With a persistent compilation cache the next one reads its program; without, it is traced where it is called.
    """

    @functools.wraps(kernel)
    def call(*arrays: Any, **options: Any) -> Any:
        record = find_kernel_record(kernel, arrays, options)
        if record is None:
            return kernel(*arrays, **options)
        importlib.import_module("jax.experimental.mosaic.gpu")  # it tells XLA where the library of kernels is
        return call_program(kernel, arrays, options, record)

    return call  # pyright: ignore[reportReturnType]


def find_kernel_record(kernel: Callable[..., Any], arrays: Any, options: Mapping[str, Any]) -> Record | None:
    """Where the program of `kernel(*arrays, **options)` is kept; None without a persistent compilation cache."""
    shapes, tree = _describe(arrays)
    subject = kernel.__qualname__, repr(shapes), str(tree), repr(sorted(options.items()))
    return find_record("kernel", *subject, _hash_sources())


def call_program(
    kernel: Callable[..., Any], arrays: Any, options: Mapping[str, Any], record: Record | None, *custom_calls: str
) -> Any:
    """`kernel(*arrays, **options)` by its exported program, from the record, if there is one that has it.

    `custom_calls` are targets in it that `jax.export` would refuse.
    """
    program = _read_or_export(kernel, *_describe(arrays), tuple(options.items()), record, custom_calls)
    return program.call(*jax.tree.leaves(arrays))


@functools.lru_cache(maxsize=1024)
def _read_or_export(
    kernel: Any, shapes: Any, tree: Any, options: Any, record: Record | None, custom_calls: tuple[str, ...]
) -> Any:
    from jax import export

    def call(*leaves: Any) -> Any:
        return kernel(*jax.tree.unflatten(tree, leaves), **dict(options))

    program = None if record is None else _read(record)
    if program is None:
        checks = list(map(export.DisabledSafetyCheck.custom_call, custom_calls))
        program = export.export(jax.jit(call), platforms=[PLATFORM], disabled_checks=checks)(*shapes)
        if record is not None:
            _write(record, program)
    return program


def _read(record: Record) -> Any | None:
    content = record.read() or b""
    digest, data = content[:DIGEST], content[DIGEST:]
    with contextlib.suppress(Exception):  # by another version of flatbuffers, say: it is exported again
        if digest == hashlib.sha256(data).digest():
            from jax import export

            return export.deserialize(bytearray(data))
    return None


def _write(record: Record, program: Any) -> None:
    with contextlib.suppress(Exception):  # nothing that is only kept may stop a run
        data = bytes(program.serialize())
        record.write(hashlib.sha256(data).digest() + data)


def _describe(arrays: Any) -> tuple[Any, Any]:
    """The shapes and dtypes of the leaves of arguments, and their tree."""
    leaves, tree = jax.tree.flatten(arrays)
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves), tree


@functools.cache
def _hash_sources() -> str | None:
    return hash_files(*sorted(Path(__file__).parent.glob("*.py")))
