"""What all tests run under: strict dtypes, exact products, eight simulated devices, shapes of `ops` checked."""

import gc
import inspect
import os
import signal
import threading
from pathlib import Path

# A simulated device that waits for others blocks a thread; with one thread per device, XLA's CPU client can deadlock.
os.environ.setdefault("NPROC", "32")

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")  # on a GPU, float32 means float32 here
jax.config.update("jax_num_cpu_devices", 8)

# Tests compile the same small programs again and again; the others find on disk what one has compiled.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

with install_import_hook(["mlax.ops", "mlax._gpu"], "beartype.beartype"):
    import mlax.nn
    import mlax.ops  # noqa: F401


from mlax import train  # noqa: E402  # as the next
from tests.catalogue.row import FLOATS, Row  # noqa: E402  # after `ops` has been imported under the hook

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell ignores
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup does; a process inherits this, but no handler
    signal.signal(signal.SIGHUP, lambda *_: None)

LONG = ("test_processes", "tests/faults/", "tests/examples/", "test_pages", "test_supervisor")  # files of long tests


@pytest.fixture(params=FLOATS)
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture(scope="session")
def thorough(request):
    """Whether `--thorough` is given."""
    return request.config.getoption("--thorough")


@pytest.fixture(scope="session", autouse=True)
def write_html_report(thorough):
    """What writes report.html, which takes longer than most trainings here: with `--thorough` every run has one."""
    module = inspect.getmodule(train.fit)
    write = module.write_html_report
    with pytest.MonkeyPatch.context() as patch:
        if not thorough:
            patch.setattr(module, "write_html_report", lambda *given: None)
        yield write


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="every test, over every row of the catalogue and dtype")
    parser.addoption("--guides", action="store_true", help="the guides are executed, too, as `make docs` does")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: runs only with `--thorough`")
    config.addinivalue_line("markers", "guides: runs only with `--guides` or `--thorough`")
    config.addinivalue_line("markers", "every_row: runs over the variants in the catalogue, too")
    config.addinivalue_line("markers", "gradients: of the trainables; leaves out rows whose kernels are quantized")
    config.addinivalue_line("markers", "plain_rows: in a file that is marked every_row, does not run over the variants")
    config.addinivalue_line("markers", "one_dtype: runs in float32, and over variants in bfloat16")
    config.addinivalue_line("markers", "every_dtype: only traces, so that it runs in float16 and float64, too")
    if not config.getoption("--thorough"):
        _compile_quickly()


def _compile_quickly():
    """Leave out the costly passes of the compiler, in every test and in child processes.

    Thousands of small programs are compiled and run once. With `--thorough` they are compiled as users compile them.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "True"
    if jax.__version_info__ < (0, 11):  # later versions do not have these flags
        from jax._src import xla_bridge

        # XLA's older loop emitters compute the same, and compile in a third of the time. Compiling a program in one
        # piece takes a fifth less time than in several, each with its own start-up.
        flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        if xla_bridge.backends_are_initialized():
            raise pytest.UsageError("XLA has read its flags: the catalogue, which this file imports, must not compute.")
        _reuse_contexts()


def _reuse_contexts(programs=32):
    """Let many programs share an MLIR context, as later versions of JAX do: creating one takes a quarter of the time.

    A context keeps the constants of its programs, so each serves only so many.
    """
    from jax._src.interpreters import mlir

    create, current = mlir.make_ir_context, threading.local()

    def make_ir_context():
        current.uses = getattr(current, "uses", 0) + 1
        if current.uses % programs == 1:
            current.context = create()
        return current.context

    mlir.make_ir_context = make_ir_context


def pytest_itemcollected(item):
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    row, marks = parameters.get("row"), {mark.name for mark in item.iter_markers()}
    if isinstance(row, Row) and row.is_left_to_thorough(marks, parameters.get("dtype")):
        item.add_marker("thorough")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--thorough"):
        left_out = ("thorough",) if config.getoption("--guides") else ("thorough", "guides")
        extra = {item for item in items if any(map(item.get_closest_marker, left_out))}
        config.hook.pytest_deselected(items=list(extra))
        items[:] = [item for item in items if item not in extra]
    # long tests first, so that no worker waits for one at the end
    items.sort(key=lambda item: not any(part in item.nodeid for part in LONG))


def pytest_collection_finish():
    gc.freeze()  # the imported modules stay; the collector need not traverse them again and again
