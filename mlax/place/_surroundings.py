"""Surroundings: what the launcher of a process says of the others, in its environment."""

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

Environment = Mapping[str, str]


class Found(NamedTuple):
    """What is known of a process among others; None where nobody says so."""

    how: str  # who started it: "Slurm", say
    index: int | None = None
    processes: int | None = None
    coordinator: str | None = None  # where the first of them listens: "host:port"
    method: str | None = None  # by which JAX finds the coordinator; None: by itself
    neighbour: int | None = None  # its index among those of its machine
    neighbours: int | None = None  # how many there are on its machine


def found(environment: Environment) -> Found:
    """Who started this process, and as which of how many."""
    for kind in (_open_mpi, _mpich, _slurm, _tpu, _kubernetes):  # mpirun may itself be run by Slurm
        what = kind(environment)
        if what is not None:
            return what
    return Found("nobody", 0, 1)


def shared_gpus(environment: Environment, where: Found, present: int) -> list[int]:
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


def _open_mpi(environment: Environment) -> Found | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not _any_of(environment, names[:2]):
        return None
    index, processes, neighbour, neighbours = _numbers("Open MPI", environment, names)
    coordinator, method = None, "ompi" if "OMPI_MCA_orte_hnp_uri" in environment else "mpi4py"
    if method == "mpi4py" and neighbours == processes:  # from 5 on it does not say where it was started
        coordinator = f"localhost:{_port(environment, environment.get('PMIX_NAMESPACE', ''))}"
    return Found("Open MPI", index, processes, coordinator, method, neighbour, neighbours)


def _mpich(environment: Environment) -> Found | None:
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # srun knows PMI too, but sets none of these
    if not _any_of(environment, ["PMI_RANK", "PMI_SIZE"]) or (_STEP in environment and local[0] not in environment):
        return None
    index, processes = _numbers("MPICH", environment, ["PMI_RANK", "PMI_SIZE"])
    if not _any_of(environment, local):
        return Found("MPICH", index, processes, method="mpi4py")
    return Found("MPICH", index, processes, None, "mpi4py", *_numbers("MPICH", environment, local))


_STEP = "SLURM_STEP_NODELIST"


def _slurm(environment: Environment) -> Found | None:
    if "SLURM_JOB_ID" not in environment and _STEP not in environment:
        return None
    if _STEP not in environment:
        tasks = environment.get("SLURM_NTASKS", "1")
        if tasks != "1":
            raise ValueError(
                f"place.start: the job has {tasks} tasks (SLURM_NTASKS), but this process was not started by srun "
                f"({_STEP} is not set); start it by `srun python ...`, or pass processes=1 if it is to be alone."
            )
        return Found("Slurm", 0, 1)
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]
    index, processes, neighbour, _ = _numbers("Slurm", environment, names)
    return Found("Slurm", index, processes, None, "slurm", neighbour, _tasks_here(environment, processes))


def _tasks_here(environment: Environment, processes: int) -> int | None:
    """How many tasks this node has, of a list like `4(x2),3`: four on each of two nodes, and three on the next."""
    written = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", written) for _ in range(int(times or 1))
    ]
    node = int(environment.get("SLURM_NODEID", 0))
    if node < len(counts):
        return counts[node]
    return processes if environment.get("SLURM_STEP_NUM_NODES") == "1" else None


def _tpu(environment: Environment) -> Found | None:
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    return Found("Cloud TPU") if "," in hosts else None


def _kubernetes(environment: Environment) -> Found | None:
    """An indexed Job gives each pod its index; how many there are only Kubernetes knows, whom JAX asks."""
    if "KUBERNETES_SERVICE_HOST" not in environment or "JOB_COMPLETION_INDEX" not in environment:
        return None
    [index] = _numbers("Kubernetes", environment, ["JOB_COMPLETION_INDEX"])
    return Found("Kubernetes", index)


def _any_of(environment: Environment, names: list[str] | tuple[str, ...]) -> bool:
    return any(name in environment for name in names)


def _numbers(how: str, environment: Environment, names: list[str] | tuple[str, ...]) -> list[int]:
    missing = [name for name in names if name not in environment]
    if missing:
        there = ", ".join(name for name in names if name in environment)
        raise ValueError(
            f"place.start: {how} has set {there} but not {', '.join(missing)}; start the process by its launcher, or "
            "pass coordinator=, processes= and index=."
        )
    wrong = [name for name in names if not environment[name].strip().isdecimal()]
    if wrong:
        raise ValueError(f"place.start: {wrong[0]} is {environment[wrong[0]]!r}, but must be a number.")
    return [int(environment[name]) for name in names]


def _port(environment: Environment, job: str) -> int:
    """The same for all processes of a job, and hardly that of another, among those that JAX itself chooses from."""
    return int(environment.get("JAX_COORDINATOR_PORT", 61440 + zlib.crc32(job.encode()) % 4096))
