"""Runs a contract test over every row of the catalogue, and in every floating dtype where it asks for one.

Second and further rows of a layer are held only to what they compute, in one dtype, the one in which most goes wrong,
and a few are left out. With `--thorough` every row is held to everything.
"""

import jax
import pytest

from tests.catalogue import FLOATS, ROWS


@pytest.fixture(params=ROWS)
def row(request):
    return ROWS[request.param]


@pytest.fixture(params=FLOATS)
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def pytest_collection_modifyitems(config, items):
    def is_extra(item):
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        name = str(parameters.get("row"))
        if name in ROWS and ROWS[name].thorough:
            return True
        held = "reference" in item.name or item.path.name == "test_dtypes.py"
        return " " in name and name in ROWS and (not held or parameters.get("dtype", "bfloat16") != "bfloat16")

    if not config.getoption("--thorough"):
        extra = [item for item in items if is_extra(item)]
        config.hook.pytest_deselected(items=extra)
        items[:] = [item for item in items if not is_extra(item)]
