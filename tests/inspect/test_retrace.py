"""retrace names what changed whenever a function is compiled again, and what to do about it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mlax import inspect


@pytest.fixture
def double():
    def double(x, rate=1.0):
        return jax.tree.map(lambda leaf: leaf * rate, x)

    return inspect.retrace(jax.jit(double))


def test_a_shape_that_changes_in_each_call_is_reported_each_time(double, capsys):
    for size in (3, 4, 4, 5):
        double({"a": jnp.ones(size), "b": jnp.ones(2)})
    assert [each.call for each in double.compilations] == [1, 2, 4]
    ((change,), (last,)) = (each.changes for each in double.compilations[1:])
    assert change[:3] == ("x/a", "float32[3]", "float32[4]") and "pad it" in change.advice
    assert last[:3] == ("x/a", "float32[4]", "float32[5]")  # the closest of those before
    assert "double: call 2 compiled in" in capsys.readouterr().err
    assert str(double).startswith("3 compilations in 4 calls\ncall 1 compiled in")


def test_a_python_number_in_place_of_an_array_is_weakly_typed(double):
    x = jnp.ones(3)
    double(x, jnp.float32(2.0))
    double(x, 2.0)
    double(x, 3.0)
    (_, second) = double.compilations
    (change,) = second.changes
    assert (
        change[:3] == ("rate", "float32[]", "float32[], weakly typed")
        and "jnp.asarray(value, 'float32')" in change.advice
    )


def test_a_dtype_a_structure_and_a_sharding_are_named(double):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    double(jnp.ones(8))
    double(np.ones(8, np.float16))
    double({"y": jnp.ones(8)})
    double(jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data"))))
    dtype, structure, sharding = (each.changes for each in double.compilations[1:])
    assert dtype[0][:3] == ("x", "float32[8]", "float16[8]") and "astype('float32')" in dtype[0].advice
    assert {each.name for each in structure} == {"x", "x/y"}
    assert "data" in sharding[0].after and "device_put" in sharding[0].advice


def test_static_values_and_objects_that_are_compared_by_identity_are_named():
    @functools.partial(jax.jit, static_argnames=("n", "f"))
    def apply(x, n, f):
        return f(x) * n

    watched = inspect.retrace(apply, show=False)
    for n in (1, 2):
        watched(jnp.ones(3), n, jnp.sin)
    watched(jnp.ones(3), 2, lambda x: x)
    number, function = (each.changes for each in watched.compilations[1:])
    assert number[0][:3] == ("n", "1", "2") and "static_argnames" in number[0].advice
    assert function[0].name == "f" and "compared by identity" in function[0].advice
    with pytest.raises(ValueError, match="hashable") as error:
        watched(jnp.ones(3), 2, [1])
    assert "if f, a list, is the static argument" in "".join(error.value.__notes__)


def test_a_change_of_the_configuration_is_not_blamed_on_the_arguments(double):
    double(jnp.ones(3))
    with jax.default_matmul_precision("float32"):
        double(jnp.ones(3))
    assert "although no argument changed" in str(double.compilations[1])


def test_a_function_that_is_not_jitted_is_refused():
    with pytest.raises(TypeError, match=r"inspect.retrace\(jax.jit\(sum\)\)"):
        inspect.retrace(sum)
