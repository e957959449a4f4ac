"""Attention against PyTorch and its definition, in each of its forms, and decoding against the uncached pass."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlax
from mlax import dtypes, nn, ops
from tests.arrays import normal, normals
from tests.asserts import assert_close_to_scale
from tests.catalogue.attention import attend
from tests.layers import fwd

RNG = jax.random.key(0)
KERNELS = ("xla", "chunked")
STATIC = ("causal", "window", "alibi", "softcap", "accum_dtype", "implementation")
run = jax.jit(ops.attention, static_argnames=STATIC)


@pytest.fixture(scope="module")
def torch():
    with np.load(Path(__file__).parents[1] / "references" / "attention.npz") as file:
        return dict(file)


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """Each kernel, in tiles so small that every shape has several."""
    monkeypatch.setattr(inspect.getmodule(ops.chunked_attention), "QUERY_BLOCK", 3)
    monkeypatch.setattr(inspect.getmodule(ops.chunked_attention), "KEY_BLOCK", 2)
    return request.param


@pytest.mark.parametrize("case", ["plain", "causal", "grouped", "shared", "masked", "biased", "one"])
def test_outputs_and_gradients_agree_with_torch(torch, kernel, case):
    saved = {path.removeprefix(f"{case}/"): x for path, x in torch.items() if path.startswith(f"{case}/")}
    inputs = {name: jnp.asarray(saved[name]) for name in ("q", "k", "v", "bias") if name in saved}
    options = {
        "causal": case in ("causal", "grouped"),
        "mask": jax.tree.map(jnp.asarray, saved.get("mask")),
        "implementation": kernel,
    }

    def loss(inputs):
        y = ops.attention(**inputs, **options)
        return (y * saved["weight"]).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    assert_close_to_scale(y, saved["y"])
    for name, grad in grads.items():
        assert_close_to_scale(grad, saved[f"grad/{name}"])


@pytest.mark.parametrize("case", ["self", "cross"])
def test_the_layer_and_its_gradients_agree_with_torch(torch, kernel, case):
    saved = {path.removeprefix(f"{case}/"): x for path, x in torch.items() if path.startswith(f"{case}/")}
    layer = nn.MultiHeadAttention(4, implementation=kernel)
    x = {name: jnp.asarray(saved[name]) for name in ("x", "source") if name in saved}
    trainables, _ = layer.init(RNG, x)
    for path in mlax.paths(trainables):
        trainables = mlax.replace(trainables, path, jnp.asarray(saved[path]))

    def loss(trainables, x):
        y, _ = layer.fwd({**x, "lengths": jnp.asarray(saved["lengths"])}, trainables)
        return (y * saved["weight"]).sum(), y

    (_, y), (by_trainables, by_x) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(trainables, x)
    assert_close_to_scale(y, saved["y"])
    for path in mlax.paths(by_trainables):
        assert_close_to_scale(mlax.get(by_trainables, path), saved[f"grad/{path}"])
    for name, grad in by_x.items():
        assert_close_to_scale(grad, saved[f"grad/{name}"])


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(low, high) for low, high in ((0, 2), (1, 8), (1, 8), (1, 2), (1, 3), (1, 4)))),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 5),
    softcap=st.none() | st.just(1.5),
    has_sinks=st.booleans(),
    kernel=st.sampled_from(KERNELS),
    data=st.data(),
)
def test_any_combination_of_options_computes_the_definition(sizes, causal, window, softcap, has_sinks, kernel, data):
    b, t, s, g, r, width = sizes
    h = g * r
    q, k, v, sinks, bias = normals((b, t, h, width), (b, s, g, width), (b, s, g, width), (h,), (1, h, t, s))
    sinks, bias = sinks if has_sinks else None, data.draw(st.sampled_from([None, bias]))
    rng = np.random.default_rng(1)
    mask, lengths = jnp.asarray(rng.random((b, 1, t, s)) < 0.7), jnp.asarray(rng.integers(0, s + 1, b))
    segments = jnp.asarray(rng.integers(0, 2, (b, t))), jnp.asarray(rng.integers(0, 2, (b, s)))
    seen = np.asarray(mask) & (np.arange(s) < np.asarray(lengths)[:, None])[:, None, None]
    seen = seen & (np.asarray(segments[0])[:, None, :, None] == np.asarray(segments[1])[:, None, None, :])
    options = {"causal": causal, "window": window, "softcap": softcap}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect.getmodule(ops.chunked_attention), "QUERY_BLOCK", 3)
        patch.setattr(inspect.getmodule(ops.chunked_attention), "KEY_BLOCK", 2)
        y = run(
            q,
            k,
            v,
            **options,
            segments=segments,
            lengths=lengths,
            mask=mask,
            bias=bias,
            sinks=sinks,
            implementation=kernel,
        )
    exact = [None if x is None else np.asarray(x, np.float64) for x in (q, k, v, sinks, bias)]
    if b:
        bias = 0.0 if exact[4] is None else exact[4]
        assert_close_to_scale(y, attend(*exact[:3], **options, sinks=exact[3], bias=bias, visible=seen))
    assert y.shape == (b, t, h, width)


def test_gradients_of_the_tiled_form_equal_those_of_the_whole(kernel):
    q, k, v, sinks, bias = normals((2, 8, 4, 3), (2, 7, 2, 3), (2, 7, 2, 3), (4,), (2, 1, 1, 7))

    def loss(arrays, kernel):
        q, k, v, sinks, bias = arrays
        options = {"causal": True, "window": 4, "softcap": 1.5, "alibi": True, "lengths": jnp.asarray([7, 0])}
        return (ops.attention(q, k, v, **options, sinks=sinks, bias=bias, implementation=kernel) ** 2).sum()

    whole, tiled = (jax.jit(jax.grad(loss), static_argnums=1)([q, k, v, sinks, bias], each) for each in ("xla", kernel))
    assert_close_to_scale(tiled, whole)


def test_a_query_without_visible_keys_gets_zero_and_has_no_gradient(kernel):
    q, k, v = normals((2, 5, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4))

    def loss(q, k, v):
        y = ops.attention(q, k, v, lengths=jnp.asarray([0, 3]), implementation=kernel)
        return y.sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    np.testing.assert_array_equal(y[0], 0)
    for grad in grads:
        np.testing.assert_array_equal(grad[0], 0)
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (1, 1, 8)])
def test_empty_and_single_axes_work(kernel, shape):
    layer = nn.MultiHeadAttention(2, causal=True, implementation=kernel)
    trainables, _ = layer.init(RNG, jnp.ones(shape))
    grad = jax.jit(jax.grad(lambda w, x: layer.fwd(x, w)[0].sum()))(trainables, jnp.ones(shape))
    assert fwd(layer, jnp.ones(shape), trainables).shape == shape
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grad))


def test_fields_of_a_layer_whose_attention_was_edited_still_reach_it():
    layer, wanted = nn.MultiHeadAttention(2, causal=True), nn.Attention(causal=True, window=3, accum_dtype="float32")
    mixed = mlax.override(layer, nn.Attention, accum_dtype="float32")  # as mixed precision does
    assert mixed == nn.MultiHeadAttention(2, causal=True, accum_dtype="float32")
    assert mlax.get(mlax.override(mixed, nn.MultiHeadAttention, window=3), "attend") == wanted
    precise = mlax.override(layer, nn.Attention, precision="highest")  # the field of the layer is for its Linears, too
    assert mlax.get(precise, "attend").precision == "highest" and mlax.get(precise, "query").precision is None


def test_an_input_of_attention_that_is_none_counts_as_absent():
    layer, x = nn.MultiHeadAttention(2, causal=True), normal(1, 3, 8)
    trainables, _ = layer.init(RNG, {"x": x, "lengths": None})
    np.testing.assert_array_equal(
        fwd(layer, {"x": x, "lengths": None, "mask": None}, trainables), fwd(layer, x, trainables)
    )


def test_one_length_is_that_of_all_rows_and_must_be_an_integer():
    layer, x = nn.MultiHeadAttention(2), jax.random.normal(jax.random.key(0), (3, 4, 8))
    trainables, _ = layer.init(jax.random.key(1), {"x": x, "lengths": jnp.int32(2)})
    y, _ = layer.fwd({"x": x, "lengths": 2}, trainables)
    np.testing.assert_array_equal(y, layer.fwd({"x": x, "lengths": jnp.full(3, 2)}, trainables)[0])
    with pytest.raises(TypeError, match="lengths"):  # by jaxtyping in tests
        layer.fwd({"x": x, "lengths": 2.5}, trainables)


def test_a_length_beyond_32_bits_is_refused():
    q = normal(2, 6, 2, 4)
    with pytest.raises(ValueError, match="lengths go up to 1099511627776, but there are only 6 keys"):
        nn.Attention().fwd({"query": q, "key": q, "value": q, "lengths": np.int64(1 << 40)}, None)


def test_one_integer_length_is_known_while_tracing(monkeypatch):
    layer, x, seen = nn.MultiHeadAttention(2), normal(3, 4, 8), []
    trainables, _ = layer.init(jax.random.key(1), x)
    attend = ops.attention

    def spy(*arrays, **options):
        seen.append(options["lengths"])
        return attend(*arrays, **options)

    monkeypatch.setattr(ops, "attention", spy)
    jax.jit(lambda x: layer.fwd({"x": x, "lengths": np.int32(2)}, trainables))(x)
    (lengths,) = seen
    np.testing.assert_array_equal(lengths, [2, 2, 2])  # not a tracer


def test_packed_sequences_attend_as_if_alone(kernel):
    layer = nn.MultiHeadAttention(2, causal=True, rotary=nn.Rotary(), implementation=kernel)
    one, two = normals((1, 5, 8), (1, 3, 8))
    trainables, _ = layer.init(RNG, one)
    packed = {
        "x": jnp.concatenate([one, two], 1),
        "segments": jnp.asarray([[1] * 5 + [2] * 3]),
        "positions": jnp.asarray([[*range(5), *range(3)]]),
    }
    y = np.asarray(fwd(layer, packed, trainables))
    assert_close_to_scale(y[:, :5], fwd(layer, one, trainables))
    assert_close_to_scale(y[:, 5:], fwd(layer, two, trainables))


def test_a_sink_is_a_key_with_a_zero_value(kernel):
    q, k, v = normals((2, 4, 1, 3), (2, 5, 1, 3), (2, 5, 1, 3))
    more = jnp.concatenate([k, jnp.zeros((2, 1, 1, 3))], 1), jnp.concatenate([v, jnp.zeros((2, 1, 1, 3))], 1)
    assert_close_to_scale(run(q, k, v, sinks=jnp.zeros(1), implementation=kernel), run(q, *more, implementation=kernel))


def test_wide_statistics_are_wide_and_products_narrow(kernel):
    q, k, v = normals((2, 9, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8), dtype=jnp.bfloat16)

    def loss(q, k, v):
        y = ops.attention(q, k, v, causal=True, accum_dtype="float32", implementation=kernel)
        return jax.lax.reduce_sum(y, range(y.ndim))

    found = [str(violation) for violation in dtypes.audit(jax.value_and_grad(loss, (0, 1, 2)), q, k, v)]
    assert any("exp float32 -> float32" in each for each in found)
    dots = [each for each in found if "dot_general" in each]
    assert dots and all("dot_general bfloat16, bfloat16 -> float32" in each for each in dots)


def test_wide_statistics_are_more_accurate(kernel):
    q, k, v = normals((1, 64, 1, 16), (1, 256, 1, 16), (1, 256, 1, 16), dtype=jnp.bfloat16)
    exact = attend(*(np.asarray(x, np.float64) for x in (q, k, v)))

    def error(accum_dtype):
        y = run(q, k, v, accum_dtype=accum_dtype, implementation=kernel)
        return np.abs(np.asarray(y, np.float64) - exact).max()

    assert error("float32") < 4e-3
    assert error("float32") < error(None)


def test_mixed_precision_widens_only_the_softmax():
    model = dtypes.mixed_bfloat16(mlax.Series(attend=nn.MultiHeadAttention(2), norm=nn.LayerNorm()))
    assert mlax.get(model, "attend/attend").accum_dtype == "float32"
    assert mlax.get(model, "attend/query").accum_dtype is None


def test_surgery_reaches_parts_before_their_width_is_known():
    model = mlax.override(nn.MultiHeadAttention(2, kv_heads=1), nn.Linear, precision="highest")
    model = mlax.replace(model, "query", mlax.Remat(mlax.get(model, "query")))
    trainables, _ = model.init(RNG, jnp.ones((2, 3, 8)))
    shapes = {path: mlax.get(trainables, path).shape for path in mlax.paths(trainables) if path.endswith("kernel")}
    assert shapes == {"query/kernel": (8, 8), "key/kernel": (8, 4), "value/kernel": (8, 4), "out/kernel": (8, 8)}
    assert fwd(model, jnp.ones((2, 3, 8)), trainables).shape == (2, 3, 8)


def test_dropout_drops_weights_only_in_training():
    layer = nn.Attention(dropout=0.4)
    q, k = normals((1, 200, 2, 4), (1, 300, 2, 4))
    x = {"query": q, "key": k, "value": jnp.ones_like(k)}
    y = np.asarray(fwd(layer, x, None, rng=RNG))
    assert abs(y.mean() - 1) < 0.02 and y.std() > 0.01
    assert_close_to_scale(fwd(layer, x, None, inference_mode=True), np.ones(q.shape))
    with pytest.raises(ValueError, match="dropout needs a key"):
        layer.fwd(x, None)


def test_weights_on_request_are_those_that_sum_the_values(kernel):
    q, k, v, sinks, bias = normals((2, 4, 4, 3), (2, 5, 2, 3), (2, 5, 2, 6), (4,), (1, 4, 4, 5))
    layer = nn.Attention(causal=True, softcap=2.0, sinks=True, alibi=True, return_weights=True, implementation=kernel)
    x = {"query": q, "key": k, "value": v, "lengths": jnp.asarray([5, 0]), "bias": bias}
    found = fwd(layer, x, {"sinks": sinks})
    assert found["weights"].shape == (2, 4, 4, 5)
    repeated = np.repeat(np.asarray(v), 2, axis=2)
    assert_close_to_scale(found["y"], np.einsum("bhts,bshk->bthk", found["weights"], repeated))
    np.testing.assert_array_equal(found["weights"][1], 0)
    assert (found["weights"].sum(-1) < 1).all()


def test_softmax_is_in_the_dtype_of_its_input():
    x = normal(3, 40, dtype=jnp.bfloat16)
    assert_close_to_scale(np.asarray(ops.softmax(x), np.float64), jax.nn.softmax(x.astype(jnp.float32)), 2e-2)
    assert dtypes.audit(ops.softmax, x) == ()
    np.testing.assert_array_equal(ops.softmax(x, jnp.zeros((3, 40), bool)), 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": (2, 5, 3, 4), "v": (2, 5, 3, 4)}, "4 query heads are not a multiple of 3 key-value heads"),
        ({"v": (2, 6, 2, 4)}, "do not fit"),
        ({"q": (2, 5, 8)}, "q has the shape .* but must be .batch, time, heads, width."),
        ({"mask": np.ones((5, 5), bool)}, r"the mask has the shape \(5, 5\), but needs four axes.*mask\[None, None\]"),
        ({"mask": np.ones((2, 5), bool)}, r"batch and keys, pass mask\[:, None, None\]\.$"),
        ({"mask": np.ones((2, 5, 5), bool)}, r"batch, queries and keys, pass mask\[:, None\]\.$"),
        ({"bias": jnp.ones((4, 5, 5))}, r"heads, queries and keys, pass bias\[None\]\.$"),
        ({"mask": np.ones((3, 3, 5, 5, 1), bool)}, r"each of the size \(2, 4, 5, 5\) or 1\.$"),
        ({"mask": np.zeros((2, 1, 5, 5), np.float32)}, "the mask is float32, but must be boolean.*as bias="),
        ({"mask": np.ones((2, 1, 5, 5), np.int32)}, r"the mask is int32, but must be boolean.*\.astype\(bool\)"),
        ({"bias": np.ones((2, 1, 5, 5), bool)}, "the bias is bool, but is added to the scores.*as mask="),
        ({"segments": np.ones((2, 5), np.float32)}, "the segments of the queries are float32, but must be integers"),
        ({"segments": (np.ones((2, 5), int), None)}, "segments must be a pair of arrays"),
        ({"segments": np.ones((2, 4), int)}, r"segments of the queries have the shape \(2, 4\), but must be \(2, 5\)"),
        ({"k": (2, 3, 2, 4), "v": (2, 3, 2, 4), "segments": np.ones((2, 5), int)}, "5 queries and 3 keys; pass a pair"),
        (
            {"positions": (np.ones(5, int), np.ones(4, int))},
            r"keys have the shape \(4,\), but must be \(5,\) or \(2, 5\)",
        ),
        ({"positions": (np.ones(5, int), None)}, "positions must be a pair of arrays"),
        ({"lengths": np.asarray([5.0, 1.0])}, "lengths are float64, but must be integers"),
        ({"lengths": [5, 1]}, r"lengths are a list; pass an array: jnp.asarray\(\[5, 1\]\)"),
        ({"lengths": np.asarray([5, -1])}, "lengths go down to -1"),
        ({"window": 2.5}, "window is 2.5, but must be an integer"),
        ({"softcap": 0.0}, "softcap is 0.0, but must be positive"),
        ({"bias": jnp.ones((2, 4, 5, 4))}, r"the bias has the shape \(2, 4, 5, 4\)"),
        ({"sinks": jnp.ones(3)}, "need one for each head"),
        ({"lengths": np.asarray([5, 6])}, "lengths go up to 6, but there are only 5 keys"),
        ({"lengths": np.asarray([5])}, "need one for each row"),
        ({"window": 0}, "window is 0"),
        ({"dropout": 0.1}, "dropout needs a key"),
        ({"implementation": "cudnn"}, "implementation is 'cudnn', but there is no NVIDIA GPU"),
        ({"implementation": "flash"}, "implementation is 'flash', but must be one of cudnn, xla, chunked"),
        ({"implementation": "chunked", "dropout": 0.1, "rng": RNG}, "'chunked', which has no dropout"),
    ],
)
def test_errors_say_what_does_not_fit(options, words, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(ops.attention_backend), "compute_capability", lambda: None)
    shapes = {name: options.pop(name, (2, 5, heads, 4)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    arrays = {name: jnp.ones(shape) for name, shape in shapes.items()}
    with pytest.raises((ValueError, TypeError), match=words):
        inspect.unwrap(ops.attention)(**arrays, **options)


TOKENS, IDS = jnp.ones((2, 3, 8)), jnp.ones((2, 3), jnp.int32)


def attend_with(**more):
    x = {name: jnp.ones((2, 3, 1, 8)) for name in ("query", "key", "value")}
    return nn.Attention().fwd({**x, **more}, None)


def heads_with(cache=None, causal=False, window=None, **more):
    return nn.MultiHeadAttention(2, cache=cache, causal=causal, window=window).init(RNG, {"x": TOKENS, **more})


def cross_with(**more):
    return nn.MultiHeadAttention(2, cross=True, cache=1).init(RNG, {"x": TOKENS, **more})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.MultiHeadAttention(4, kv_heads=3), r"4 heads are not .* 3 kv_heads; pass one of kv_heads=1, 2, 4"),
        (lambda: nn.MultiHeadAttention(0), "heads is 0, but must be an integer of at least 1"),
        (lambda: nn.MultiHeadAttention(4, cache=8), "pass causal=True"),
        (lambda: nn.MultiHeadAttention(4, relative=nn.RelativeBias(2)), "does not have the 4 heads"),
        (lambda: nn.MultiHeadAttention(4, window=0), "window is 0"),
        (lambda: nn.Attention(dropout=0.1, implementation="chunked"), "chunked does not support dropout"),
        (lambda: nn.Attention(implementation="flash"), "must be cudnn, xla, chunked or None"),
        (lambda: nn.MultiHeadAttention(3).init(RNG, jnp.ones((1, 2, 8))), "width 8 does not divide into 3 heads"),
        (lambda: nn.MultiHeadAttention(2).init(RNG, jnp.ones((2, 8))), r"x is \(2, 8\), but must be"),
        (lambda: nn.MultiHeadAttention(2).init(RNG, {"y": jnp.ones((1, 2, 8))}), "but has y"),
        (lambda: nn.MultiHeadAttention(2).init(RNG, (jnp.ones((1, 2, 8)),)), "is none of these"),
        (
            lambda: nn.MultiHeadAttention(2, causal=True, cache=4).init(
                RNG, (jnp.ones((1, 2, 8)), jnp.ones((1, 2, 8)))
            ),
            "with a cache x attends to itself and earlier tokens, but the input has source",
        ),
        (lambda: nn.Attention().init(RNG, {"query": jnp.ones((1, 2, 1, 8))}), "lacks key, value"),
        (lambda: attend_with(source_segments=IDS), "has source_segments but not segments; pass both"),
        (lambda: attend_with(key_positions=IDS), "has key_positions but not query_positions; pass both"),
        (lambda: attend_with(query_positions=IDS), "has query_positions but not key_positions; pass both"),
        (lambda: heads_with(source_segments=IDS), "has source_segments but not segments; with a source pass both"),
        (lambda: heads_with(source=TOKENS, segments=IDS), "has segments but not source_segments; with a source pass"),
        (lambda: heads_with(positions=jnp.arange(3)), "positions are for rotary embeddings only; pass rotary="),
        (lambda: heads_with(source=TOKENS[:1]), r"x is \(2, 3, 8\) and source \(1, 3, 8\), but their batches"),
        (lambda: heads_with(value_source=TOKENS[0]), r"value_source is \(3, 8\), but must be"),
        (lambda: nn.MultiHeadAttention(2, cross=True, causal=True), "so causal, window, rotary and relative cannot be"),
        (lambda: nn.MultiHeadAttention(2, cross=True).init(RNG, TOKENS), "x attends to a source; pass \\(x, source\\)"),
        (lambda: cross_with(), "init needs the source"),
        (lambda: cross_with(lengths=jnp.ones(2, int)), "has lengths but no source; the stored source has its own"),
        (lambda: cross_with(source=TOKENS, segments=IDS, source_segments=IDS), "a cached source cannot have segments"),
        (
            lambda: heads_with(cache=4, causal=True, window=2, mask=jnp.ones((2, 1, 3, 3), bool)),
            "old tokens are overwr",
        ),
        (
            lambda: nn.KeyValueCache(4).init(RNG, {"key": jnp.ones((1, 2, 1, 8))}),
            "has key, but must be a dict of key and",
        ),
    ],
)
def test_invalid_layers_are_errors(build, words):
    with pytest.raises(ValueError, match=words):
        build()
