"""A test of the contract runs over every layer of the catalogue, and in every floating dtype where it asks for one."""

import pytest

from tests.catalogue import LAYERS


@pytest.fixture(params=LAYERS.values(), ids=LAYERS)
def row(request):
    if request.param.quantized and request.node.get_closest_marker("gradients"):
        pytest.skip(f"a kernel in {request.param.quantized} has no gradient")
    return request.param
