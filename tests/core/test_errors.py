"""Mistakes in a call give errors that say what came, what was wanted and what to do, with the layer's path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn, optim, train
from tests.asserts import assert_raises, raised
from tests.layers import Block, Count

X = jnp.ones((2, 6))
RNG = jax.random.key(0)


def model(inner=None):
    return mlax.Series(first=nn.Linear(6), blocks=mlax.Series(a=inner or Block(6), b=nn.Linear(6)))


def test_the_error_of_a_wrong_dtype_names_the_layer_both_dtypes_and_the_path():
    trainables, state = model().init(RNG, X)
    trainables = mlax.replace(trainables, "blocks/b/kernel", trainables["blocks"]["b"]["kernel"].astype(jnp.float16))
    text, note = raised(TypeError, model().fwd, X, trainables, state, inference_mode=True)
    assert text.startswith("Linear(6): the input is float32 but kernel is float16") and "param_dtype" in text
    assert "in blocks/b, called on float32[2, 6]" in note


def test_the_error_of_a_wrong_rank_names_the_shape_and_the_remedy():
    text, note = raised(ValueError, mlax.Series(flat=mlax.F(jnp.max), head=nn.Linear(3)).init, RNG, X)
    assert "Linear(3): the input is a scalar" in text and "reshape" in text
    assert "in head, called on float32[]" in note


@pytest.mark.parametrize(
    ("layer", "x", "wrong", "text"),
    [
        (
            nn.Linear(5),
            X,
            {"kernel": (6, 7)},
            "needs kernel to be float32[6, 5], but it is float32[6, 7]; pass what init",
        ),
        (
            nn.Linear(5),
            X,
            {"kernel": (6, 1)},
            "needs kernel to be float32[6, 5], but it is float32[6, 1]; pass what init",
        ),
        (
            nn.LayerNorm(),
            X,
            {"scale": (1,)},
            "needs scale to be float32[6], but it is float32[1]; pass an input with 1",
        ),
        (nn.LayerNorm(), X, {"scale": (2, 1)}, "needs scale to be float32[6], but it is float32[2, 1]; pass what init"),
        (
            nn.Embed(10, 4),
            X.astype(int),
            {"table": (3, 9)},
            "needs table to be float32[10, 4], but it is float32[3, 9]",
        ),
    ],
)
def test_a_variable_of_another_shape_is_an_error(layer, x, wrong, text):
    trainables, state = layer.init(RNG, x)
    trainables |= {name: jnp.ones(shape) for name, shape in wrong.items()}
    text = f"{layer}: the input is {x.dtype}[2, 6], which {text}"
    assert raised(ValueError, layer.fwd, x, trainables, state)[0].startswith(text)
    assert raised(ValueError, jax.jit(layer.fwd), x, trainables, state)[0].startswith(text)


def test_the_error_of_an_input_of_another_width_names_the_input():
    trainables, _ = nn.Linear(5).init(RNG, X)
    text, _ = raised(ValueError, nn.Linear(5).fwd, jnp.ones((2, 8)), trainables)
    assert text == (
        "Linear(5): the input is float32[2, 8], which needs kernel to be float32[8, 5], but it is float32[6, 5]; "
        "pass an input with 6 in place of 8, or what init returned for this one."
    )
    text, _ = raised(ValueError, nn.Linear(2).fwd, X, trainables)  # a batch of 2 is not what gives the bias its size
    assert text.endswith("but it is float32[5]; pass what init returned for this layer.")
    text, _ = raised(ValueError, nn.Linear(5).fwd, X.T, trainables)
    assert text.endswith("but it is float32[6, 5]; did you mean x.T?")


def test_the_error_of_a_missing_state_says_where_it_comes_from():
    decoder, tokens = nn.MultiHeadAttention(2, causal=True, cache=4), jnp.ones((1, 3, 6))
    trainables, _ = decoder.init(RNG, tokens)
    text, note = raised(ValueError, decoder.fwd, tokens, trainables)
    assert text.endswith("Pass the state, such as a cache or running statistics, that init(rng, x)[1] returned.")
    assert note.startswith("in position, called on")
    text, _ = raised(ValueError, nn.KeyValueCache(4).init, RNG, tokens)
    assert text.endswith("nn.MultiHeadAttention(heads, causal=True, cache=length) passes that itself.")


def test_a_state_of_another_shape_is_an_error():
    trainables, state = nn.BatchNorm().init(RNG, X)
    wrong = {**state, "mean": jnp.zeros(5)}
    text, _ = raised(ValueError, nn.BatchNorm().fwd, X, trainables, wrong)
    assert "the input is float32[2, 6], which needs mean to be float32[6], but it is float32[5]" in text


def test_inside_shard_map_a_layer_may_compute_with_a_shard_of_its_weights():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    layer, split = nn.Linear(4, bias=False), jax.P(None, "model")
    trainables, _ = layer.init(RNG, X)

    def fwd(x, trainables):
        return layer.fwd(x, trainables)[0]

    parts = jax.shard_map(fwd, mesh=mesh, in_specs=(jax.P(), {"kernel": split}), out_specs=split)
    assert jnp.allclose(parts(X, trainables), fwd(X, trainables), atol=1e-6)
    whole = jax.shard_map(fwd, mesh=mesh, in_specs=(jax.P(), {"kernel": jax.P()}), out_specs=split)
    text, _ = raised(ValueError, whole, X, {"kernel": jnp.ones((1, 6, 4))})
    assert "which needs kernel to be float32[6, 4], but it is float32[1, 6, 4]" in text


def test_the_error_of_a_missing_key_names_the_dropout():
    trainables, state = model().init(RNG, X)
    text, note = raised(ValueError, model().fwd, X, trainables, state)
    assert "dropout needs a key; pass rng=, or inference_mode=True" in text
    assert "in blocks/a/drop, called on float32[2, 6]" in note


def test_missing_and_extra_entries_are_named():
    trainables, state = model().init(RNG, X)
    del trainables["blocks"]["b"]["bias"]
    text, note = raised(ValueError, model().fwd, X, trainables, state, inference_mode=True)
    assert "trainables lacks bias; it must hold bias, kernel" in text or "it must hold kernel, bias" in text
    assert "in blocks/b" in note
    trainables["blocks"]["b"].update(bias=jnp.zeros(6), gain=jnp.ones(6))
    text, _ = raised(ValueError, model().fwd, X, trainables, state, inference_mode=True)
    assert "trainables has extra gain" in text


def test_missing_parts_and_extra_parts_are_named():
    trainables, state = model().init(RNG, X)
    text, note = raised(ValueError, model().fwd, X, {"first": trainables["first"]}, state, inference_mode=True)
    assert "trainables lacks" in text and "in blocks/a/norm" in note
    text, _ = raised(ValueError, model().fwd, X, {**trainables, "tail": {}}, state, inference_mode=True)
    assert "has extra 'tail'; the parts are first, blocks" in text


def test_missing_state_is_named():
    text, note = raised(ValueError, mlax.Series(count=Count()).fwd, X, None)
    assert "non_trainables lacks calls" in text and "in count" in note


def test_trainables_that_are_not_a_dict_are_named():
    text, _ = raised(TypeError, nn.Linear(3).fwd, X, jnp.ones((6, 3)))
    assert "trainables is float32[6, 3], but must be a dict of arrays or None" in text
    text, _ = raised(TypeError, model().fwd, X, [1])
    assert "must be a dict" in text


def test_a_repeated_layer_that_changes_the_shape_is_an_error():
    text, _ = raised(ValueError, mlax.Series(mlax.Repeat(nn.Linear(3), 2)).init, RNG, X)
    assert "maps float32[2, 6] to float32[2, 3]" in text and "must have the same shapes and dtypes" in text


@pytest.mark.parametrize("mode", ["scan", "remat", "unroll"])
def test_a_repeated_layer_that_changes_the_shape_is_an_error_at_the_top_level_too(mode):
    text, _ = raised(ValueError, mlax.Repeat(nn.Linear(3), 2, mode=mode).init, RNG, X)
    assert "maps float32[2, 6] to float32[2, 3]" in text and "must have the same shapes and dtypes" in text


def test_an_error_in_an_unrolled_repeat_names_the_repetition():
    layer = mlax.Series(blocks=mlax.Repeat(Block(6), 3, mode="unroll"))
    trainables, state = layer.init(RNG, X)
    _, note = raised(ValueError, layer.fwd, X, trainables, state)
    assert "in blocks/0/drop, called on" in note


def test_python_scalars_as_input_are_errors():
    text, _ = raised(TypeError, nn.Linear(3).init, RNG, [1.0, 2.0])
    assert "every leaf must be an array" in text and "jnp.asarray" in text


def test_float64_that_jax_would_truncate_is_an_error():
    trainables, _ = nn.Linear(3).init(RNG, X)
    doubles = np.ones((2, 6))
    for function, args in (
        (nn.Linear(3).init, (RNG, doubles)),
        (nn.Linear(3).init, (RNG, jax.ShapeDtypeStruct((2, 6), np.float64))),
        (nn.Linear(3).fwd, (doubles, trainables)),
        (mlax.Series(nn.Linear(3)).fwd, (doubles, {"linear_0": trainables})),
    ):
        text, _ = raised(TypeError, function, *args)
        assert text.startswith(
            "the input is float64[2, 6], which JAX would truncate to 32 bits; pass x.astype(np.float32)"
        )
    with jax.enable_x64(True):
        assert nn.Linear(3).init(RNG, doubles)[0]["kernel"].dtype == jnp.float64
    y, _ = nn.Embed(5, 3).fwd(np.ones((2, 6), np.int64), nn.Embed(5, 3).init(RNG, np.ones((2, 6), np.int64))[0])
    assert y.shape == (2, 6, 3)


@pytest.mark.parametrize("x", [None, (X, X), [X], {"a": X}], ids=lambda x: type(x).__name__)
def test_an_input_that_is_not_an_array_is_an_error(x):
    for layer in (nn.Linear(3), nn.LayerNorm(), nn.Flatten(), mlax.Series(nn.Linear(3)), nn.Mamba(3)):
        text, _ = raised(TypeError, layer.init, RNG, x)
        assert "the input is " in text and text.endswith("but must be an array.")


def test_the_error_of_an_integer_input_names_the_remedy():
    for layer in (nn.Linear(3), nn.LayerNorm(), nn.Scaler()):
        text, _ = raised(TypeError, layer.init, RNG, jnp.ones((2, 6), jnp.int32))
        assert "the input is int32[2, 6], but must have a floating dtype; cast it" in text
    wide = nn.Linear(3, param_dtype="float32")
    trainables, _ = nn.Linear(3).init(RNG, X)
    raised(TypeError, wide.fwd, jnp.ones((2, 6), jnp.int32), trainables)


def test_the_error_of_a_tensor_of_another_library_names_the_remedy():
    class Tensor:
        shape, dtype, ndim = (2, 6), "torch.float32", 2

    Tensor.__module__ = "torch"
    for layer in (nn.Linear(3), mlax.Series(nn.Linear(3))):
        trainables, _ = layer.init(RNG, X)
        for function, args in ((layer.init, (RNG, Tensor())), (layer.fwd, (Tensor(), trainables))):
            text, _ = raised(TypeError, function, *args)
            assert text == "the input is a torch.Tensor; pass x.numpy()."
    text, note = raised(TypeError, mlax.Series(a=nn.Linear(3)).fwd, X, {"a": {"kernel": Tensor(), "bias": Tensor()}})
    assert text == "Linear(3): bias is a torch.Tensor; convert it by jnp.asarray(leaf.numpy())."
    assert "in a, called on" in note


def test_the_error_of_calling_a_layer_says_what_to_call():
    text, _ = raised(TypeError, lambda: nn.Linear(3)(X))
    assert text.startswith("Linear(3) is a description and cannot be called; write y, non_trainables = model.fwd(")

    @mlax.frozen
    class Calls(mlax.Composite):
        dense: nn.Linear = nn.Linear(3)

        def wire(self, sub, x):
            return self.dense(x)

    text, _ = raised(TypeError, Calls().init, RNG, X)
    assert text == "Calls: wire calls self.dense(x), which is a description; write sub.dense(x)."


def test_a_layer_where_a_function_is_needed_is_an_error():
    for build in (lambda: nn.GLU(3, activation=nn.Linear(3)), lambda: nn.MLP((3,), activation=nn.Linear(3))):
        text, _ = raised(TypeError, build)
        assert "activation is Linear(3), but must be a function" in text
    text, _ = raised(TypeError, train.step, nn.Linear(3), optim.SGD(0.1))
    assert text == "train.step: the objective is Linear(3), but must be a function like `fwd`."


def test_the_error_of_swapped_arguments_says_so_and_prints_no_array():
    text, _ = raised(TypeError, nn.Linear(3).init, X, RNG)
    assert text == (
        "Linear(3): init needs a key, but rng is float32[2, 6]; pass jax.random.key(0), for example. "
        "Are the arguments swapped? The call is init(rng, x)."
    )
    text, _ = raised(TypeError, nn.Linear(3).init, 0, X)
    assert text == "Linear(3): init needs a key, but rng is 0; pass jax.random.key(0), for example."
    text, _ = raised(TypeError, nn.Linear(3).fwd, nn.Linear(3).init(RNG, X)[0], X)
    assert text == "Linear(3): fwd(x, trainables): the input is a dict; are the arguments swapped?"
    text, _ = raised(TypeError, model().fwd, model().init(RNG, X)[0], X)
    assert text.endswith("fwd(x, trainables): the input is a dict; are the arguments swapped?")
    text, _ = raised(TypeError, nn.Linear(3).fwd, X, {}, rng=X)
    assert text == "Linear(3): rng is float32[2, 6], but must be a key; pass jax.random.key(0), for example."


def test_the_error_of_swapped_variables_says_so():
    text, _ = raised(ValueError, nn.Linear(3).fwd, X, None, nn.Linear(3).init(RNG, X)[0])
    assert text == (
        "Linear(3): trainables lacks bias, kernel; it must hold bias, kernel. "
        "Are trainables and non_trainables swapped?"
    )
    trainables, state = nn.BatchNorm().init(RNG, X)
    text, _ = raised(ValueError, nn.BatchNorm().fwd, X, state, trainables)
    assert "trainables lacks scale, shift and has extra mean, var" in text
    assert text.endswith("Are trainables and non_trainables swapped?")


def test_the_error_of_passing_the_pair_from_init_as_one_argument_says_so():
    variables = model().init(RNG, X)
    text, _ = raised(TypeError, model().fwd, X, variables)
    assert "fwd(x, *variables)" in text


def test_a_pattern_that_matches_no_parameter_is_an_error():
    text, _ = raised(KeyError, mlax.count, {"a": jnp.ones(3)}, "b/**")
    assert text == "'b/**' matches nothing; there are a."


STACK = {"up": {"kernel": X, "bias": X}, "norm": {"scale": X}, "blocks": {"stacked": {"a": {"kernel": X}}}}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("up/weight", "did you mean 'up/kernel'?"),
        ("**/weight", "did you mean '**/kernel'?"),
        ("norm/weight", "did you mean 'norm/scale'?"),
        ("norm/gamma", "did you mean 'norm/scale'?"),
        ("blocks/1/a/kernel", "are stacked: index 1 of the first axis of 'blocks/stacked/a/kernel'."),
        ("zzz/*", "there are blocks/stacked/a/kernel, norm/scale, up/bias, up/kernel."),
        ("nrom/*", "did you mean 'norm/*'?"),
        ("**/sclae", "did you mean '**/scale'?"),
        ("blocks/1", "are stacked: index 1 of the first axis of 'blocks/stacked'."),
        ("blocks/0/**", "are stacked: index 0 of the first axis of 'blocks/stacked/**'."),
    ],
)
def test_the_error_of_a_path_of_another_library_says_what_it_is_here(path, text):
    for function in (mlax.select, mlax.freeze, mlax.count):
        assert raised(KeyError, function, STACK, path)[0].endswith(text)


def test_the_path_of_an_error_in_init_names_the_stack():
    repeated = mlax.Series(blocks=mlax.Repeat(mlax.Series(a=nn.Conv(6, 3)), 3))
    assert raised(ValueError, repeated.init, RNG, X)[1].startswith("in blocks/stacked/a, called on float32[2, 6]")


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("optim", "Lbfgs", "did you mean LBFGS?"),
        ("optim", "CosineAnnealingLR", "write optim.Cosine, which is passed as the rate."),
        ("optim", "Adfactor", "did you mean Adafactor?"),
        ("train", "Accuracy", "did you mean accuracy?"),
        ("train", "Trainer", "write train.fit."),
        ("train", "xyz", "dir(mlax.train) lists what it has."),
    ],
)
def test_the_error_of_a_missing_name_suggests_one(module, name, text):
    assert raised(AttributeError, getattr, getattr(mlax, module), name)[0] == f"mlax.{module} has no {name}; {text}"


def test_the_error_of_an_index_into_the_layers_of_a_repeat_names_the_stack():
    repeated = mlax.Series(blocks=mlax.Repeat(mlax.Series(a=nn.Linear(6)), 3))
    for call in (lambda: mlax.get(repeated, "blocks/0/a"), lambda: mlax.replace(repeated, "blocks/0/a", nn.Linear(6))):
        assert "are stacked: index 0 of the first axis of 'blocks/stacked/a'" in raised(KeyError, call)[0]


@pytest.mark.parametrize("function", [mlax.paths, mlax.count, lambda tree: mlax.select(tree, "**")])
def test_a_model_or_a_pair_in_place_of_variables_is_an_error(function):
    for wrong in (nn.Linear(3), ({}, None)):
        assert "takes variables, as init returns them, but got" in raised(TypeError, function, wrong)[0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mlax.F(nn.Linear), "F: function is the class Linear, which is not a layer; did you mean Linear(...)?"),
        (lambda: mlax.Series(mlax.Identity()), "F: Identity() is an initializer, not a function of the input; for a"),
        (lambda: nn.MLP(3, 4), "MLP takes widths by position, but got 2 arguments; options are keyword-only: activat"),
        (
            lambda: nn.Reshape(3, 4),
            "Reshape takes shape by position, but got 2 arguments. Did you mean Reshape((3, 4))",
        ),
        (lambda: nn.LoRA(nn.Linear, 2), "LoRA: layer is the class Linear, which is not a layer; did you mean Linear("),
        (lambda: nn.LoRA(nn.Linear(3), 2, alpha="x"), "LoRA: field `alpha` is 'x', but must be a number or None."),
        (lambda: nn.MoE(nn.Linear, 3), "MoE: expert is the class Linear, which is not a layer; did you mean Linear(.."),
        (lambda: nn.MoE(nn.Linear(3), 3, capacity_factor="a"), "MoE: field `capacity_factor` is 'a', but must be a n"),
        (lambda: nn.Dropout("a"), "Dropout: field `rate` is 'a', but must be a number."),
        (lambda: nn.Dropout(True), "Dropout: field `rate` is True, but must be a number."),
        (lambda: nn.Mamba(3, rank=1.5), "Mamba: field `rank` is 1.5, but must be an integer or None."),
        (
            lambda: nn.LSTMCell(3, projection="a"),
            "LSTMCell: field `projection` is 'a', but must be an integer or None.",
        ),
        (lambda: mlax.Normal("a"), "Normal: field `std` is 'a', but must be a number."),
        (lambda: mlax.Map(nn.Linear(3), variables=1), "Map: field `variables` is 1, but must be 0 or None."),
        (lambda: mlax.Remat(nn.Linear(3), policy="dots"), "Remat: field `policy` is 'dots', but must be a function or"),
        (lambda: mlax.Tie(1, "a"), "Tie: field `leaf` is 1, but must be a string."),
        (
            lambda: mlax.Repeat([nn.Linear(3)], 2),
            "Repeat: field `layer` is a list, which is not hashable; pass one lay",
        ),
        (lambda: nn.MLP((3, -4)), "MLP: widths is (3, -4), but each must be at least 1."),
        (lambda: mlax.frozen(len), "frozen: <built-in function len> is not a class; put @mlax.frozen above a class."),
        (
            lambda: mlax.override(nn.Linear(3), nn.Linear(3)),
            "override: the kind is Linear(3), but must be a class: over",
        ),
        (
            lambda: mlax.override(nn.Linear(3), nn.Linear),
            "override: pass the fields to set: override(model, Linear, fi",
        ),
        (
            lambda: mlax.override(nn.Linear, nn.Linear, bias=False),
            "override: the model is the class Linear, which is n",
        ),
        (
            lambda: mlax.replace(model(), "first", jax.nn.relu),
            "replace: the new part is the function relu, which is no",
        ),
        (lambda: mlax.layers({}), "layers: the model is a dict, which is not a layer"),
        (lambda: mlax.select({"a": X}), "select: pass at least one pattern"),
        (lambda: mlax.freeze({"a": X}), "freeze: pass at least one pattern"),
        (
            lambda: mlax.merge({"a": X}, X),
            "merge: got float32[2, 6], but takes trees of variables: nested dicts, or Non",
        ),
        (lambda: mlax.rename({"a": X}, ("a", "b")), "rename: names is a tuple, but must be a dict"),
        (
            lambda: dtypes.audit(model(), X),
            "audit: Series(...) is a layer, but a function is audited: audit(model.fwd, ",
        ),
        (
            lambda: mlax.Tied(model(), mlax.Tie("a", to="b"), mlax.Tie("b", to="c")),
            "Tied: 'a' is tied to 'b', which is",
        ),
        (
            lambda: mlax.Tied(model(), mlax.Tie("a", to="b"), mlax.Tie("a", to="c")),
            "Tied: 'a' is tied twice; tie it on",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(call, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_a_stacked_variable_of_the_wrong_length_is_named():
    model = mlax.Repeat(nn.Linear(X.shape[-1]), 3)
    trainables, _ = mlax.Repeat(nn.Linear(X.shape[-1]), 2).init(RNG, X)
    text, _ = raised(ValueError, model.fwd, X, trainables)
    assert "bias has the shape (2, " in text and "must have a leading axis of 3" in text


def test_init_and_fwd_on_the_class_or_without_arguments_say_what_to_write():
    x = jnp.ones((2, 6))
    words = ("Linear.init is called on the class; make a layer first: Linear(...).init(rng, x).",)
    assert_raises(lambda: nn.Linear.init(jax.random.key(0), x), TypeError, words)  # pyright: ignore
    words = ("Linear.fwd is called on the class; make a layer first: Linear(...).fwd(x, trainables, non_trainables).",)
    assert_raises(lambda: nn.Linear.fwd(x, None), TypeError, words)  # pyright: ignore
    layer: mlax.Layer = nn.Linear(3)
    words = ("Linear(3): an argument is missing; the call is init(rng, x).",)
    assert_raises(lambda: layer.init(x), TypeError, words)  # pyright: ignore
    words = ("Linear(3): an argument is missing; the call is fwd(x, trainables, non_trainables).",)
    assert_raises(lambda: layer.fwd(x), TypeError, words)  # pyright: ignore
