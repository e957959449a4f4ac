"""Attention against PyTorch and its definition, in each of its forms, and decoding against the uncached pass."""

import functools
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
from tests.arrays import normal
from tests.asserts import assert_close_to_scale, compilations
from tests.catalogue.attention import attend

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


def fwd(layer, *args, **kwargs):
    """What the layer computes, compiled, without its state."""
    return jax.jit(layer.fwd, static_argnames="inference_mode")(*args, **kwargs)[0]


def normals(*shapes, dtype="float32"):
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


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


def pull(function, at):
    """A JVP, a gradient of a gradient and a column of the Hessian of a scalar function, at `at` and along it."""
    _, slope = jax.jvp(function, (at,), (at,))
    squared = lambda x: sum((leaf**2).sum() for leaf in jax.tree.leaves(jax.grad(function)(x)))  # noqa: E731
    _, column = jax.jvp(jax.grad(function), (at,), (at,))
    return slope, jax.grad(squared)(at), column


@pytest.mark.parametrize("keys", [7, 4])
def test_causal_attention_in_blocks_of_queries_equals_that_of_all_at_once(keys, monkeypatch):
    q, k, v, bias, sinks = normals((2, 7, 4, 3), (2, keys, 2, 3), (2, keys, 2, 3), (1, 4, 7, keys), (4,))
    options = {
        "segments": (jnp.arange(14).reshape(2, 7) // 5, jnp.arange(2 * keys).reshape(2, keys) // 5),
        "lengths": jnp.asarray([keys - 1, keys]),
        "mask": jnp.arange(keys)[None, None, None] != 2,
    }

    def attend(q, k, v, bias, sinks):
        return ops.attention(q, k, v, bias=bias, sinks=sinks, causal=True, window=5, alibi=True, **options)

    def derivatives(rows):
        monkeypatch.setattr(inspect.getmodule(ops.causal_block_attention), "MIN_BLOCK_ROWS", rows)
        primals = (q, k, v, bias, sinks)
        y, pull = jax.vjp(lambda *primals: attend(*primals), *primals)
        return y, pull(q), jax.jvp(lambda *primals: attend(*primals), primals, primals)[1]

    whole, blocks = (jax.jit(derivatives, static_argnums=0)(rows) for rows in (8, 2))
    for one, other in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        assert_close_to_scale(one, other)


@pytest.mark.parametrize("mode", [pytest.param("mixed", marks=pytest.mark.thorough), "x64"])  # below in float32
def test_the_chunked_form_has_every_derivative_of_the_plain_one(mode, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(ops.chunked_attention), "QUERY_BLOCK", 3)
    monkeypatch.setattr(inspect.getmodule(ops.chunked_attention), "KEY_BLOCK", 2)
    dtype = {"mixed": "bfloat16", "x64": "float64"}[mode]

    def loss(arrays, implementation):
        q, k, v, sinks, bias = arrays
        options = {"causal": True, "softcap": 1.5, "alibi": True, "accum_dtype": "float32" if mode == "mixed" else None}
        y = ops.attention(q, k, v, **options, sinks=sinks, bias=bias, implementation=implementation)
        return (y.astype(jnp.float32 if mode == "mixed" else dtype) ** 2).sum()

    with jax.enable_x64(mode == "x64"):
        arrays = normals((1, 4, 4, 2), (1, 3, 2, 2), (1, 3, 2, 2), (4,), (1, 1, 4, 3), dtype=dtype)
        plain, chunked = (
            jax.jit(pull, static_argnums=0)(functools.partial(loss, implementation=name), arrays) for name in KERNELS
        )
    tolerance = {"mixed": 6e-2, "x64": 1e-12}[mode]
    for found, want in zip(jax.tree.leaves(chunked), jax.tree.leaves(plain), strict=True):
        assert found.dtype == want.dtype
        assert_close_to_scale(np.asarray(found, np.float64), np.asarray(want, np.float64), tolerance)


def test_a_thousand_tokens_have_a_jvp_and_a_gradient_of_a_gradient():
    q = normal(1, 1024, 1, 2)
    assert ops.attention_backend(q, q, q).startswith("chunked")

    def loss(scale, implementation=None):
        return (ops.attention(q * scale, q, q, causal=True, implementation=implementation) ** 2).sum()

    every = lambda f: (jax.jvp(f, (1.0,), (1.0,))[1], jax.grad(jax.grad(f))(1.0))  # noqa: E731
    found, want = (jax.jit(lambda name=name: every(lambda x: loss(x, name)))() for name in (None, "xla"))
    np.testing.assert_allclose(found, want, rtol=1e-4)


def test_derivatives_of_the_chunked_form_hold_inside_a_scan_and_under_vmap(monkeypatch):
    monkeypatch.setattr(inspect.getmodule(ops.chunked_attention), "QUERY_BLOCK", 2)
    monkeypatch.setattr(inspect.getmodule(ops.chunked_attention), "KEY_BLOCK", 2)
    k = normal(1, 3, 1, 2)

    def loss(scale, implementation):
        def layer(q, _):
            return q + ops.attention(q, k, k, implementation=implementation), None

        y, _ = jax.lax.scan(layer, k * scale, None, length=2)
        return (y**2).sum()

    def second(name):
        total = lambda scales: jax.vmap(functools.partial(loss, implementation=name))(scales).sum()  # noqa: E731
        return jax.jit(jax.grad(lambda scales: jax.grad(total)(scales).sum()))(jnp.asarray([0.5, 2.0]))

    assert_close_to_scale(second("chunked"), second("xla"))


@pytest.fixture
def fused(monkeypatch):
    """The form that calls cuDNN, around a kernel with the limits of cuDNN's: no odd times, no forward mode."""
    plain = jax.nn.dot_product_attention
    reverse_only = jax.custom_vjp(lambda x: x)
    reverse_only.defvjp(lambda x: (x, None), lambda _, grad: (grad,))

    def kernel(q, k, v, bias, *, implementation, **options):
        if q.shape[1] % 2 or k.shape[1] % 2:
            raise NotImplementedError(f"Unsupported sequence length Q {q.shape[1]}, KV {k.shape[1]}.")
        has_keys = (options["key_value_seq_lengths"] > 0)[:, None, None, None]
        y = plain(q, k, v, bias, **options, implementation="xla")
        return reverse_only(jnp.where(has_keys, y, jnp.nan))

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    spec = ops.ScoreSpec(scale=0.5, causal=True)
    return ops.cudnn_attention(spec, lambda primals, consts: form(primals, consts, spec))


def form(primals, consts, spec):
    q, k, v, bias, _ = primals
    return ops.attention(
        q, k, v, bias=bias, lengths=consts.key_limit, causal=True, scale=spec.scale, implementation="xla"
    )


@pytest.mark.parametrize("has_bias", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_the_fused_form_takes_odd_times_and_has_every_derivative_and_vmap(fused, has_bias):
    t, s = (4, 6) if has_bias else (5, 7)
    q, k, v, bias = normals((2, t, 4, 2), (2, s, 2, 2), (2, s, 2, 2), (1, 4, t, s))
    lengths = jnp.asarray([0, 3])

    def both(function):
        consts = ops.ScoreInputs(*[jnp.zeros((1, 1), jnp.int32)] * 3, key_limit=lengths)
        spec = ops.ScoreSpec(scale=0.5, causal=True)
        losses = [
            lambda x, of=of: (of((*x, None), consts) ** 2).sum() for of in (fused, functools.partial(form, spec=spec))
        ]
        return [function(loss) for loss in losses]

    at = (q, k, v, bias if has_bias else None)
    assert_close_to_scale(*both(lambda loss: jax.jit(lambda x: (loss(x), jax.grad(loss)(x), pull(loss, x)))(at)))
    # only the queries have the axis, and it is the last one
    each = lambda loss: jax.jit(jax.vmap(jax.grad(lambda q: loss((q, *at[1:]))), -1))(jnp.stack([q, q + 1], -1))  # noqa: E731
    assert_close_to_scale(*both(each))


def test_what_cudnn_refuses_is_computed_by_another_backend_that_names_the_reason(monkeypatch):
    monkeypatch.setattr(inspect.getmodule(ops.attention_backend), "compute_capability", lambda: 9.0)
    q = normal(1, 197, 1, 8, dtype=jnp.bfloat16)
    for refuse in (NotImplementedError("Unsupported sequence length Q 197, KV 197."), RuntimeError("no engine")):

        def kernel(*arguments, refuse=refuse, **options):
            raise refuse

        monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
        clear_answers()
        assert f"not cudnn, since it refuses this attention: {refuse}" in ops.attention_backend(
            q, q, q, accum_dtype="float32"
        )
        y = ops.attention(q, q, q, accum_dtype="float32")
        assert_close_to_scale(y, ops.attention(q, q, q, accum_dtype="float32", implementation="xla"))
        with pytest.raises(ValueError, match="implementation is 'cudnn', but it refuses this attention"):
            ops.attention(q, q, q, implementation="cudnn")
    clear_answers()


def clear_answers():
    inspect.getmodule(ops.cudnn_attention)._find_refusal.cache_clear()


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


VARIANTS = {
    "plain": {},
    "rotary": {"rotary": nn.Rotary(), "kv_heads": 2},
    "ring": {"rotary": nn.Rotary(), "window": 6},
    "ring with all": {"window": 5, "alibi": True, "sinks": True, "kv_heads": 1, "qk_norm": nn.LayerNorm()},
    "relative": {"relative": nn.RelativeBias(4, bidirectional=False)},
    "window beyond the cache": {"window": 50},
}


@pytest.mark.parametrize(
    "variant",
    [
        name if name in ("rotary", "ring with all", "relative") else pytest.param(name, marks=pytest.mark.thorough)
        for name in VARIANTS
    ],
)
def test_decoding_equals_the_uncached_pass(variant):
    plain = nn.MultiHeadAttention(4, causal=True, **VARIANTS[variant])
    cached = nn.MultiHeadAttention(4, causal=True, cache=24, **VARIANTS[variant])
    x = normal(2, 24, 16)
    trainables, _ = plain.init(RNG, x)
    _, state = cached.init(RNG, x[:, :1])
    step = jax.jit(cached.fwd)
    outputs = []
    for tokens in np.split(np.asarray(x), [9, 10, 11, 20, 21, 22, 23], axis=1):  # many, one, one, many past the window
        y, state = step(tokens, trainables, state)
        outputs.append(y)
    assert_close_to_scale(np.concatenate(outputs, 1), fwd(plain, x, trainables))


RAGGED = {
    "plain": {},
    "rotary": {"rotary": nn.Rotary(), "kv_heads": 2},
    "ring": {"rotary": nn.Rotary(), "window": 4},
    "relative": {"relative": nn.RelativeBias(4, bidirectional=False)},
}


@pytest.mark.parametrize(
    "variant", [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("plain", "rotary")), "ring", "relative"]
)
def test_prompts_of_different_lengths_decode_in_one_batch_as_if_alone(variant):
    plain = nn.MultiHeadAttention(4, causal=True, **RAGGED[variant])
    cached = nn.MultiHeadAttention(4, causal=True, cache=16, **RAGGED[variant])
    x = normal(3, 12, 16)
    trainables, _ = plain.init(RNG, x)
    want = [np.asarray(fwd(plain, x[i : i + 1], trainables))[0] for i in range(3)]
    _, state = cached.init(RNG, x[:, :1])
    step = jax.jit(cached.fwd)
    done = np.zeros(3, int)
    for lengths in ([6, 1, 3], [1, 1, 1], [1, 0, 1], [2, 5, 3], [1, 1, 1]):  # prompts, then one or several, or none
        t = max(lengths)
        # padding is large, so that it would show
        tokens = np.full((3, t, 16), 50.0, np.float32)
        for row, length in enumerate(lengths):
            tokens[row, :length] = x[row, done[row] : done[row] + length]
        y, state = step({"x": tokens, "lengths": jnp.asarray(lengths)}, trainables, state)
        for row, length in enumerate(lengths):
            assert_close_to_scale(y[row, :length], want[row][done[row] : done[row] + length])
        done += lengths
    assert state["position"]["count"].tolist() == done.tolist()


@pytest.mark.parametrize("window", [None, 5])
def test_segments_and_positions_with_a_cache_equal_the_uncached_pass(window):
    options = {"causal": True, "rotary": nn.Rotary(), "window": window}
    plain, cached = nn.MultiHeadAttention(2, **options), nn.MultiHeadAttention(2, cache=16, **options)
    x = normal(2, 9, 8)
    more = {
        "segments": jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 2, 2, 2, 2, 2, 2, 2, 2]]),
        "positions": jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6, 7]]),
    }
    inputs = {"x": x, **more}
    trainables, _ = plain.init(RNG, inputs)
    _, state = cached.init(RNG, inputs)
    outputs, step = [], jax.jit(cached.fwd)
    for start in (0, 3, 6):
        y, state = step({name: each[:, start : start + 3] for name, each in inputs.items()}, trainables, state)
        outputs.append(y)
    assert_close_to_scale(np.concatenate(outputs, 1), fwd(plain, inputs, trainables))
    with pytest.raises(ValueError, match="non_trainables has extra segments"):
        cached.fwd(x[:, :1], trainables, state)


def test_a_mask_and_a_bias_with_a_cache_are_those_of_the_tokens_in_order():
    plain, cached = nn.MultiHeadAttention(2, causal=True), nn.MultiHeadAttention(2, causal=True, cache=8)
    x, bias = normal(2, 6, 8), normal(1, 2, 6, 6)
    mask = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 6)) < 0.6) | jnp.eye(6, dtype=bool)[None, None]
    trainables, _ = plain.init(RNG, x)
    _, state = cached.init(RNG, x)
    outputs, step = [], jax.jit(cached.fwd)
    for start, end in ((0, 4), (4, 5), (5, 6)):  # the first covers four tokens, the others all six
        keys = 4 if end == 4 else 6
        part = {"x": x[:, start:end], "mask": mask[:, :, start:end, :keys], "bias": bias[:, :, start:end, :keys]}
        y, state = step(part, trainables, state)
        outputs.append(y)
    whole = fwd(plain, {"x": x, "mask": mask, "bias": bias}, trainables)
    assert_close_to_scale(np.concatenate(outputs, 1), whole)


def test_a_row_that_overflows_the_cache_under_jit_is_nan_and_the_others_are_not():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4)
    x = normal(2, 4, 8)
    trainables, state = layer.init(RNG, x)
    with pytest.raises(ValueError, match="lengths go up to 5, but there are only 4 tokens"):
        layer.fwd({"x": x, "lengths": jnp.asarray([5, 2])}, trainables, state)
    _, state = layer.fwd({"x": x, "lengths": jnp.asarray([4, 2])}, trainables, state)
    y, _ = jax.jit(layer.fwd)(x[:, :1], trainables, state)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_the_cache_is_in_the_dtype_of_mixed_precision_unless_it_declares_another():
    x = jnp.ones((2, 1, 8))
    for declared, dtype in ((None, jnp.bfloat16), ("float32", jnp.float32)):
        layer = nn.MultiHeadAttention(2, causal=True, cache=4, cache_dtype=declared)
        model = dtypes.mixed_bfloat16(mlax.Series(attend=layer, norm=nn.LayerNorm()))
        trainables, state = model.init(RNG, x)
        cache = state["attend"]["cache"]
        assert {cache["key"].dtype, cache["value"].dtype} == {jnp.dtype(dtype)}
        assert trainables["attend"]["key"]["kernel"].dtype == jnp.float32
        _, new = jax.eval_shape(model.fwd, x, trainables, state)
        assert new["attend"]["cache"]["key"].dtype == dtype


@pytest.mark.parametrize("window", [None, 32])
def test_256_tokens_decode_with_one_compilation(window):
    layer = nn.MultiHeadAttention(2, causal=True, cache=256, window=window, rotary=nn.Rotary())
    x = normal(1, 256, 8)
    trainables, state = layer.init(RNG, x[:, :1])
    traces = []

    @jax.jit
    def step(x, state):
        traces.append(1)
        return layer.fwd(x, trainables, state)

    first, *tokens = np.split(np.asarray(x), 256, axis=1)
    y, state = step(first, state)
    outputs = [y]
    with compilations() as found:
        for token in tokens:
            y, state = step(token, state)
            outputs.append(y)
    assert len(traces) == 1 and not found
    plain = nn.MultiHeadAttention(2, causal=True, window=window, rotary=nn.Rotary())
    assert_close_to_scale(np.concatenate(outputs, 1), fwd(plain, x, trainables))


def test_a_full_cache_is_an_error_eagerly_and_nan_under_jit():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4)
    x = normal(1, 4, 8)
    trainables, empty = layer.init(RNG, x)
    with pytest.raises(ValueError, match="the input has 5 tokens, but there are 4 slots"):
        layer.init(RNG, jnp.ones((1, 5, 8)))
    _, full = layer.fwd(x, trainables, empty)
    with pytest.raises(ValueError, match="the cache is full: there are 4 slots, for 5 tokens"):
        layer.fwd(x[:, :1], trainables, full)
    y, state = jax.jit(layer.fwd)(x[:, :1], trainables, full)
    assert jnp.isnan(y).all()
    assert jnp.isnan(jax.jit(layer.fwd)(x[:, :1], trainables, state)[0]).all()


def test_a_ring_buffer_never_fills():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4, window=3)
    x = normal(1, 20, 8)
    trainables, state = layer.init(RNG, x[:, :1])
    assert state["cache"]["key"].shape == (1, 2, 3, 4)
    y, state = jax.jit(layer.fwd)(x, trainables, state)
    assert np.isfinite(y).all() and state["position"]["count"].tolist() == [20]


def test_one_product_for_queries_keys_and_values_has_no_source():
    layer, x = nn.MultiHeadAttention(2, fused=True), normal(1, 3, 8)
    with pytest.raises(ValueError, match="with fused=True x attends to itself, but the input has a source"):
        layer.init(RNG, (x, x))
    with pytest.raises(ValueError, match="keys and values are of another input; leave out fused"):
        nn.MultiHeadAttention(2, fused=True, cross=True)


def test_a_cache_of_another_batch_size_is_an_error():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4)
    trainables, state = layer.init(RNG, jnp.ones((2, 1, 8)))
    with pytest.raises(ValueError, match=r"needs count to be int32\[3\], but it is int32\[2\]"):
        layer.fwd(jnp.ones((3, 1, 8)), trainables, state)


def test_a_cache_can_be_narrower_than_the_computation():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4, cache_dtype="bfloat16")
    x = jnp.ones((2, 1, 8))
    trainables, state = layer.init(RNG, x)
    y, new = jax.eval_shape(layer.fwd, x, trainables, state)
    assert y.dtype == jnp.float32 and new["cache"]["key"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_cross_attention_stores_keys_and_values_of_its_source_for_later_calls(dtype):
    x, source, lengths = normal(3, 5, 8), normal(3, 7, 6), jnp.array([7, 3, 1])
    options = {"cross": True, "qk_norm": nn.RMSNorm()}
    plain = nn.MultiHeadAttention(2, **options)
    trainables, _ = plain.init(RNG, (x, source))
    wanted, _ = plain.fwd({"x": x, "source": source, "lengths": lengths}, trainables)
    cached = nn.MultiHeadAttention(2, cache=1, cache_dtype=dtype, **options)
    _, state = cached.init(RNG, (x[:, :1], source))
    first, state = cached.fwd({"x": x[:, :2], "source": source, "lengths": lengths}, trainables, state)
    step = jax.jit(cached.fwd)
    rest, new = step(x[:, 2:], trainables, state)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), wanted, atol=1e-6 if dtype is None else 0.03)
    jax.tree.map(np.testing.assert_array_equal, new, state)
    products = str(step.trace(x[:, 2:], trainables, state).jaxpr).count("dot_general")
    assert products == 4  # queries, scores, values, outputs: none for the source
    with pytest.raises(ValueError, match="call init on a source of this shape"):
        cached.fwd((x, source[:, :4]), trainables, state)


def test_memory_of_long_sequences_grows_with_their_length_and_not_its_square():
    def temporary(t, kernel):
        q, k = (jax.ShapeDtypeStruct((1, t, heads, 64), jnp.float32) for heads in (2, 1))
        loss = lambda q, k, v: ops.attention(q, k, v, causal=True, implementation=kernel).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16_384, None) < 128 * 2**20
    assert temporary(16_384, None) < 2.5 * temporary(8_192, None)
    assert temporary(16_384, "xla") > 2 * 2**30


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


def test_attention_backend_names_the_backend_and_the_reason(monkeypatch):
    def named(*shape, dtype=jnp.bfloat16, accum_dtype="float32", **options):
        q = jax.ShapeDtypeStruct(shape, dtype)
        return ops.attention_backend(q, q, q, accum_dtype=accum_dtype, **options)

    small, even = (2, 128, 4, 64), jax.ShapeDtypeStruct((1, 4, 128, 128), jnp.bfloat16)
    monkeypatch.setattr(inspect.getmodule(ops.attention_backend), "compute_capability", lambda: None)
    assert named(*small).startswith("xla: 131,072 scores") and "no NVIDIA GPU" in named(*small)
    assert named(1, 4096, 1, 64).startswith("chunked: 16,777,216 scores are too many")
    assert named(1, 4096, 1, 64, dropout=0.1).startswith("xla: the only one with dropout")
    assert named(*small, implementation="chunked") == "chunked: chosen by implementation="
    monkeypatch.setattr(inspect.getmodule(ops.attention_backend), "compute_capability", lambda: 9.0)
    refused = named(*small)  # asked, but there is no cuDNN here
    assert refused.startswith("xla: 131,072 scores") and "not cudnn, since it refuses this attention: " in refused
    monkeypatch.setattr(inspect.getmodule(ops.attention_backend), "find_refusal", lambda *_: None)
    for options in ({}, {"causal": True}, {"causal": True, "window": 7}, {"lengths": jnp.ones(2)}, {"bias": even}):
        assert named(*small, **options).startswith("cudnn: ")
    assert named(2, 128, 4, 256).startswith("cudnn: ")
    assert "needs accum_dtype='float32'" in named(*small, accum_dtype=None)
    assert "but not float32" in named(*small, dtype=jnp.float32)
    assert "up to 256 but not 260" in named(2, 128, 4, 260) and "but not 60" in named(2, 128, 4, 60)
    assert "looks back only" in named(*small, window=7)
    assert "does not support a mask or a soft cap" in named(*small, mask=even, softcap=2.0)
    assert "it supports a bias of the shape" in named(*small, bias=jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.bfloat16))
    monkeypatch.setattr(inspect.getmodule(ops.attention_backend), "compute_capability", lambda: 8.0)
    assert "up to 128 but not 256" in named(2, 128, 4, 256)


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
