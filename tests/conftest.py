"""What all tests run under: strict dtypes, exact products, eight simulated devices, shapes of `ops` checked."""

import gc
import os
from pathlib import Path

# A simulated device that waits for others holds a thread; with one for each device, XLA's CPU client can come to wait
# in two places at once, for ever.
os.environ.setdefault("NPROC", "32")

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")  # on a GPU, float32 means float32 here
jax.config.update("jax_num_cpu_devices", 8)

# Tests build the same small programs again and again; what one has compiled the others find on disk.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

with install_import_hook("mlax.ops", "beartype.beartype"):
    import mlax.nn
    import mlax.ops  # noqa: F401


from tests.catalogue.row import FLOATS  # noqa: E402  # after `ops` has been imported under the hook


@pytest.fixture(params=FLOATS)
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture(scope="session")
def thorough(request):
    """Whether all is to be tested, however long it takes."""
    return request.config.getoption("--thorough")


HASTY = ("contract", "core", "docs", "dtypes", "files", "inspect", "nn", "optim", "place", "train")


@pytest.fixture(autouse=True)
def compiled_in_haste(request):
    """Leave out the costly passes of the compiler where thousands of small programs are compiled, here and in children.

    With `--thorough` everything is compiled as users compile it.
    """
    haste = request.path.parent.name in HASTY and not request.config.getoption("--thorough")
    jax.config.update("jax_disable_most_optimizations", haste)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(haste)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="every row of the catalogue in every dtype")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: is left out unless `--thorough` is given")
    if not config.getoption("--thorough") and jax.__version_info__ < (0, 11):  # later ones have no such flag
        # The loops that XLA had before its fusion emitters compute the same, and take a third of the time to compile.
        # A program that is compiled in one piece takes a fifth less than in pieces, of which each begins anew.
        quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--thorough"):
        extra = {item for item in items if item.get_closest_marker("thorough")}
        config.hook.pytest_deselected(items=list(extra))
        items[:] = [item for item in items if item not in extra]


def pytest_collection_finish():
    gc.freeze()  # all that was imported stays; the collector need not look through it again and again
