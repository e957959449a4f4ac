"""A test of the contract runs over every optimizer of the catalogue, and in every floating dtype if it asks for one."""

import pytest

from tests.catalogue import OPTIMIZERS


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def row(request):
    return request.param
