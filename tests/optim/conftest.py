"""Runs the optimizers' contract over every row of the catalogue, and in every floating dtype where it asks for one.

Wrappers, whose dtypes are those of what is inside, and second rows run in bfloat16 only, unless given `--thorough`.
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
    if further and parameters.get("dtype", "bfloat16") != "bfloat16":
        item.add_marker("thorough")
