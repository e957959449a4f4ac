"""The forms of attention, in chunks, in blocks of queries and by cuDNN: derivatives, memory, and which is chosen."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mlax import ops
from tests.arrays import normal, normals
from tests.asserts import assert_close_to_scale

RNG = jax.random.key(0)


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
            jax.jit(pull, static_argnums=0)(functools.partial(loss, implementation=name), arrays)
            for name in ("xla", "chunked")
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
    choose = lax.platform_dependent

    def choose_gpu(*args, **forms):
        return forms["cuda"](*args) if "cuda" in forms else choose(*args, **forms)

    monkeypatch.setattr(lax, "platform_dependent", choose_gpu)
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


def test_lengths_that_are_known_to_be_positive_leave_out_the_zeros_of_rows_without_keys(fused):
    q, k, v = normals((2, 4, 4, 2), (2, 6, 2, 2), (2, 6, 2, 2))
    spec = ops.ScoreSpec(scale=0.5, causal=True, has_keys=True)
    known = ops.cudnn_attention(spec, functools.partial(form, spec=spec))

    def run(attend, lengths):
        consts = ops.ScoreInputs(*[jnp.zeros((1, 1), jnp.int32)] * 3, key_limit=lengths)
        return jax.grad(lambda x: (attend((*x, None, None), consts) ** 2).sum())((q, k, v))

    lengths = np.array([2, 6], np.int32)
    assert_close_to_scale(run(known, lengths), run(fused, lengths))
    texts = [str(jax.make_jaxpr(functools.partial(run, attend))(lengths)) for attend in (known, fused)]
    assert texts[0].count("select_n") < texts[1].count("select_n")


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
    inspect.getmodule(inspect.getmodule(ops.attention_backend).find_refusal)._find_refusal.cache_clear()


def test_memory_of_long_sequences_grows_with_their_length_and_not_its_square():
    def temporary(t, kernel):
        q, k = (jax.ShapeDtypeStruct((1, t, heads, 64), jnp.float32) for heads in (2, 1))
        loss = lambda q, k, v: ops.attention(q, k, v, causal=True, implementation=kernel).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16_384, None) < 128 * 2**20
    assert temporary(16_384, None) < 2.5 * temporary(8_192, None)
    assert temporary(16_384, "xla") > 2 * 2**30


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
    assert "a window with lengths" in named(*small, causal=True, window=7, lengths=jnp.ones(2))
    assert "does not support a mask or a soft cap" in named(*small, mask=even, softcap=2.0)
    assert "it supports a bias of the shape" in named(*small, bias=jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.bfloat16))
    monkeypatch.setattr(inspect.getmodule(ops.attention_backend), "compute_capability", lambda: 8.0)
    assert "up to 128 but not 256" in named(2, 128, 4, 256)
