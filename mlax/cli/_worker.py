"""One process of `mlax launch`: connects to the others, runs the script, and exits so that none of them hangs."""

import ctypes
import faulthandler
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from mlax._compilation_cache import enable_compilation_cache
from mlax._malloc import keep_freed_memory
from mlax._supervision import ALL_FINISHED_OFFSET, FINISHED_OFFSET, HEARTBEAT_VARIABLE, LOOPBACK, TERMINATED
from mlax.cli._script import run_script

SHUTDOWN_TIMEOUT = 5.0  # seconds, once all scripts have ended
_PR_SET_PDEATHSIG = 1


def start(argv: list[str]) -> int:
    """Run a script from arguments: what the supervisor says in JSON, the script, and its own arguments."""
    return main(json.loads(argv[0]), argv[1], argv[2:])


def main(task: dict[str, Any], script: str, args: list[str]) -> int:
    """Run the script as process `index` of `count`; returns the exit status."""
    _terminate_with(task["supervisor"])
    report = os.open(os.environ[HEARTBEAT_VARIABLE], os.O_RDWR)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(_UnbrokenPipe(number, "w"), encoding="utf-8", errors="replace", write_through=True)
        for number in (1, 2)
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the supervisor if a process hangs
    sys.orig_argv[:] = task["command"]  # what the user typed, for messages that say how to resume
    enable_compilation_cache()
    keep_freed_memory()
    import jax

    index, devices = task["index"], task["devices"]
    if devices is not None:
        jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(
        f"{LOOPBACK}:{task['port']}",
        task["count"],
        index,
        coordinator_bind_address=f"{LOOPBACK}:{task['port']}",  # by default all interfaces, without authentication
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
    _wait_for_all(report, task["supervisor"])  # the others may still be writing
    shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(SHUTDOWN_TIMEOUT)
    if shutdown.is_alive():  # after a SIGTERM at the end, JAX waits long for an answer that nobody gives
        _exit_now(status)
    return status


def _wait_for_all(report: int, supervisor: int) -> None:
    """Report that the script has ended, and wait until all have, so that no process loses another before."""
    os.pwrite(report, b"1", FINISHED_OFFSET)
    while os.pread(report, 1, ALL_FINISHED_OFFSET) != b"1" and os.getppid() == supervisor:
        time.sleep(0.02)


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
