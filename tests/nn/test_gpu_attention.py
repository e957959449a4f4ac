"""The attention kernel of scanned stacks: interpreted, lowered for a GPU, and in place of cuDNN's forward pass."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mlax import _gpu, ops
from mlax._jax import layer_scan
from tests.arrays import normal
from tests.gpu import assume_hopper, count_kernels, interpret_kernels, needs_mosaic

CUDNN = inspect.getmodule(inspect.unwrap(ops.cudnn_attention))
KERNEL = inspect.getmodule(inspect.unwrap(_gpu.attention_kernel))
BACKEND = inspect.getmodule(inspect.unwrap(ops.attention_backend))
SPEC = ops.ScoreSpec(scale=0.125, causal=True)


def softmax_attention(q, k, v, *, scale, causal, length=None):
    """The output and the logarithms of the sums of exponentials (b, h, t), with all scores in memory."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = scale * jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=np.float32)
    row, column = (lax.broadcasted_iota(np.int32, scores.shape, axis) for axis in (2, 3))
    is_valid = column < (k.shape[1] if length is None else length)
    scores = jnp.where(is_valid & (row >= column) if causal else is_valid, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    y = jnp.einsum("bhts,bshk->bthk", jnp.exp(scores - lse[..., None]), v.astype(np.float32))
    return y.astype(q.dtype), lse


class Accumulator:
    """A register of tensor cores for the interpreter, which has no products of arrays that are in registers."""

    def __init__(self, shape: Any, dtype: Any, value: Any = None):
        self.value = jnp.zeros(shape, dtype) if value is None else value

    @classmethod
    def init(cls, value: Any) -> "Accumulator":
        return cls(value.shape, value.dtype, value)

    def __getitem__(self, index: Any) -> Any:
        return self.value

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value = value


class SharedViews:
    """Two views of shared memory, which the interpreter would allocate twice."""

    def __init__(self, view: Any, other: Any):
        self.view = view


@pytest.fixture
def interpreted(monkeypatch):
    """Run the kernel by the interpreter of Pallas: copies, barriers and arithmetic, but not the tensor cores."""
    from jax.experimental import pallas
    from jax.experimental.pallas import mosaic_gpu

    interpret_kernels(monkeypatch)
    scope = pallas.run_scoped

    def run_scoped(function: Any, *types: Any, **options: Any) -> Any:
        if all(isinstance(each, Accumulator) for each in types):
            return function(*types)
        leaves, tree = jax.tree.flatten(types, is_leaf=lambda each: isinstance(each, SharedViews))
        is_shared = [isinstance(each, SharedViews) for each in leaves]

        def run(*refs: Any) -> Any:
            pairs = zip(refs, is_shared, strict=True)
            return function(*tree.unflatten([(ref, ref) if shared else ref for ref, shared in pairs]))

        pairs = zip(leaves, is_shared, strict=True)
        return scope(run, *[each.view if shared else each for each, shared in pairs], **options)

    def run_state(function: Any) -> Any:
        def run(accumulator: Accumulator) -> Any:
            function(accumulator)
            return accumulator.value

        return run

    def multiply(accumulator: Accumulator, a: Any, b: Any) -> None:
        accumulator.value += jnp.dot(a[...], b[...], preferred_element_type=np.float32)

    monkeypatch.setattr(pallas, "run_scoped", run_scoped)
    monkeypatch.setattr(pallas, "run_state", run_state)
    monkeypatch.setattr(mosaic_gpu, "ACC", Accumulator)
    monkeypatch.setattr(mosaic_gpu, "RefUnion", SharedViews)
    monkeypatch.setattr(mosaic_gpu, "wgmma", multiply)


CASES = {  # t, heads, heads of keys, causal, length
    "causal": (256, 2, 2, True, None),
    "causal, part of a tile": (150, 2, 2, True, None),
    "causal, grouped heads and padding": (151, 4, 2, True, 130),
    "short": (128, 1, 1, False, None),
    "short, part of a tile": (67, 3, 1, False, None),
    "short, padding": (198, 2, 2, False, 197),
    "long, padding of a whole tile": (300, 1, 1, False, 100),
}


@needs_mosaic
@pytest.mark.parametrize("name", CASES)
def test_the_attention_kernel_computes_a_softmax_and_the_logarithms_of_its_sums(interpreted, name):
    t, h, g, causal, length = CASES[name]
    q, k, v = (normal(2, t, n, 64, seed=seed, dtype=jnp.bfloat16) for seed, n in enumerate((h, g, g)))
    options = {"scale": 0.125, "causal": causal, "length": length}
    y, lse = KERNEL.attention_kernel(q, k, v, **options)
    expected, expected_lse = softmax_attention(*[x.astype(np.float32) for x in (q, k, v)], **options)
    assert lse.shape == (2, h, t)
    np.testing.assert_allclose(y.astype(np.float32), expected, rtol=2**-6, atol=2**-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@needs_mosaic
@pytest.mark.parametrize(("t", "causal", "length"), [(1024, True, None), (198, False, 197), (1000, False, None)])
def test_the_attention_kernel_is_lowered_for_a_gpu(t, causal, length):
    q = jax.ShapeDtypeStruct((2, t, 4, 64), jnp.bfloat16)
    attend = functools.partial(KERNEL.attention_kernel, scale=0.125, causal=causal, length=length)
    assert count_kernels(attend, q, q, q) == 1


def test_the_kernel_is_used_only_for_what_was_measured(monkeypatch):
    q, spec = jax.ShapeDtypeStruct((2, 198, 4, 64), jnp.bfloat16), SPEC

    def keys(q=q, k=q, bias=None, lengths=None, **changes):
        return BACKEND.find_kernel_keys(q, k, k, bias, lengths, dataclasses.replace(spec, **changes))

    assert keys() is None  # there is no GPU
    assume_hopper(monkeypatch)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert keys() == 198 and keys(causal=False) == 198
    assert keys(lengths=np.full(2, 197)) == 197
    for lengths in (np.array([197, 198]), np.zeros(2, int), jax.ShapeDtypeStruct((2,), jnp.int32)):
        assert keys(lengths=lengths) is None
    odd, wide = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 197, 4, 64), (2, 198, 4, 128)))
    assert keys(odd, odd) is keys(wide, wide) is keys(q, odd) is keys(bias=q) is None
    assert keys(*[jax.ShapeDtypeStruct(q.shape, jnp.float16)] * 2) is None
    assert keys(window=7) is keys(scale=-1.0) is None
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert keys() is None


@pytest.fixture
def calls(monkeypatch):
    """The names of the forward passes that are traced, with stand-ins for cuDNN and the kernel on this device."""
    found = []

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
    def attend(q, k, v, scale, causal):
        return forward(q, k, v, scale, causal)[0]

    def forward(q, k, v, scale, causal):
        found.append("cudnn")
        y, lse = softmax_attention(q, k, v, scale=scale, causal=causal)
        return y, (q, k, v, lse, y)

    def backward(scale, causal, residuals, grad):
        """From the residuals alone, as cuDNN's."""
        q, k, v, lse, y = residuals
        scores = scale * jnp.einsum("bthk,bshk->bhts", q, k)
        weights = jnp.tril(jnp.exp(scores - lse[..., None]))
        change = jnp.einsum("bthk,bshk->bhts", grad, v) - (grad * y).sum(-1).swapaxes(1, 2)[..., None]
        change = scale * weights * change
        products = ("bhts,bshk->bthk", change, k), ("bhts,bthk->bshk", change, q), ("bhts,bthk->bshk", weights, grad)
        return tuple(jnp.einsum(*each) for each in products)

    attend.defvjp(forward, backward)

    def cudnn(q, k, v, bias, *, scale, is_causal, **_):
        return attend(q, k, v, scale, is_causal)

    def kernel(*arrays, **options):
        found.append("kernel")
        return softmax_attention(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    monkeypatch.setattr(CUDNN, "attention_kernel", kernel)
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, **forms: forms["cuda"](*args))
    return found


def plain(primals, consts):
    return softmax_attention(*primals[:3], scale=SPEC.scale, causal=True)[0]


@pytest.mark.parametrize("scan", [layer_scan, lax.scan])
def test_in_a_scan_of_layers_the_kernel_computes_the_forward_pass_for_the_backward_pass_of_cudnn(calls, scan):
    attend = ops.cudnn_attention(SPEC, plain, 6)

    def loss(function, x, w):
        def step(x, w):
            q, k, v = (jnp.tanh(x @ each).reshape(2, 6, 2, 4) for each in w)
            consts = ops.ScoreInputs(*[jnp.zeros((1, 1), jnp.int32)] * 3)
            return x + function((q, k, v, None, None), consts).reshape(x.shape), None

        return (scan(step, x, w, length=3)[0] ** 2).sum()

    args = normal(2, 6, 8), normal(3, 3, 8, 8)
    found, expected = (jax.jit(jax.grad(functools.partial(loss, each), (0, 1)))(*args) for each in (attend, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
    assert ("kernel" in calls) == (scan is layer_scan)
    text = str(jax.make_jaxpr(jax.grad(functools.partial(loss, attend)))(*args))
    assert text.count("= layer_form[") == 1
    calls.clear()
    jax.jit(functools.partial(loss, attend))(*args)
    assert "kernel" not in calls
