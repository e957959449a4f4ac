"""Runs the optimizers' contract over every row of the catalogue, and in every floating dtype where it asks for one.

Wrappers, whose dtypes are those of what is inside, and second rows run in bfloat16 only, unless given `--thorough`.
"""

import jax
import pytest

from tests.catalogue.optimizers import ROWS
from tests.catalogue.row import FLOATS


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
        further = name in ROWS and (" " in name or ROWS[name].optimizer.within())
        return further and parameters.get("dtype", "bfloat16") != "bfloat16"

    if not config.getoption("--thorough"):
        extra = [item for item in items if is_extra(item)]
        config.hook.pytest_deselected(items=extra)
        items[:] = [item for item in items if not is_extra(item)]
