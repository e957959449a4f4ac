"""cost counts FLOPs and bytes by layer and pass, and measures their time."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import inspect, nn, place
from mlax.inspect import LayerCost, Peaks


@pytest.fixture(scope="module")
def model():
    block = mlax.Residual(nn.Linear(64))
    return mlax.Series(up=nn.Linear(64), act=jax.nn.gelu, blocks=mlax.Repeat(block, 4, mode="scan"))


@pytest.fixture
def gradient(model):
    x = jnp.ones((256, 32))
    trainables, _ = model.init(jax.random.key(0), x)
    return jax.jit(jax.value_and_grad(lambda trainables, x: model.fwd(x, trainables)[0].sum())), trainables, x


def test_flops_are_those_of_the_summary_and_every_layer_is_measured(model, gradient):
    function, trainables, x = gradient
    found = inspect.cost(function, trainables, x, measure=True)
    rows = {(row.path, row.is_backward): row for row in found.rows}
    summary = {row.path: row for row in inspect.summary(model, x).rows}
    for path in ("up", "blocks/stacked/layer"):
        assert rows[path, False].flops == summary[path].forward_flops
        assert rows[path, True].flops == summary[path].backward_flops
    assert rows["up", False].bytes >= 4 * (256 * 32 + 32 * 64 + 256 * 64)
    assert rows["blocks/stacked/layer", False].kernels >= 4
    assert rows["blocks/stacked/layer", False].bytes < 4 * 4 * 4 * (64 * 64 + 3 * 256 * 64)  # slices, not the stack
    assert all(row.seconds >= 0 for row in found.rows) and rows["blocks/stacked/layer", True].seconds > 0
    assert str(found).splitlines()[1].split()[-3:] == ["measured", "of", "best"]
    assert found.peaks.flops > 1e8 and found.peaks.bandwidth > 1e8


def test_the_roofline_is_that_of_the_product_or_of_the_memory():
    peaks = Peaks("a device", "float32", flops=1e12, bandwidth=1e11)
    dense = LayerCost("a", False, flops=10**9, bytes=10**6, kernels=1, seconds=None)
    copy = LayerCost("b", False, flops=0, bytes=10**8, kernels=1, seconds=None)
    assert (dense.limit(peaks), dense.best_seconds(peaks), dense.intensity) == ("compute", 1e-3, 1000)
    assert (copy.limit(peaks), copy.best_seconds(peaks)) == ("memory", 1e-3)
    assert peaks.ridge == 10


def test_plain_functions_have_the_paths_of_their_named_scopes():
    def function(x):
        with jax.named_scope("first"):
            x = x @ x
        return jnp.tanh(x)

    found = inspect.cost(function, jax.ShapeDtypeStruct((32, 32), jnp.float32))
    assert {row.path: row.flops for row in found.rows if row.flops} == {"first": 2 * 32**3}
    assert "of best" not in str(found)


def test_over_several_devices_the_numbers_are_those_of_one(model):
    plan, x = place.data(), jnp.ones((256, 32))
    trainables, _ = model.init(jax.random.key(0), x)
    placed = plan.place(trainables), jax.device_put(x, plan.batch_sharding)
    found = inspect.cost(lambda trainables, x: model.fwd(x, trainables)[0], *placed)
    assert sum(row.flops for row in found.rows) == inspect.summary(model, x).total.forward_flops // 8


STACKS = """HloModule stacks

%fused (p0: f32[4,8,128], p1: f32[1024], p2: s32[]) -> (f32[4,8,128], f32[1024]) {
  %p0 = f32[4,8,128]{2,1,0} parameter(0)
  %flat = f32[4,1024]{1,0} bitcast(%p0)
  %p1 = f32[1024]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,1024]{1,0} dynamic-slice(%flat, %p2, %zero), dynamic_slice_sizes={1,1024}
  %sum = f32[1024]{0} add(f32[1024]{0} %p1, f32[1024]{0} %p1)
  %update = f32[1,1024]{1,0} bitcast(%sum)
  %written = f32[4,1024]{1,0} dynamic-update-slice(%flat, %update, %p2, %zero)
  %stack = f32[4,8,128]{2,1,0} bitcast(%written)
  %out = f32[1024]{0} bitcast(%row)
  ROOT %both = (f32[4,8,128]{2,1,0}, f32[1024]{0}) tuple(%stack, %out)
}

ENTRY %main (a: f32[4,8,128], b: f32[1024], i: s32[]) -> (f32[4,8,128], f32[1024]) {
  %a = f32[4,8,128]{2,1,0} parameter(0)
  %b = f32[1024]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %fusion = (f32[4,8,128]{2,1,0}, f32[1024]{0}) fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""


def test_a_stack_that_a_fusion_slices_and_updates_counts_as_the_slices_even_behind_bitcasts():
    compiled = SimpleNamespace(as_text=lambda: STACKS, input_shardings=())
    peaks = Peaks("a device", "float32", flops=1e12, bandwidth=1e11)
    (row,) = inspect.cost(compiled, peaks=peaks).rows
    assert row.bytes == 4 * 1024 * 4 + 4  # a row read, a row written, an argument read, a result written, the index
    assert inspect.cost(compiled, peaks=peaks).peaks == peaks
