"""Runs a contract test over every row of the catalogue, and in every floating dtype where it asks for one.

What is computed is computed in float32 and bfloat16, and traced in all dtypes. Second and further rows of a layer are
held only to what they compute, in one dtype, the one in which most goes wrong; a few are left out. With `--thorough`
every row is held to everything in every dtype.
"""

import pytest

from tests.catalogue import ROWS


@pytest.fixture(params=ROWS)
def row(request):
    return ROWS[request.param]


def pytest_itemcollected(item):
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    name = parameters.get("row")
    if name not in ROWS:
        return
    held = "reference" in item.name or item.path.name == "test_dtypes.py"
    further = " " in name and (not held or parameters.get("dtype", "bfloat16") != "bfloat16")
    rare = item.path.name != "test_dtypes.py" and parameters.get("dtype") in ("float16", "float64")
    if further or rare or ROWS[name].thorough:
        item.add_marker("thorough")
