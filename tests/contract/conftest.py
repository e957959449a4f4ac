"""Runs a contract test over every row of the catalogue, and in every floating dtype where it asks for one.

Second and further rows of a layer run in float32 and bfloat16 only, unless pytest is given `--thorough`.
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
        return " " in parameters.get("row", "") and parameters.get("dtype") in ("float16", "float64")

    if not config.getoption("--thorough"):
        extra = [item for item in items if is_extra(item)]
        config.hook.pytest_deselected(items=extra)
        items[:] = [item for item in items if not is_extra(item)]
