"""initialize_distributed: multi-process JAX, set up from what the launcher says in the environment."""

import importlib.util
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax


class ClusterEnv(NamedTuple):
    """What is known of a process among others; None where nobody says so."""

    how: str  # who started it: "Slurm", say
    index: int | None = None
    processes: int | None = None
    coordinator: str | None = None  # where the first of them listens: "host:port"
    method: str | None = None  # by which JAX finds the coordinator; None: by itself
    neighbour: int | None = None  # its index among those of its machine
    neighbours: int | None = None  # how many there are on its machine


class ProcessInfo(NamedTuple):
    """Which process this is, of how many, and who said so."""

    index: int
    processes: int
    how: str

    def __str__(self) -> str:
        return f"process {self.index} of {self.processes}, {self.how}"


def initialize_distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    index: int | None = None,
    *,
    devices: int | None = None,
    patience: int = 300,
) -> ProcessInfo:
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
        return _running_process(processes, index)
    if devices is not None:
        _set_cpu_devices(devices)
    if processes == 1:
        return ProcessInfo(0, 1, "alone, as told")
    told = coordinator, processes, index
    where = _complete_cluster(detect_cluster(os.environ) if None in told else ClusterEnv("its arguments"), *told)
    if where.processes == 1:
        return ProcessInfo(0, 1, "alone" if where.how == "nobody" else f"alone, by {where.how}")
    _initialize(where, patience)
    how = f"by {where.how}"
    if where.index is None or where.processes is None:  # JAX is asked only then, since to answer it makes its devices
        return ProcessInfo(jax.process_index(), jax.process_count(), how)
    return ProcessInfo(where.index, where.processes, how)


def _running_process(processes: int | None, index: int | None) -> ProcessInfo:
    running = ProcessInfo(jax.process_index(), jax.process_count(), "started before")
    if processes not in (None, running.processes) or index not in (None, running.index):
        raise ValueError(
            f"initialize_distributed: this is {running}, but was asked to be process {index} of {processes}."
        )
    return running


def _set_cpu_devices(devices: int) -> None:
    if jax.config.jax_num_cpu_devices == devices:  # pyright: ignore[reportAttributeAccessIssue]
        return
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        raise RuntimeError(_TOO_LATE) from error


_TOO_LATE = (
    "initialize_distributed: JAX has already created its devices in this process; call it first, before jax.devices(), "
    "jax.random.key and anything else that creates an array."
)


def _complete_cluster(
    where: ClusterEnv, coordinator: str | None, processes: int | None, index: int | None
) -> ClusterEnv:
    """What is told goes before what is found; refuses what is told by halves."""
    told = [name for name, value in zip(_NAMES, (coordinator, processes, index), strict=True) if value is not None]
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if where.how == "nobody" and (told or address):
        missing = [name for name in _NAMES if name not in told and not (name == "coordinator" and address)]
        if missing:
            given = ", ".join(told) or "the variable JAX_COORDINATOR_ADDRESS"
            raise ValueError(
                f"initialize_distributed: {given} came without {', '.join(missing)}, and nothing around this process "
                "says more; pass all three, the same coordinator and processes to each process."
            )
        where = ClusterEnv("its arguments")  # and the address in the environment
    where = where._replace(
        coordinator=address or where.coordinator,
        processes=where.processes if processes is None else processes,
        index=where.index if index is None else index,
    )
    _check_cluster(where)
    return where


_NAMES = ("coordinator", "processes", "index")


def _check_cluster(where: ClusterEnv) -> None:
    if where.processes is not None and where.processes < 1:
        raise ValueError(f"initialize_distributed: processes is {where.processes}, but must be at least 1.")
    if where.index is not None and not 0 <= where.index < (where.processes or where.index + 1):
        raise ValueError(
            f"initialize_distributed: index is {where.index}, but must be from 0 to {where.processes} - 1."
        )
    if where.coordinator is not None and not re.fullmatch(r".+:\d+", where.coordinator):
        raise ValueError(f"initialize_distributed: the coordinator is {where.coordinator!r}, but must be 'host:port'.")
    if where.processes == 1 or where.coordinator is not None:
        return
    if where.method == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        raise ValueError(
            f"initialize_distributed: {where.how} started {where.processes} processes and does not say where "
            "the first one is; install mpi4py, by which JAX asks for it, or pass coordinator='host:port'."
        )
    if where.how == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            f"initialize_distributed: this is pod {where.index} of an indexed Job, and only Kubernetes knows the "
            "others; install jax[k8s], by which JAX asks it, or pass processes= and coordinator='job-0.service:port'."
        )


def _initialize(where: ClusterEnv, patience: int) -> None:
    gpus = None
    if where.how not in ("Kubernetes", "Cloud TPU") and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        gpus = local_gpus(os.environ, where, present=len(list(Path("/dev").glob("nvidia[0-9]*"))))
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


Environment = Mapping[str, str]


def detect_cluster(environment: Environment) -> ClusterEnv:
    """Who started this process, and as which of how many."""
    for kind in (_open_mpi, _mpich, _slurm, _tpu, _kubernetes):  # mpirun may itself be run by Slurm
        what = kind(environment)
        if what is not None:
            return what
    return ClusterEnv("nobody", 0, 1)


def local_gpus(environment: Environment, where: ClusterEnv, present: int) -> list[int]:
    """The GPUs that this process takes, as numbers among those it sees; none of them named: all that it sees.

    `present` are those of the machine. Processes of one machine that see the same GPUs share them evenly; a process
    that its launcher has bound to some GPUs sees only those, and takes all of them.
    """
    bound = any(environment.get(name, "none") != "none" for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"))
    if where.neighbour is None or where.neighbours == 1 or bound or "gpu" in environment.get("SLURM_TRES_PER_TASK", ""):
        return []
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    seen = present if listed is None else len(re.findall(r"[^,\s]+", listed))
    each = seen // where.neighbours if where.neighbours else min(seen, 1)  # one, as JAX does, if nobody counts them
    return list(range(where.neighbour * each, (where.neighbour + 1) * each))


def _open_mpi(environment: Environment) -> ClusterEnv | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not _any_set(environment, names[:2]):
        return None
    index, processes, neighbour, neighbours = _read_ints("Open MPI", environment, names)
    coordinator, method = None, "ompi" if "OMPI_MCA_orte_hnp_uri" in environment else "mpi4py"
    if method == "mpi4py" and neighbours == processes:  # from 5 on it does not say where it was started
        coordinator = f"localhost:{_port(environment, environment.get('PMIX_NAMESPACE', ''))}"
    return ClusterEnv("Open MPI", index, processes, coordinator, method, neighbour, neighbours)


def _mpich(environment: Environment) -> ClusterEnv | None:
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # srun knows PMI too, but sets none of these
    if not _any_set(environment, ["PMI_RANK", "PMI_SIZE"]) or (_STEP in environment and local[0] not in environment):
        return None
    index, processes = _read_ints("MPICH", environment, ["PMI_RANK", "PMI_SIZE"])
    if not _any_set(environment, local):
        return ClusterEnv("MPICH", index, processes, method="mpi4py")
    return ClusterEnv("MPICH", index, processes, None, "mpi4py", *_read_ints("MPICH", environment, local))


_STEP = "SLURM_STEP_NODELIST"


def _slurm(environment: Environment) -> ClusterEnv | None:
    if "SLURM_JOB_ID" not in environment and _STEP not in environment:
        return None
    if _STEP not in environment:
        tasks = environment.get("SLURM_NTASKS", "1")
        if tasks != "1":
            raise ValueError(
                f"initialize_distributed: the job has {tasks} tasks (SLURM_NTASKS), but this process was not started "
                f"by srun ({_STEP} is not set); start it by `srun python ...`, or pass processes=1."
            )
        return ClusterEnv("Slurm", 0, 1)
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]
    index, processes, neighbour, _ = _read_ints("Slurm", environment, names)
    return ClusterEnv("Slurm", index, processes, None, "slurm", neighbour, _tasks_on_node(environment, processes))


def _tasks_on_node(environment: Environment, processes: int) -> int | None:
    """How many tasks this node has, of a list like `4(x2),3`: four on each of two nodes, and three on the next."""
    written = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", written) for _ in range(int(times or 1))
    ]
    node = int(environment.get("SLURM_NODEID", 0))
    if node < len(counts):
        return counts[node]
    return processes if environment.get("SLURM_STEP_NUM_NODES") == "1" else None


def _tpu(environment: Environment) -> ClusterEnv | None:
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    return ClusterEnv("Cloud TPU") if "," in hosts else None


def _kubernetes(environment: Environment) -> ClusterEnv | None:
    """An indexed Job gives each pod its index; how many there are only Kubernetes knows, whom JAX asks."""
    if "KUBERNETES_SERVICE_HOST" not in environment or "JOB_COMPLETION_INDEX" not in environment:
        return None
    [index] = _read_ints("Kubernetes", environment, ["JOB_COMPLETION_INDEX"])
    return ClusterEnv("Kubernetes", index)


def _any_set(environment: Environment, names: list[str] | tuple[str, ...]) -> bool:
    return any(name in environment for name in names)


def _read_ints(how: str, environment: Environment, names: list[str] | tuple[str, ...]) -> list[int]:
    missing = [name for name in names if name not in environment]
    if missing:
        there = ", ".join(name for name in names if name in environment)
        raise ValueError(
            f"initialize_distributed: {how} has set {there} but not {', '.join(missing)}; start it by its launcher, "
            "or pass coordinator=, processes= and index=."
        )
    wrong = [name for name in names if not environment[name].strip().isdecimal()]
    if wrong:
        raise ValueError(f"initialize_distributed: {wrong[0]} is {environment[wrong[0]]!r}, but must be a number.")
    return [int(environment[name]) for name in names]


def _port(environment: Environment, job: str) -> int:
    """The same for all processes of a job, and hardly that of another, among those that JAX itself chooses from."""
    return int(environment.get("JAX_COORDINATOR_PORT", 61440 + zlib.crc32(job.encode()) % 4096))
