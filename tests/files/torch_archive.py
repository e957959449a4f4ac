"""Archives like those of torch.save, and pickles written instruction by instruction, so that any can be wrong."""

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def archive(body: bytes | None, records: Mapping[str, bytes] | None = None, *, compression=0, end=b".") -> bytes:
    """A zip archive with a pickle, unless it is None, and other members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as target:
        if body is not None:
            target.writestr("m/data.pkl", b"\x80\x02" + body + end)
        for member, content in (records or {}).items():
            target.writestr(member, content)
    return file.getvalue()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def integer(value: int) -> bytes:
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def by_name(key: str, value: bytes) -> bytes:
    return b"}" + text(key) + value + b"s"


def state(**values: bytes) -> bytes:
    """A dict of values."""
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"u"


def storage(kind: str, record: str, count: int, module: str = "torch") -> bytes:
    return tuple_of(text("storage"), name(module, kind), text(record), text("cpu"), integer(count)) + b"Q"


def tensor(*, kind="FloatStorage", record="0", count=1, offset=0, shape=(1,), strides=(1,)) -> bytes:
    """A tensor, by default of one float32."""
    lengths = [each if isinstance(each, bytes) else tuple_of(*map(integer, each)) for each in (shape, strides)]
    hooks = name("collections", "OrderedDict") + b")R"
    arguments = tuple_of(storage(kind, record, count), integer(offset), *lengths, b"\x89", hooks)
    return name("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


STORAGES = {"float32": "FloatStorage", "int64": "LongStorage"}


def write_torch(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file like that of torch.save."""
    tensors = {
        key: tensor(
            kind=STORAGES[array.dtype.name],
            record=str(at),
            count=array.size,
            shape=array.shape,
            strides=strides_of(array),
        )
        for at, (key, array) in enumerate(arrays.items())
    }
    path.write_bytes(
        archive(state(**tensors), {f"m/data/{at}": each.tobytes() for at, each in enumerate(arrays.values())})
    )


def strides_of(array: np.ndarray) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
