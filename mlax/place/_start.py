"""start: several processes become one program, found by what surrounds them."""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

import jax

from mlax.place._surroundings import Found, found, shared_gpus


class Started(NamedTuple):
    """Which process this is, of how many, and who said so."""

    index: int
    processes: int
    how: str

    def __str__(self) -> str:
        return f"process {self.index} of {self.processes}, {self.how}"


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    index: int | None = None,
    *,
    devices: int | None = None,
    patience: int = 300,
) -> Started:
    """Make one program of all processes that were started together; call it before anything is computed.

    Slurm (`srun`), Open MPI, MPICH (`mpiexec`), Cloud TPUs and indexed Jobs of Kubernetes are found by the variables
    that they set; where nobody started others, nothing happens. Then `jax.devices()` are the devices of all processes.
    A second call, and one under `mlax launch`, does nothing.

    - `coordinator`, `processes`, `index`: "host:port" where the first process will listen, how many there are, and
      which this is; whatever is not given is taken from the surroundings. `processes=1` is alone in any case.
    - `devices`: simulated devices of each process, where it computes on a CPU.
    - `patience`: seconds to wait for the others.

    Processes that share a machine share its GPUs evenly, unless their launcher has bound them to some.
    """
    if jax.distributed.is_initialized():
        return _already(processes, index)
    if devices is not None:
        _simulate(devices)
    if processes == 1:
        return Started(0, 1, "alone, as told")
    told = coordinator, processes, index
    where = _complete(found(os.environ) if None in told else Found("its arguments"), *told)
    if where.processes == 1:
        return Started(0, 1, "alone" if where.how == "nobody" else f"alone, by {where.how}")
    _join(where, patience)
    how = f"by {where.how}"
    if where.index is None or where.processes is None:  # JAX is asked only then, since to answer it makes its devices
        return Started(jax.process_index(), jax.process_count(), how)
    return Started(where.index, where.processes, how)


def _already(processes: int | None, index: int | None) -> Started:
    running = Started(jax.process_index(), jax.process_count(), "started before")
    if processes not in (None, running.processes) or index not in (None, running.index):
        raise ValueError(f"place.start: this is {running}, but was asked to be process {index} of {processes}.")
    return running


def _simulate(devices: int) -> None:
    if jax.config.jax_num_cpu_devices == devices:  # pyright: ignore[reportAttributeAccessIssue]
        return
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        raise RuntimeError(_TOO_LATE) from error


_TOO_LATE = (
    "place.start: JAX has computed already, or was asked for its devices, and cannot be joined to other processes any "
    "more; call place.start() first, before jax.devices(), jax.random.key and anything else that makes an array."
)


def _complete(where: Found, coordinator: str | None, processes: int | None, index: int | None) -> Found:
    """What is told goes before what is found; refuses what is told by halves."""
    told = [name for name, value in zip(_NAMES, (coordinator, processes, index), strict=True) if value is not None]
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if where.how == "nobody" and (told or address):
        missing = [name for name in _NAMES if name not in told and not (name == "coordinator" and address)]
        if missing:
            given = ", ".join(told) or "the variable JAX_COORDINATOR_ADDRESS"
            raise ValueError(
                f"place.start: {given} came without {', '.join(missing)}, and nothing around this process says more; "
                "pass all three, the same coordinator and processes to each process."
            )
        where = Found("its arguments")  # and the address in the environment
    where = where._replace(
        coordinator=address or where.coordinator,
        processes=where.processes if processes is None else processes,
        index=where.index if index is None else index,
    )
    _check(where)
    return where


_NAMES = ("coordinator", "processes", "index")


def _check(where: Found) -> None:
    if where.processes is not None and where.processes < 1:
        raise ValueError(f"place.start: processes is {where.processes}, but must be at least 1.")
    if where.index is not None and not 0 <= where.index < (where.processes or where.index + 1):
        raise ValueError(f"place.start: index is {where.index}, but must be from 0 to {where.processes} - 1.")
    if where.coordinator is not None and not re.fullmatch(r".+:\d+", where.coordinator):
        raise ValueError(f"place.start: the coordinator is {where.coordinator!r}, but must be 'host:port'.")
    if where.processes == 1 or where.coordinator is not None:
        return
    if where.method == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        raise ValueError(
            f"place.start: {where.how} started {where.processes} processes and does not say where the first one is; "
            "install mpi4py, by which JAX asks for it, or pass coordinator='host:port'."
        )
    if where.how == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            f"place.start: this is pod {where.index} of an indexed Job, and only Kubernetes knows the others; install "
            "jax[k8s], by which JAX asks it, or pass processes= and coordinator='job-0.service:port'."
        )


def _join(where: Found, patience: int) -> None:
    gpus = None
    if where.how not in ("Kubernetes", "Cloud TPU") and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        gpus = shared_gpus(os.environ, where, present=len(list(Path("/dev").glob("nvidia[0-9]*"))))
    is_known = None not in (where.coordinator, where.processes, where.index)
    try:
        jax.distributed.initialize(
            where.coordinator,
            where.processes,
            where.index,
            local_device_ids=gpus,
            cluster_detection_method="deactivate" if is_known else where.method,
            initialization_timeout=patience,
            shutdown_timeout_seconds=60,  # how long one that failed waits for the others
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise RuntimeError(_TOO_LATE) from error
