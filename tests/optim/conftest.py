"""Runs the optimizers' contract over every row of the catalogue, and in every floating dtype where it asks for one.

What is computed is computed in float32 and bfloat16, and traced in all dtypes. Wrappers, whose dtypes are those of what
is inside, and second rows run in bfloat16 only. With `--thorough` every row runs in every dtype.
"""

import pytest

from tests.catalogue.optimizers import ROWS


@pytest.fixture(params=ROWS)
def row(request):
    return ROWS[request.param]


def pytest_itemcollected(item):
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    name = str(parameters.get("row"))  # rows of schedules are no names
    further = name in ROWS and (" " in name or ROWS[name].optimizer.within())
    traced = "rounded" in item.name
    rare = name in ROWS and not traced and parameters.get("dtype") in ("float16", "float64")
    if rare or (further and parameters.get("dtype", "bfloat16") != "bfloat16"):
        item.add_marker("thorough")
