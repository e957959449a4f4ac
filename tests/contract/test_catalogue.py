"""The catalogue is complete."""

import inspect

import mlax
from mlax import dtypes, nn, place
from tests.catalogue import LAYERS


def test_every_public_layer_has_a_row():
    layers = {
        name
        for room in (mlax, nn, dtypes, place)
        for name in room.__all__
        if inspect.isclass(value := getattr(room, name))
        and issubclass(value, mlax.Layer)
        and not inspect.isabstract(value)
    }
    assert layers == {type(row.layer("float32")).__name__ for row in LAYERS.values()}


def test_a_row_is_named_after_the_layer_it_builds():
    for name, row in LAYERS.items():
        assert name.split()[0] == type(row.layer("float32")).__name__


def test_every_layer_has_one_row_that_is_not_a_variant():
    layers = [type(row.layer("float32")).__name__ for row in LAYERS.values() if not row.variant and not row.thorough]
    assert len(layers) == len(set(layers))
    assert set(layers) == {type(row.layer("float32")).__name__ for row in LAYERS.values()}
