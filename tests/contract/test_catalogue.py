"""The catalogue is complete."""

import inspect

import mlax
from mlax import dtypes, nn, place
from tests.catalogue import ROWS


def test_every_public_layer_has_a_row():
    layers = {
        name
        for room in (mlax, nn, dtypes, place)
        for name in room.__all__
        if inspect.isclass(value := getattr(room, name))
        and issubclass(value, mlax.Layer)
        and not inspect.isabstract(value)
    }
    assert layers == {name.split()[0] for name in ROWS}


def test_a_row_is_named_after_the_layer_it_builds():
    for name, row in ROWS.items():
        assert type(row.layer("float32")).__name__ == name.split()[0]
