"""Runs a contract test over every row of the catalogue, and in every floating dtype where it asks for one."""

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
