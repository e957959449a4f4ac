"""initialize_distributed: multi-process JAX, set up from the environment variables of the launcher."""

import importlib.util
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from mlax.core import document_tuple

Environment = Mapping[str, str]


@document_tuple
class ProcessInfo(NamedTuple):
    """The index of this process, the number of processes, and how they were found."""

    index: int  # of this process
    processes: int  # how many
    how: str  # they were found

    def __str__(self) -> str:
        return f"process {self.index} of {self.processes}, {self.how}"


class ClusterEnv(NamedTuple):
    """What the environment says about a process among others; None where it says nothing."""

    launcher: str  # "Slurm", say
    index: int | None = None
    processes: int | None = None
    coordinator: str | None = None  # "host:port" of the first process
    method: str | None = None  # the cluster_detection_method by which JAX finds the coordinator
    local_index: int | None = None  # among the processes of its machine
    local_processes: int | None = None


NO_LAUNCHER, ARGUMENTS = "no launcher", "its arguments"


def initialize_distributed(
    coordinator: str | None = None,
    processes: int | None = None,
    index: int | None = None,
    *,
    devices: int | None = None,
    patience: int = 300,
) -> ProcessInfo:
    """Initialize multi-process JAX by `jax.distributed.initialize`; call it before any computation.

    Processes launched by Slurm (`srun`), Open MPI, MPICH (`mpiexec`), Cloud TPUs or an indexed Job of Kubernetes are
    found by the environment variables of these; without a launcher it does nothing. Afterwards `jax.devices()` are the
    devices of all processes. It does nothing in a second call and under `mlax launch`.

    - `coordinator`, `processes`, `index`: "host:port" of the first process, the number of processes, and the index of
      this one; by default from the environment. `processes=1` is a single process under any launcher.
    - `devices`: the number of simulated devices of each process on a CPU.
    - `patience`: seconds to wait for the other processes.

    Processes on the same machine share its GPUs evenly, unless the launcher has bound GPUs to them.
    """
    if jax.distributed.is_initialized():
        return _running_process(processes, index)
    if devices is not None:
        _set_cpu_devices(devices)
    if processes == 1:
        return ProcessInfo(0, 1, f"alone, by {ARGUMENTS}")
    given = coordinator, processes, index
    cluster = _complete_cluster(detect_cluster(os.environ) if None in given else ClusterEnv(ARGUMENTS), *given)
    if cluster.processes == 1:
        return ProcessInfo(0, 1, "alone" if cluster.launcher == NO_LAUNCHER else f"alone, by {cluster.launcher}")
    _initialize(cluster, patience)
    how = f"by {cluster.launcher}"
    if cluster.index is None or cluster.processes is None:  # only then, since this creates JAX's devices
        return ProcessInfo(jax.process_index(), jax.process_count(), how)
    return ProcessInfo(cluster.index, cluster.processes, how)


def _running_process(processes: int | None, index: int | None) -> ProcessInfo:
    running = ProcessInfo(jax.process_index(), jax.process_count(), "already initialized")
    if processes not in (None, running.processes) or index not in (None, running.index):
        given = [f"{name}={value}" for name, value in (("processes", processes), ("index", index)) if value is not None]
        raise ValueError(f"initialize_distributed: this is {running}, but got {', '.join(given)}; pass the same.")
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
    cluster: ClusterEnv, coordinator: str | None, processes: int | None, index: int | None
) -> ClusterEnv:
    """The environment with the arguments, which take precedence; raises if too little is known."""
    arguments = {"coordinator": coordinator, "processes": processes, "index": index}
    given = [name for name, value in arguments.items() if value is not None]
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if cluster.launcher == NO_LAUNCHER and (given or address):
        missing = [name for name in arguments if name not in given and not (name == "coordinator" and address)]
        if missing:
            have = ", ".join(given) or "JAX_COORDINATOR_ADDRESS"
            raise ValueError(
                f"initialize_distributed: got {have} without {', '.join(missing)}, and no launcher says the rest; pass "
                "all three, with the same coordinator and processes in each process."
            )
        cluster = ClusterEnv(ARGUMENTS)
    cluster = cluster._replace(
        coordinator=address or cluster.coordinator,
        processes=cluster.processes if processes is None else processes,
        index=cluster.index if index is None else index,
    )
    _check_cluster(cluster)
    return cluster


def _check_cluster(cluster: ClusterEnv) -> None:
    launcher, index, processes, coordinator = cluster[:4]
    if processes is not None and processes < 1:
        raise ValueError(f"initialize_distributed: processes is {processes}, but must be at least 1.")
    if index is not None and not 0 <= index < (processes or index + 1):
        raise ValueError(f"initialize_distributed: index is {index}, but must be from 0 to {processes} - 1.")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"initialize_distributed: coordinator is {coordinator!r}, but must be 'host:port'.")
    if processes == 1 or coordinator is not None:
        return
    if cluster.method == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        raise ValueError(
            f"initialize_distributed: {launcher} launched {processes} processes but does not give the address of the "
            "first; install mpi4py, by which JAX finds it, or pass coordinator='host:port'."
        )
    if launcher == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            f"initialize_distributed: this is pod {index} of an indexed Job, and only the Kubernetes API knows the "
            "others; install jax[k8s], with which JAX queries it, or pass processes= and "
            "coordinator='job-0.service:port'."
        )


def _initialize(cluster: ClusterEnv, patience: int) -> None:
    gpus = None
    if cluster.launcher not in ("Kubernetes", "Cloud TPU") and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        gpus = local_gpus(os.environ, cluster, installed=len(list(Path("/dev").glob("nvidia[0-9]*"))))
    is_known = None not in (cluster.coordinator, cluster.processes, cluster.index)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.index,
            local_device_ids=gpus,
            cluster_detection_method="deactivate" if is_known else cluster.method,
            initialization_timeout=patience,
            shutdown_timeout_seconds=60,  # how long a failed process waits for the others
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise RuntimeError(_TOO_LATE) from error


def local_gpus(environment: Environment, cluster: ClusterEnv, installed: int) -> list[int]:
    """The indices of this process's GPUs among those that it sees; empty for all of them.

    `installed` counts the GPUs of the machine. Processes of one machine that see the same GPUs share them evenly; a
    process whose launcher has bound GPUs to it sees only those, and uses all of them.
    """
    bound = any(environment.get(name, "none") != "none" for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"))
    bound = bound or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    if cluster.local_index is None or cluster.local_processes == 1 or bound:
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = installed if visible is None else len(re.findall(r"[^,\s]+", visible))
    # one, as in JAX, if the number of processes on the machine is unknown
    share = count // cluster.local_processes if cluster.local_processes else min(count, 1)
    return list(range(cluster.local_index * share, (cluster.local_index + 1) * share))


def detect_cluster(environment: Environment) -> ClusterEnv:
    """The launcher of this process, and what it says about the others."""
    for detect in (_open_mpi, _mpich, _slurm, _tpu, _kubernetes):  # Slurm late: mpirun may itself be run by srun
        cluster = detect(environment)
        if cluster is not None:
            return cluster
    return ClusterEnv(NO_LAUNCHER, 0, 1)


def _open_mpi(environment: Environment) -> ClusterEnv | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not _any_set(environment, names[:2]):
        return None
    index, processes, local_index, local_processes = _read_ints("Open MPI", environment, names)
    coordinator, method = None, "ompi" if "OMPI_MCA_orte_hnp_uri" in environment else "mpi4py"
    if method == "mpi4py" and local_processes == processes:  # from version 5 on it does not say where it was launched
        coordinator = f"localhost:{_port(environment, environment.get('PMIX_NAMESPACE', ''))}"
    return ClusterEnv("Open MPI", index, processes, coordinator, method, local_index, local_processes)


def _mpich(environment: Environment) -> ClusterEnv | None:
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # srun may set PMI variables too, but not these
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
                f"initialize_distributed: the job has {tasks} tasks (SLURM_NTASKS), but this process was not launched "
                f"by srun ({_STEP} is not set); launch it by `srun python ...`, or pass processes=1."
            )
        return ClusterEnv("Slurm", 0, 1)
    names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]
    index, processes, local_index, _ = _read_ints("Slurm", environment, names)
    return ClusterEnv("Slurm", index, processes, None, "slurm", local_index, _tasks_on_node(environment, processes))


def _tasks_on_node(environment: Environment, processes: int) -> int | None:
    """The number of tasks on this node, from a list such as `4(x2),3`: four on each of two nodes, three on the next."""
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, nodes in listed for _ in range(int(nodes or 1))]
    node = int(environment.get("SLURM_NODEID", 0))
    if node < len(counts):
        return counts[node]
    return processes if environment.get("SLURM_STEP_NUM_NODES") == "1" else None


def _tpu(environment: Environment) -> ClusterEnv | None:
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    return ClusterEnv("Cloud TPU") if "," in hosts else None


def _kubernetes(environment: Environment) -> ClusterEnv | None:
    """The index of a pod of an indexed Job; JAX queries the Kubernetes API for the number of pods."""
    if "KUBERNETES_SERVICE_HOST" not in environment or "JOB_COMPLETION_INDEX" not in environment:
        return None
    [index] = _read_ints("Kubernetes", environment, ["JOB_COMPLETION_INDEX"])
    return ClusterEnv("Kubernetes", index)


def _any_set(environment: Environment, names: Sequence[str]) -> bool:
    return any(name in environment for name in names)


def _read_ints(launcher: str, environment: Environment, names: Sequence[str]) -> list[int]:
    missing = [name for name in names if name not in environment]
    if missing:
        present = ", ".join(name for name in names if name in environment)
        raise ValueError(
            f"initialize_distributed: {launcher} has set {present} but not {', '.join(missing)}; launch the process by "
            "it, or pass coordinator=, processes= and index=."
        )
    wrong = [name for name in names if not environment[name].strip().isdecimal()]
    if wrong:
        raise ValueError(f"initialize_distributed: {wrong[0]} is {environment[wrong[0]]!r}, but must be an integer.")
    return [int(environment[name]) for name in names]


def _port(environment: Environment, job: str) -> int:
    """A port that all processes of a job derive, in the range that JAX chooses from; other jobs rarely get the same."""
    return int(environment.get("JAX_COORDINATOR_PORT", 61440 + zlib.crc32(job.encode()) % 4096))
