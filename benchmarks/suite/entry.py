"""One library doing one work, in a process of its own: build, compile, measure, the last two in their turn.

    python -m benchmarks.suite.entry WORK ENTRY [--tiny]

It prints lines of JSON: when it has built the program, after the first call, when it has compiled and warmed up, after
each repetition, and with what it measured. It compiles when it reads a line, runs a repetition for each line "repeat",
and reports at "end": nothing else may use the device meanwhile, since compilers time kernels to choose among them.
"""

import argparse
import importlib
import io
import json
import os
import sys
import time
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.suite.rows import about
from benchmarks.suite.works import MODULES, WORKS, Entry, Work, shrink

WARM_UP = 3


def main(name: str, entry_name: str, tiny: bool) -> None:
    work = next(work for work in WORKS if work.name == name)
    entry = next(entry for entry in work.entries if entry.name == entry_name)
    if tiny:
        work = shrink(work)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries and compilers print, too
    run(work, entry, "float32" if tiny else "bfloat16", out)


def run(work: Work, entry: Entry, dtype: str, out: Any) -> None:
    library = importlib.import_module(f"benchmarks.suite.{MODULES[entry.library]}")
    call = getattr(library, work.program)(work.size, dtype=dtype, **entry.options)
    say(out, state="built")
    if not sys.stdin.readline():  # whoever asked has died
        return
    values = [to_list(library.wait(call()))]
    say(out, state="first")
    values += [to_list(library.wait(call())) for _ in range(WARM_UP - 1 if not work.alone else 0)]
    say(out, state="ready")
    times = []
    for line in sys.stdin:
        if line.strip() == "end":
            break
        times.append(time_calls(library, call, work.calls))
        say(out, state="repeated")
    else:
        return
    say(
        out,
        state="done",
        values=values,
        times=times[1:],  # see Work.turns
        memory=library.peak_memory(),
        about=about(entry.library),
    )


def time_calls(library: Any, call: Any, number: int) -> float:
    """The seconds of a call, over `number` of them, after some since another process has had its turn."""
    for _ in range(-(-number // 5)):
        result = call()
    library.wait(result)
    start = time.perf_counter()
    for _ in range(number):
        result = call()
    library.wait(result)
    return (time.perf_counter() - start) / number


def to_list(value: Any) -> Any:
    """The loss of a call or of its last step; or the first tokens and a checksum of all."""
    value = value["loss"] if isinstance(value, Mapping) else value
    value = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    if value.ndim < 2:
        return float(value.reshape(-1)[-1])
    return [*value[0, :4].tolist(), zlib.crc32(value.astype(np.int64).tobytes())]


def say(out: io.TextIOBase, **values: Any) -> None:
    print(json.dumps(values), file=out, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("entry")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    main(arguments.work, arguments.entry, arguments.tiny)
