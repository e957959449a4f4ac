"""Mistakes in the description of a layer give errors when it is written or built: fields, parts, decorators."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import nn, optim
from tests.asserts import assert_raises, raised

X = jnp.ones((2, 6))
RNG = jax.random.key(0)


def test_a_part_that_is_never_called_is_named():
    @mlax.frozen
    class Forgets(mlax.Composite):
        up: nn.Linear = nn.Linear(3)
        down: nn.Linear = nn.Linear(6)

        def wire(self, sub, x):
            return sub.up(x)

    text, _ = raised(ValueError, Forgets().init, RNG, X)
    assert "wire never calls 'down'; call it as sub.down(x)" in text


def test_a_part_may_be_called_only_in_inference_mode():
    @mlax.frozen
    class Decides(mlax.Composite):
        up: nn.Linear = nn.Linear(3)
        decide: mlax.F = mlax.F(jnp.sign)

        def wire(self, sub, x):
            return sub.decide(sub.up(x)) if sub.inference_mode else sub.up(x)

    trainables, _ = Decides().init(RNG, X)
    assert set(trainables) == {"up"}


@pytest.mark.parametrize("name", ["0", "up-1", "_up", "inference_mode", ""])
def test_an_invalid_part_name_is_an_error(name):
    text, _ = raised(ValueError, mlax.Series(**{name: nn.Linear(3)}).init, RNG, X)
    assert f"{name!r} cannot name a part" in text and "identifier" in text


def test_two_parts_of_one_name_are_an_error():
    text, _ = raised(ValueError, mlax.Series, nn.Linear(3), linear_0=nn.Linear(4))
    assert "two parts are named 'linear_0'" in text


def test_the_error_of_a_typo_on_sub_lists_the_parts():
    @mlax.frozen
    class Typo(mlax.Composite):
        attend: nn.Linear = nn.Linear(3)
        project: nn.Linear = nn.Linear(6)

        def wire(self, sub, x):
            return sub.project(sub.atend(x))

    text, _ = raised(AttributeError, Typo().init, RNG, X)
    assert "has no part 'atend'; its parts are attend, project. Did you mean 'attend'?" in text


def test_a_part_that_is_not_a_layer_is_an_error():
    @mlax.frozen
    class Bare(mlax.Composite):
        def parts(self):
            return {"act": jnp.tanh}

        def wire(self, sub, x):
            return sub.act(x)

    text, _ = raised(TypeError, Bare().init, RNG, X)
    assert "part 'act'" in text and "mlax.F" in text


def test_a_part_called_on_two_widths_is_an_error():
    @mlax.frozen
    class Shared(mlax.Composite):
        up: nn.Linear = nn.Linear(3)

        def wire(self, sub, x):
            return sub.up(sub.up(x))

    text, _ = raised(ValueError, Shared().init, RNG, X)
    assert "part 'up' is called on float32[2, 6] and on float32[2, 3]" in text and "two parts" in text


def test_a_forgotten_decorator_is_named():
    class Undecorated(mlax.Layer):
        def init(self, rng, x):
            return None, None

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            return x, None

    text, _ = raised(TypeError, Undecorated)
    assert "put @mlax.frozen above the class" in text


def test_a_forgotten_decorator_is_named_even_if_the_class_defines_init():
    class Undecorated(mlax.Composite):
        def __init__(self):
            self.dense = nn.Linear(3)

        def wire(self, sub, x):
            return sub.dense(x)

    text, _ = raised(TypeError, lambda: Undecorated().init(RNG, X))
    assert text == "Undecorated is not a description yet; put @mlax.frozen above the class."
    _, note = raised(dataclasses.FrozenInstanceError, mlax.frozen(Undecorated))
    assert "write `name: type`, or `name: type = default`, in the class" in note


def test_the_error_of_sizes_as_in_other_libraries_says_what_a_layer_takes():
    text, _ = raised(TypeError, nn.Linear, 64, 128)
    assert text.startswith(
        "Linear takes features by position, but got 2 arguments; options are keyword-only: bias, kernel_init, "
    )
    assert text.endswith("Input sizes are inferred from the input.")
    text, _ = raised(TypeError, nn.Conv, 1, 8, 3)
    assert text.startswith(
        "Conv takes features, window by position, but got 3 arguments; options are keyword-only: strides, "
    )
    text, _ = raised(TypeError, nn.LayerNorm, 64)
    assert text.startswith(
        "LayerNorm takes nothing by position, but got 1 arguments; options are keyword-only: axes, eps, "
    )
    text, _ = raised(TypeError, nn.GLU, 64, 128)
    assert text.startswith(
        "GLU takes features by position, but got 2 arguments; options are keyword-only: activation, bias."
    )
    for layer, args in ((nn.MultiHeadAttention, (16, 4)), (nn.LSTMCell, (16, 12)), (nn.BatchNorm, (64,))):
        raised(TypeError, layer, *args)
    text, _ = raised(TypeError, mlax.Normal, 0.0, 0.02)
    assert text == "Normal takes std by position, but got 2 arguments."
    text, _ = raised(TypeError, nn.Linear)
    assert text.startswith(
        "Linear: missing a required argument: 'features'; it takes features; options are keyword-only"
    )


@pytest.mark.parametrize("room", [mlax, nn])
def test_optional_fields_are_keyword_only(room):
    drops = {"AlphaDropout", "ChannelDropout", "Dropout", "PathDropout"}  # a rate is what they are about
    for name in set(room.__all__) - drops:
        layer = getattr(room, name)
        if isinstance(layer, type) and issubclass(layer, mlax.Layer):
            for parameter in list(inspect.signature(layer).parameters.values()):
                by_place = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                assert not by_place or parameter.default is parameter.empty, (name, parameter.name)


def test_the_error_of_an_unknown_field_lists_the_fields_and_the_closest():
    text, _ = raised(TypeError, nn.Dropout, p=0.5)
    assert text == "Dropout has no field p; it has rate. Did you mean rate?"
    text, _ = raised(TypeError, nn.Linear, in_features=3, out_features=4)
    assert text.endswith("Did you mean features? Input sizes are inferred from the input.")
    text, _ = raised(TypeError, nn.BatchNorm, num_features=3)
    assert text.endswith("param_dtype. Input sizes are inferred from the input.")
    text, _ = raised(TypeError, optim.Adam, 1e-3, betas=(0.9, 0.99))
    assert text.endswith("Did you mean b1, b2?")
    text, _ = raised(TypeError, nn.Conv, 8, kernel_size=3)
    assert text.startswith("Conv has no field kernel_size; it has features, window, ")
    assert text.endswith("Did you mean window?")
    text, _ = raised(TypeError, optim.AdamW, lr=1e-3, weight_decay=0.1)
    assert text.startswith("AdamW has no field lr, weight_decay; it has rate, b1, b2, eps, decay, decayed, ")
    assert text.endswith("Did you mean rate, decay?")
    text, _ = raised(TypeError, nn.GLU, 4, activatoin=jax.nn.relu)
    assert text == "GLU has no field activatoin; it has features, activation, bias. Did you mean activation?"
    text, _ = raised(TypeError, mlax.override, nn.Linear(3), nn.Linear, gain=2)
    assert text.startswith("Linear(3) has no field gain; it has features, bias, ")


def test_a_type_error_of_the_author_is_left_unchanged():
    text, _ = raised(TypeError, nn.MLP, 64)
    assert text == "MLP: widths is 64, but must be a tuple of integers, one for each Linear."


def test_a_value_of_another_type_than_bool_or_tuple_is_an_error():
    text, _ = raised(TypeError, nn.Linear, 64, bias=128)
    assert text == "Linear: field `bias` is 128, but must be True or False."
    text, _ = raised(TypeError, mlax.override, nn.LSTMCell(3), nn.LSTMCell, peephole=12)
    assert text == "LSTMCell: field `peephole` is 12, but must be True or False."
    text, _ = raised(TypeError, nn.LayerNorm, axes=-1)
    assert text == "LayerNorm: field `axes` is -1, but must be a tuple, such as (-1,)."


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda size: nn.Linear(size), "Linear: features is {}, but must be an integer of at least 1."),
        (lambda size: nn.Conv(size, (3,)), "Conv: features is {}, but must be an integer of at least 1."),
        (lambda size: nn.Embed(3, size), "Embed: width is {}, but must be an integer of at least 1."),
    ],
)
def test_an_invalid_size_is_an_error(build, text):
    for size, kind in (("3", TypeError), (3.0, TypeError), (True, TypeError), (-3, ValueError), (0, ValueError)):
        assert raised(kind, build, size)[0] == text.format(repr(size))
    x = jnp.ones((2, 6, 3), jnp.int32 if isinstance(build(3), nn.Embed) else jnp.float32)
    assert raised(TypeError, build(None).init, RNG, x)[0] == text.format(None)


def test_a_value_that_is_not_an_integer_is_an_error():
    for value in (1.0, "1", True):
        text, _ = raised(TypeError, mlax.Map, nn.Linear(3), axis=value)
        assert text == f"Map: field `axis` is {value!r}, but must be an integer."


def test_a_fwd_that_forgets_the_state_is_named():
    @mlax.frozen
    class Forgets(mlax.Layer):
        def init(self, rng, x):
            return None, None

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            return x

    text, _ = raised(TypeError, Forgets().fwd, X, None)
    assert "fwd returned float32[2, 6], but must return a pair (y, non_trainables)" in text


def test_an_unhashable_field_is_named_with_its_remedy():
    text, _ = raised(TypeError, nn.LayerNorm, axes=[-1])
    assert "LayerNorm: field `axes` is a list, which is not hashable; pass a tuple" in text
    text, _ = raised(TypeError, nn.Dropout, jnp.ones(()))
    assert "field `rate` is an array" in text or "rate" in text


def test_the_error_names_a_string_that_is_not_a_dtype():
    text, _ = raised(TypeError, nn.Linear, 3, param_dtype="flaot32")
    assert "Linear: field `param_dtype` is 'flaot32', which is not a dtype" in text


@pytest.mark.parametrize("kind", [mlax.Series, mlax.Parallel])
def test_a_part_that_is_not_a_layer_is_an_error_at_construction(kind):
    name = kind.__name__
    text, _ = raised(TypeError, kind, [nn.Linear(3), nn.Linear(4)])
    assert text == f"{name}: layer 0 is a list, which is not a layer; pass the layers themselves: mlax.Series(*layers)."
    text, _ = raised(TypeError, kind, {"a": nn.Linear(3)})
    assert "layer 0 is a dict" in text and text.endswith("mlax.Series(**layers).")
    text, _ = raised(TypeError, kind, nn.Linear(3), nn.Flatten)
    assert text == f"{name}: layer 1 is the class Flatten, which is not a layer; did you mean Flatten()?"
    text, _ = raised(TypeError, kind, a=nn.Linear)
    assert text.endswith("did you mean Linear(...)?")
    text, _ = raised(TypeError, kind, act="relu")
    assert text == f"{name}: act is a str, which is not a layer; pass a layer."


def test_a_wrapper_accepts_only_a_layer():
    for wrap in (mlax.Remat, mlax.Map, functools.partial(mlax.Repeat, times=3)):
        text, _ = raised(TypeError, wrap, jax.nn.relu)
        assert text.endswith(": layer is the function relu, which is not a layer; wrap it: mlax.F(relu).")
    text, _ = raised(TypeError, mlax.Residual, nn.Linear(3), shortcut=nn.Flatten)
    assert text == "Residual: shortcut is the class Flatten, which is not a layer; did you mean Flatten()?"
    text, _ = raised(TypeError, mlax.Residual, nn.Linear(3), nn.Linear(3))
    assert text == "Residual takes layer by position, but got 2 arguments; options are keyword-only: shortcut."


def test_a_field_that_an_override_misspells_is_reported_in_one_line():
    text, _ = raised(TypeError, mlax.override, nn.MultiHeadAttention(4), nn.MultiHeadAttention, cach=10)
    assert text.startswith("MultiHeadAttention(4) has no field cach; it has heads, ") and "Did you mean cache?" in text


def test_part_names_with_the_same_hash_are_rejected():
    text, _ = raised(ValueError, mlax.Series(plumless=nn.Linear(3), buckeroo=nn.Linear(3)).init, RNG, X)
    assert "'plumless' and 'buckeroo' have the same hash" in text and text.endswith("rename one.")


def test_a_combinator_without_what_it_combines_is_an_error():
    assert_raises(mlax.Parallel, TypeError, ("Parallel: pass at least one layer",))
    assert_raises(lambda: mlax.Tied(nn.Linear(3)), TypeError, ("Tied: pass at least one tie: Tied(model, Tie(",))
