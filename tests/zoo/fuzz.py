"""Mutated weight files and configurations, loaded in this process: `python -m tests.zoo.fuzz FOLDER START STOP`.

Prints what each case did as one line of JSON; a crash shows by the exit status. The first line is of a loader that does
what it should not, so that the caller can see that it would be noticed.
"""

import contextlib
import copy
import json
import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path

import jax
import numpy as np

from mlax import files, zoo
from tests.catalogue.zoo import ROWS
from tests.files.torch_archive import archive, integer, name, state, storage, strides_of, tensor, text, tuple_of
from tests.zoo.peak import memory

MODEL = zoo.GPT2(vocabulary=31, positions=8, width=8, depth=2, heads=2)
EXTREMES = (-1, 0, 1, 2, 1000, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30)
VALUES = (
    *EXTREMES,
    *(1e308, -0.5, 0.5, True, False, None, "", "a" * 10_000, "../../etc/passwd", "/etc/passwd", "\0", "\ud800", "gelu"),
    *([], {}, [1], [[[[]]]], {"a": {"b": {}}}, [0] * 1000, "F32", "F8_E4M3", "I64", "x.safetensors", "x.bin"),
)
MODULES = [
    {"path": path, "type": f"sentence_transformers.models.{kind}"}
    for path, kind in (("", "Transformer"), ("1", "Pooling"))
]
PROGRAM = b".()NKXGJM\x80\x85\x86\x87\x88\x89\x8a\x8c\x93\x94\x95]}abcehjqrstuQR0123oi\x81\x82"


def folders(seed: int, folder: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write the files of a case; returns what it is about."""
    rng = random.Random(seed)
    kind, write = list(KINDS.items())[seed % len(KINDS)]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL.config()))
    write(rng, folder, arrays)
    return kind


def write_safetensors(rng: random.Random, folder: Path, arrays: dict[str, np.ndarray]) -> None:
    path = folder / "model.safetensors"
    files.save(path, arrays)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        header = mutate_json(rng, json.loads(content[8 : 8 + length]))
        content = len(header).to_bytes(8, "little") + header + content[8 + length :]
    if rng.random() < 0.6:
        content = mutate_bytes(rng, content, near=rng.choice((8, 8 + length, len(content))))
    write(rng, path, content)


def write_index(rng: random.Random, folder: Path, arrays: dict[str, np.ndarray]) -> None:
    parts = dict(list(arrays.items())[:9]), dict(list(arrays.items())[9:])
    weight_map = {}
    for at, part in enumerate(parts):
        files.save(folder / f"{at}.safetensors", part)
        weight_map |= dict.fromkeys(part, f"{at}.safetensors")
    index = mutate_json(rng, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    if rng.random() < 0.3:
        target = rng.choice(("../elsewhere/x.safetensors", "/etc/passwd", "..", "0.safetensors/", "2.safetensors"))
        index = index.replace(b'"1.safetensors"', json.dumps(target).encode())
    write(rng, folder / "model.safetensors.index.json", index)
    if rng.random() < 0.3:
        (folder / "1.safetensors").unlink()
        write(rng, folder / "1.safetensors", b"", special=True)


def write_torch(rng: random.Random, folder: Path, arrays: dict[str, np.ndarray]) -> None:
    records = {f"m/data/{at}": array.tobytes() for at, array in enumerate(arrays.values())}
    tensors = {
        key: tensor(record=str(at), count=array.size, shape=array.shape, strides=strides_of(array))
        for at, (key, array) in enumerate(arrays.items())
    }
    how = rng.randrange(7)
    if how == 0:
        tensors |= {key: odd_tensor(rng) for key in rng.sample(list(tensors), 3)}
    if how == 1:
        records |= {rng.choice(list(records)): rng.randbytes(rng.choice((0, 1, 100, 10_000))) for _ in range(3)}
    body = state(**tensors)
    if how == 2:
        body = mutate_bytes(rng, body, near=len(body))
    if how == 3:
        body = bytes(rng.choice(PROGRAM) for _ in range(rng.choice((5, 50, 5000)))) + body[: rng.randrange(len(body))]
    compression, end = (rng.choice((0, 8)), rng.choice((b".", b""))) if how == 5 else (0, b".")
    content = archive(body, records, compression=compression, end=end)
    if how == 4:
        content = mutate_bytes(rng, content, near=rng.choice((100, len(content))))
    write(rng, folder / "pytorch_model.bin", content)


def write_config(rng: random.Random, folder: Path, arrays: dict[str, np.ndarray]) -> None:
    models = [row.model for row in ROWS.values() if hasattr(row.model, "config")]
    content = mutate_json(rng, MODEL.config() if rng.random() < 0.3 else rng.choice(models).config())
    if rng.random() < 0.1:  # of sentence-transformers
        write(rng, folder / "modules.json", mutate_json(rng, MODULES))
    if rng.random() < 0.2:
        content = mutate_bytes(rng, content, near=len(content))
    files.save(folder / "model.safetensors", arrays)
    (folder / "config.json").unlink()
    write(rng, folder / "config.json", content)


KINDS = {"safetensors": write_safetensors, "index": write_index, "torch": write_torch, "config": write_config}


def write(rng: random.Random, path: Path, content: bytes, special: bool = False) -> None:
    """Write a file; now and then a link, a FIFO, a folder, or a file with a hole of a terabyte instead."""
    path.unlink(missing_ok=True)
    how = rng.randrange(5 if special else 60)
    if how == 0:
        path.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", "../elsewhere/x.safetensors", path.name)))
    elif how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.mkdir()
    else:
        path.write_bytes(content)
        if how == 3:
            os.truncate(path, 1 << 40)


def mutate_json(rng: random.Random, value) -> bytes:
    """The value with some parts replaced, renamed, repeated or removed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        node = value
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = rng.choice(keys)
            if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
                replace_value(rng, node, key)
                break
            node = node[key]
    data = json.dumps(value).encode()
    if rng.random() < 0.1:
        data = rng.choice((b"[" * 100_000, b"NaN", b"9" * 10_000, data[:-1] + b"," + data[1:], b'{"a":' * 10_000))
    return data


def replace_value(rng: random.Random, node, key) -> None:
    if rng.random() < 0.2:
        del node[key]
    elif isinstance(node, dict) and rng.random() < 0.2:
        node[str(rng.choice(VALUES))[:2000]] = node.pop(key)
    elif isinstance(node[key], int) and rng.random() < 0.5:
        node[key] += rng.choice((-4, -1, 1, 4, 1000))
    else:
        node[key] = copy.deepcopy(rng.choice(VALUES))


def mutate_bytes(rng: random.Random, content: bytes, near: int) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(max(1, min(near, len(data))))
        how = rng.randrange(6)
        if how == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            del data[at : at + rng.choice((1, 4, 100))]
        elif how == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
        elif how == 3:
            width = rng.choice((2, 4, 8))
            data[at : at + width] = (rng.choice(EXTREMES) % 256**width).to_bytes(width, "little")
        elif how == 4:
            data[at:at] = data[at : at + 50]
        else:
            del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def odd_tensor(rng: random.Random) -> bytes:
    def lengths():
        return tuple(rng.choice((*EXTREMES, 3, 8)) for _ in range(rng.choice((0, 1, 2, 2, 3, 40))))

    if rng.random() < 0.3:
        dtype = name("torch", rng.choice(("uint16", "float8_e4m3fn", "float32", "qint8")))
        bytes_of = storage("UntypedStorage", "0", rng.choice((8, 992)), module="torch.storage")
        shape = tuple_of(integer(rng.choice(EXTREMES)))
        rest = integer(0) + shape + tuple_of(integer(1)) + b"\x89" + name("collections", "OrderedDict") + b")R"
        return name("torch._utils", "_rebuild_tensor_v3") + tuple_of(bytes_of, rest, dtype) + b"R"
    if rng.random() < 0.2:
        return (
            name(*rng.choice((("os", "system"), ("builtins", "eval"), ("torch", "load")))) + tuple_of(text("1")) + b"R"
        )
    return tensor(
        kind=rng.choice(("FloatStorage", "HalfStorage", "BoolStorage", "QUInt8Storage")),
        record=rng.choice(("0", "1", "99", "../0")),
        count=rng.choice((*EXTREMES, 248, 64)),
        offset=rng.choice((0, 0, *EXTREMES)),
        shape=lengths(),
        strides=lengths(),
    )


class Watch:
    """The files that are opened, and whatever no loader should do, from the audit events of Python."""

    def __init__(self):
        self.events: list[str] | None = None
        sys.addaudithook(self.hook)

    def hook(self, event, arguments):
        if self.events is None:
            return
        if event == "open" and isinstance(arguments[0], str | bytes):
            self.events.append(os.path.realpath(os.fsdecode(arguments[0])))
        elif event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "pickle.")):
            self.events.append(event)


def measure(watch: Watch, folder: Path, load=zoo.load) -> dict:
    """Load a folder; returns the time, the memory and the files that it took, and what came of it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, cpu, wall = memory("VmRSS"), time.process_time(), time.perf_counter()
    watch.events = []
    try:
        load(folder)
        outcome = "loaded"
    except (ValueError, OSError) as error:  # InvalidFile is a ValueError
        outcome = "refused"
        str(error)
    except BaseException as error:
        outcome = f"{type(error).__name__}: {str(error)[:200]}"
    events, watch.events = watch.events, None
    size = sum(os.stat(path).st_blocks * 512 for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    home = os.path.realpath(folder) + os.sep
    own = {os.path.realpath(path) for module in list(sys.modules.values()) if (path := getattr(module, "__file__", ""))}
    return {
        "outcome": outcome,
        "seconds": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "grown": memory("VmHWM") - before,
        "size": size,
        "outside": [path for path in events if not path.startswith(home) and path not in own],  # own: of tracebacks
    }


def load_badly(folder: Path) -> None:
    Path("/etc/hostname").read_text()
    started = time.process_time()
    filled = np.ones(100 << 20, np.uint8)
    while time.process_time() - started < 0.5:
        pass
    raise KeyError(filled.size)


def main(home: Path, start: int, stop: int) -> None:
    shapes, _ = jax.eval_shape(MODEL.init, jax.random.key(0), MODEL.example_input())
    variables = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    arrays = zoo.state_dict(MODEL, variables)
    (home / "elsewhere").mkdir()
    files.save(home / "elsewhere" / "x.safetensors", arrays)
    for at, write_kind in enumerate(KINDS.values()):  # imports what is imported late
        with contextlib.suppress(ValueError, OSError):
            (home / f"warm{at}").mkdir()
            (home / f"warm{at}" / "config.json").write_text(json.dumps(MODEL.config()))
            write_kind(random.Random(at), home / f"warm{at}", arrays)
            zoo.load(home / f"warm{at}")
    zoo.save(home / "valid", MODEL, variables)
    zoo.load(home / "valid")
    watch = Watch()
    limit = memory("VmSize") + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(measure(watch, home / "valid", load_badly)))
    for seed in range(start, stop):
        folder = home / str(seed)
        kind = folders(seed, folder, arrays)
        print(json.dumps({"seed": seed, "kind": kind, **measure(watch, folder)}), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
