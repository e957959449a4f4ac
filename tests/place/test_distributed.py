"""Several processes become one program, by arguments and by what launchers set."""

import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import pytest

from mlax import place
from mlax.place import ClusterEnv, detect_cluster, local_gpus
from tests.processes import child_environment, outputs_of, reserved_port, start_python

OF_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "MPI_", "KUBERNETES_", "JOB_COMPLETION", "JAX_COORDINATOR", "TPU_WORKER")

SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
TPU = {"TPU_WORKER_HOSTNAMES": "host-0,host-1", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/root"}, ClusterEnv("no launcher", 0, 1)),
        (SLURM, ClusterEnv("Slurm", 5, 7, None, "slurm", 1, 3)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, ClusterEnv("Slurm", 5, 7, None, "slurm", 1, 2)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ClusterEnv("Slurm", 0, 1)),
        (OPEN_MPI, ClusterEnv("Open MPI", 1, 4, None, "mpi4py", 1, 2)),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:9"},
            ClusterEnv("Open MPI", 1, 4, None, "ompi", 1, 2),
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "JAX_COORDINATOR_PORT": "5000"},
            ClusterEnv("Open MPI", 1, 4, "localhost:5000", "mpi4py", 1, 4),
        ),
        ({**SLURM, **OPEN_MPI}, ClusterEnv("Open MPI", 1, 4, None, "mpi4py", 1, 2)),
        (MPICH, ClusterEnv("MPICH", 3, 4, None, "mpi4py", 1, 2)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, ClusterEnv("MPICH", 3, 4, None, "mpi4py")),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, ClusterEnv("Slurm", 5, 7, None, "slurm", 1, 3)),
        ({**SLURM, **MPICH}, ClusterEnv("MPICH", 3, 4, None, "mpi4py", 1, 2)),
        (KUBERNETES, ClusterEnv("Kubernetes", 1)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ClusterEnv("no launcher", 0, 1)),
        (TPU, ClusterEnv("Cloud TPU")),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ClusterEnv("no launcher", 0, 1)),
    ],
)
def test_a_launcher_is_detected_by_its_variables(environment, expected):
    assert detect_cluster(environment) == expected


@pytest.mark.parametrize(
    ("environment", "missing", "words"),
    [
        (SLURM, "SLURM_PROCID", "Slurm has set SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID but not SLURM_PROCID"),
        (
            OPEN_MPI,
            "OMPI_COMM_WORLD_SIZE",
            "Open MPI has set .* but not OMPI_COMM_WORLD_SIZE; launch the process",
        ),
        (MPICH, "PMI_SIZE", "MPICH has set PMI_RANK but not PMI_SIZE"),
        (
            SLURM,
            "SLURM_STEP_NODELIST",
            "the job has 7 tasks .* not launched by srun .* `srun python ...`, or pass proc",
        ),
    ],
)
def test_the_error_names_missing_variables_of_a_launcher(environment, missing, words):
    with pytest.raises(ValueError, match=words):
        detect_cluster({name: value for name, value in environment.items() if name != missing})


def test_the_error_names_a_variable_that_is_not_an_integer():
    with pytest.raises(ValueError, match="SLURM_PROCID is 'first', but must be an integer"):
        detect_cluster({**SLURM, "SLURM_PROCID": "first"})


def test_jobs_on_one_machine_get_different_ports():
    environment = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    first, second = (
        detect_cluster({**environment, "PMIX_NAMESPACE": f"prterun-{job}@1"}).coordinator for job in (1, 2)
    )
    assert first != second
    assert (
        first
        == detect_cluster({**environment, "PMIX_NAMESPACE": "prterun-1@1", "OMPI_COMM_WORLD_RANK": "0"}).coordinator
    )


@pytest.mark.parametrize(
    ("environment", "local_index", "local_processes", "present", "taken"),
    [
        ({}, 0, 1, 8, []),  # alone on its machine: all
        ({}, 1, 4, 8, [2, 3]),
        ({}, 3, 4, 4, [3]),
        ({}, 1, 4, 0, []),  # no GPUs
        ({}, 1, None, 8, [1]),
        ({}, None, None, 8, []),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 2, 8, [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "5"}, 1, 2, 8, []),  # bound to one by its launcher
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, 1, 2, 8, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=2"}, 1, 2, 8, []),
        ({"SLURM_GPU_BIND": "single:1"}, 1, 2, 8, []),
        ({"SLURM_GPU_BIND": "none"}, 1, 2, 8, [4, 5, 6, 7]),
    ],
)
def test_processes_on_one_machine_share_its_gpus(environment, local_index, local_processes, present, taken):
    where = ClusterEnv("Slurm", local_index=local_index, local_processes=local_processes)
    assert local_gpus(environment, where, present) == taken


@pytest.fixture
def surrounded(monkeypatch):
    """Sets the environment of a launcher, and of no other."""
    for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
        monkeypatch.delenv(name)

    def set_all(environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_a_single_process_stays_alone_and_says_so(surrounded):
    started = place.initialize_distributed(devices=8)  # which it has already
    assert started == (0, 1, "alone") and str(started) == "process 0 of 1, alone"
    surrounded({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert place.initialize_distributed() == (0, 1, "alone, by Slurm")
    surrounded(SLURM)
    assert place.initialize_distributed(processes=1) == (0, 1, "alone, by its arguments")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"processes": 2}, "got processes without coordinator, index, and no launcher says the rest"),
        ({"coordinator": "a:1", "index": 0}, "got coordinator, index without processes"),
        ({"coordinator": "a:1", "processes": 2, "index": 2}, "index is 2, but must be from 0 to 2 - 1"),
        ({"coordinator": "a", "processes": 2, "index": 0}, "coordinator is 'a', but must be 'host:port'"),
        ({"coordinator": "a:1", "processes": 0, "index": 0}, "processes is 0, but must be at least 1"),
    ],
)
def test_incomplete_or_invalid_arguments_are_errors(surrounded, told, words):
    with pytest.raises(ValueError, match=words):
        place.initialize_distributed(**told)


def test_an_address_in_the_environment_is_not_enough(surrounded):
    surrounded({"JAX_COORDINATOR_ADDRESS": "a:1"})
    with pytest.raises(ValueError, match="got JAX_COORDINATOR_ADDRESS without processes, index"):
        place.initialize_distributed()


@pytest.mark.parametrize(
    ("package", "environment", "words"),
    [
        ("mpi4py", OPEN_MPI, "Open MPI launched 4 processes .* install mpi4py, .* or pass coordinator="),
        ("mpi4py", MPICH, "MPICH launched 4 processes .* install mpi4py, .* or pass coordinator="),
        (
            "kubernetes",
            KUBERNETES,
            "this is pod 1 of an indexed Job, .* install jax.k8s., .* or pass processes= and co",
        ),
    ],
)
def test_the_error_names_a_missing_package(surrounded, package, environment, words):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is there")
    surrounded(environment)
    with pytest.raises(ValueError, match=words):
        place.initialize_distributed()


def test_initialization_after_a_computation_is_an_error(surrounded):
    jnp.ones(3).block_until_ready()
    with pytest.raises(RuntimeError, match=r"already created its devices .* call it first"):
        place.initialize_distributed("localhost:1", 2, 0)
    with pytest.raises(RuntimeError, match="already created its devices"):
        place.initialize_distributed(devices=jax.device_count() + 1)
    assert not jax.distributed.is_initialized()


CHILD = """
import json, sys, jax
from mlax import place
from tests.processes import child_environment, outputs_of, reserved_port, start_python
arguments, by_hand = json.loads(sys.argv[1])
if by_hand:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(*arguments)
    arguments = []
started = place.initialize_distributed(*arguments, devices=2)
again = place.initialize_distributed()
assert again == (started.index, started.processes, "already initialized"), again
assert (jax.process_index(), jax.process_count()) == started[:2]
try:
    place.initialize_distributed(processes=3)
    raise SystemExit("three processes should be an error")
except ValueError as error:
    assert "but got processes=3" in str(error), error
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
ones = jax.make_array_from_callback((4,), split, lambda index: jax.numpy.arange(4.0)[index])
total = jax.jit(jax.numpy.sum, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))(ones)
print("RESULT", json.dumps([*started, jax.device_count(), float(total)]))
"""


def run_two(arguments=lambda index, port: (), environment=lambda index, port: {}, by_hand=False):
    """What each of two processes reports, with these arguments and environments."""
    clean = {name: value for name, value in child_environment().items() if not name.startswith(OF_LAUNCHERS)}
    with reserved_port() as port:
        children = [
            start_python(
                "-c",
                CHILD,
                json.dumps([arguments(index, port), by_hand]),
                environment={**clean, **environment(index, port)},
            )
            for index in range(2)
        ]
        outputs = outputs_of(*children, seconds=120)
    results = [line for output in outputs for line in output.splitlines() if "RESULT" in line]
    return [json.loads(line.partition("RESULT ")[2]) for line in results]


def slurm(index, port):
    return {
        **SLURM,
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "JAX_COORDINATOR_PORT": str(port),
    }


def half_of_slurm(index, port):
    return {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "5"}


def open_mpi(index, port):
    return {
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "JAX_COORDINATOR_PORT": str(port),
    }


def test_arguments_take_precedence_over_the_environment():
    found = run_two(arguments=lambda index, port: (f"localhost:{port}", 2, index), environment=half_of_slurm)
    assert found == [[index, 2, "by its arguments", 4, 6.0] for index in range(2)]


@pytest.mark.parametrize(
    ("environment", "name"),
    [(slurm, "Slurm"), pytest.param(open_mpi, "Open MPI", marks=pytest.mark.thorough)],
)
def test_two_processes_find_each_other_by_their_launcher_s_variables(environment, name):
    assert run_two(environment=environment) == [[index, 2, f"by {name}", 4, 6.0] for index in range(2)]


@pytest.mark.thorough
def test_processes_that_are_already_initialized_stay_unchanged():
    found = run_two(arguments=lambda index, port: (f"localhost:{port}", 2, index), by_hand=True)
    assert found == [[index, 2, "already initialized", 4, 6.0] for index in range(2)]
