"""A layer is a frozen, hashable description that is equal by value."""

import copy
import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from mlax.core import F, with_fields


def test_equal_descriptions_are_equal_and_hash_equal(row):
    assert row.layer("float32") == row.layer("float32")
    assert hash(row.layer("float32")) == hash(row.layer("float32"))


def test_a_description_cannot_be_changed(row):
    layer = row.layer("float32")
    for field in dataclasses.fields(layer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layer, field.name, None)


def test_copies_and_pickles_are_equal(row):
    layer = row.layer("float32")
    assert copy.deepcopy(layer) == layer
    assert copy.copy(layer) == layer
    assert pickle.loads(pickle.dumps(layer)) == layer


def test_a_layer_prints_its_name_and_no_addresses(row):
    layer = row.layer("float32")
    for text in (repr(layer), str(layer), layer._repr_html_()):
        assert type(layer).__name__ in text or isinstance(layer, F)
        assert " at 0x" not in text
        assert "edits" not in text


@pytest.mark.parametrize(
    "bad", [jnp.ones(2), np.ones(2), np.complex64(1), [1], {"a": {}}], ids=lambda bad: type(bad).__name__
)
def test_an_array_or_unhashable_value_is_an_error_that_names_the_layer(row, bad):
    layer = row.layer("float32")
    for field in dataclasses.fields(layer):
        with pytest.raises((TypeError, ValueError), match=f"^{type(layer).__name__}: "):
            with_fields(layer, **{field.name: bad})


def test_the_repr_is_the_call_that_builds_the_layer(row):
    layer = row.layer("float32")
    assert repr(layer).startswith(type(layer).__name__ + "(")
    assert "object at 0x" not in repr(layer)
