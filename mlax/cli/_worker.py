"""One process of `mlax launch`: connects to the others, runs the script, and exits so that none of them hangs.

python -m mlax.cli._worker '{"index": 0, "count": 2, "port": 5000, ...}' script.py [options]
"""

import ctypes
import faulthandler
import io
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from mlax._supervision import TERMINATED
from mlax.cli._script import enable_compilation_cache, run_script

_PR_SET_PDEATHSIG = 1


def main(task: dict[str, Any], script: str, args: list[str]) -> int:
    """Run the script as process `index` of `count`; returns the exit status."""
    _terminate_with(task["supervisor"])
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(_UnbrokenPipe(number, "w"), encoding="utf-8", errors="replace", write_through=True)
        for number in (1, 2)
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the supervisor if a process hangs
    sys.orig_argv[:] = task["command"]  # what the user typed, for messages that say how to resume
    enable_compilation_cache()
    import jax

    index, devices = task["index"], task["devices"]
    if devices is not None:
        jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(
        f"localhost:{task['port']}",
        task["count"],
        index,
        local_device_ids=None if devices is None else list(range(index * devices, (index + 1) * devices)),
        heartbeat_timeout_seconds=task["heartbeat_timeout"],
        shutdown_timeout_seconds=60,
    )
    status = 0
    try:
        run_script(script, args)
    except SystemExit as exit:
        status = _exit_status(exit)
    except BaseException:
        traceback.print_exc()
        _exit_now(1)
    if status not in (0, TERMINATED):
        _exit_now(status)
    jax.distributed.shutdown()  # waits for the others, which may still be writing
    return status


class _UnbrokenPipe(io.FileIO):
    """A pipe that drops output once the supervisor has gone, since this process may still have to save."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return memoryview(data).nbytes


def _exit_now(status: int) -> NoReturn:
    """Exit without cleanup, which would wait for processes that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _exit_status(exit: SystemExit) -> int:
    if exit.code is None or isinstance(exit.code, int):
        return exit.code or 0
    print(exit.code, file=sys.stderr)
    return 1


def _terminate_with(supervisor: int) -> None:
    """Have SIGTERM sent to this process when the supervisor dies; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            _exit_now(TERMINATED)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]))
