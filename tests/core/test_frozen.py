"""frozen: descriptions that are equal by value."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn
from tests.asserts import compilations


@mlax.frozen
class Point:
    x: Any
    y: Any = 0.0
    dtype: mlax.DType = None

    def norm(self):
        return self.x + self.y


def test_fields_of_one_type_and_value_are_equal():
    assert Point(1.0) == Point(1.0, 0.0)
    assert Point(1.0) != Point(1) and Point(1) != Point(True)
    assert Point(0.0) != Point(-0.0)
    assert Point(float("nan")) == Point(float("nan"))
    assert Point((1, 2)) != Point((1.0, 2.0))


def test_a_scalar_of_numpy_is_a_python_number():
    point = Point(np.float64(0.5), (np.int64(2), np.float32(0.25)))
    assert point == Point(0.5, (2, 0.25)) and type(point.x) is float and type(point.y[0]) is int
    assert Point(np.bool_(True)) == Point(True)
    with pytest.raises(TypeError, match="field `x` is an array"):
        Point(np.ones(()))


def test_a_dtype_is_the_same_however_it_is_written():
    assert Point(1.0, dtype="bfloat16") == Point(1.0, dtype=jnp.bfloat16) == Point(1.0, dtype=jnp.dtype("bfloat16"))
    assert Point(1.0, dtype=jnp.float32).dtype == "float32"


def test_bound_methods_of_equal_descriptions_are_the_same_object():
    assert Point(1.0).norm is Point(1.0).norm
    assert Point(1.0).norm is not Point(2.0).norm
    assert nn.Linear(3).fwd is nn.Linear(3).fwd


def test_a_compilation_outlives_its_description():
    traces = []
    count = mlax.F(lambda x: traces.append(1) or x)
    for _ in range(3):
        jax.jit(mlax.Series(count).fwd)(jnp.ones(2), None)
    assert len(traces) == 1


def test_a_description_can_be_a_static_argument():
    run = jax.jit(lambda layer, x, w: layer.fwd(x, w)[0], static_argnums=0)
    trainables, _ = nn.Linear(3).init(jax.random.key(0), jnp.ones((1, 2)))
    x = jnp.ones((1, 2))
    run(nn.Linear(3), x, trainables)
    with compilations() as found:
        run(nn.Linear(3), x, trainables)
    assert not found


def test_the_repr_shows_only_what_differs_from_the_default():
    assert repr(nn.Linear(3)) == "Linear(3)"
    assert repr(nn.Linear(3, bias=False)) == "Linear(3, bias=False)"
    assert repr(mlax.F(jnp.tanh)) == "F(tanh)"


def test_a_tracer_in_a_field_is_an_error():
    with pytest.raises(TypeError, match="field `rate` is an array"):
        jax.jit(lambda rate: mlax.override(nn.Dropout(0.5), nn.Dropout, rate=rate))(0.5)
