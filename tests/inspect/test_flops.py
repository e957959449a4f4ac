"""The FLOPs of a function, against counts by hand."""

import collections
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn
from mlax.inspect import flops, operations


def counted(function, *shapes):
    return flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def conv(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (jnp.matmul, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(7, 3, 4), (7, 4, 5)], 2 * 7 * 3 * 4 * 5),
        (conv, [(2, 8, 8, 3), (3, 3, 3, 16)], 2 * 2 * 6 * 6 * 16 * 3 * 3 * 3),
        (
            lambda x, k: conv(x, k, feature_group_count=4),
            [(2, 8, 8, 4), (3, 3, 1, 8)],
            2 * 2 * 6 * 6 * 8 * 3 * 3 * 1,
        ),
        (
            lambda x, k: conv(x, k, batch_group_count=4),  # each output channel sees its quarter of the batch
            [(8, 8, 8, 3), (3, 3, 3, 16)],
            2 * 2 * 6 * 6 * 16 * 3 * 3 * 3,
        ),
        (lambda a, w: lax.scan(lambda c, _: (c @ w, None), a, None, length=6)[0], [(3, 4), (4, 4)], 6 * 2 * 3 * 4 * 4),
        (
            lambda a, w: lax.cond(a[0, 0] > 0, lambda: a @ w @ w, lambda: a @ w),
            [(3, 4), (4, 4)],
            2 * 2 * 3 * 4 * 4,
        ),
        (jax.jit(jax.checkpoint(jnp.matmul)), [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (lambda a: jnp.tanh(a) + 1, [(3, 4)], 0),
    ],
)
def test_matrix_products_and_convolutions_are_counted(function, shapes, expected):
    assert counted(function, *shapes) == expected


def test_zeros_between_the_elements_of_a_dilated_input_are_not_counted():
    def transposed(x, kernel):  # the gradient of a convolution with strides 2, in its input
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), [(1, 1)] * 2, (2, 2), dimension_numbers=numbers)

    shapes = (2, 8, 8, 3), (2, 2, 3, 16)
    one_of_four = 2 * 2 * 16 * 16 * 16 * 3  # each output sees one element of the window
    assert counted(transposed, *shapes) == one_of_four


def test_the_body_of_a_shard_map_counts_once_for_each_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert counted(sharded, (16, 4), (4, 5)) == 2 * 16 * 4 * 5


def test_operations_have_the_path_of_their_layer_in_both_passes():
    model = mlax.Series(up=nn.Linear(6), blocks=mlax.Repeat(mlax.Residual(nn.Linear(6)), 3, mode="scan"))
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((4, 5), jnp.float32))
    jaxpr = jax.make_jaxpr(jax.grad(lambda trainables, x: model.fwd(x, trainables)[0].sum()))(
        trainables, jax.ShapeDtypeStruct((4, 5), jnp.float32)
    )
    found = collections.Counter()
    for operation in operations(jaxpr):
        found[operation.path, operation.is_backward] += operation.flops
    up, layer = 2 * 4 * 5 * 6, 3 * 2 * 4 * 6 * 6
    assert {key: value for key, value in found.items() if value} == {
        ("up", False): up,
        ("up", True): up,  # of the kernel; the gradient of the input is not needed
        ("blocks/stacked/layer", False): layer,
        ("blocks/stacked/layer", True): 2 * layer,
    }


@pytest.mark.parametrize(("name", "products"), [("fwd", 2), ("fwd_wrapper", 2), ("bwd_wrapper", 5)])
@pytest.mark.parametrize(("layout", "shape"), [(0, (2, 256, 4, 64)), (1, (2, 4, 256, 64))])
def test_attention_by_cudnn_counts_all_scores(name, products, layout, shape):
    array = types.SimpleNamespace(aval=jax.ShapeDtypeStruct(shape, "bfloat16"))
    equation = types.SimpleNamespace(  # which JAX traces only where cuDNN is installed
        primitive=types.SimpleNamespace(name=f"dot_product_attention_{name}"),
        invars=[array] * 3,
        outvars=[array],
        params={"layout": layout},
        effects=(),
    )
    jaxpr = types.SimpleNamespace(eqns=[equation], outvars=[array])
    assert flops(jaxpr) == products * 2 * 2 * 4 * 256 * 256 * 64


@pytest.mark.parametrize("groups", ["feature_group_count", "batch_group_count"])
def test_a_grouped_convolution_is_counted_as_by_xla(groups):
    x, k = jnp.ones((8, 8, 8, 4)), jnp.ones((3, 3, 1 if groups == "feature_group_count" else 4, 16))
    traced = jax.jit(lambda x, k: conv(x, k, **{groups: 4})).trace(x, k)
    assert flops(traced.jaxpr) == traced.lower().compile().cost_analysis()["flops"]


def test_training_takes_three_times_the_forward_pass():
    def loss(w1, w2, x):
        return jnp.sum(jnp.tanh(x @ w1) @ w2)

    shapes = [(4, 5), (5, 6), (3, 4)]
    forward = counted(loss, *shapes)
    # without a gradient of the input there is no product with the first kernel
    assert counted(jax.value_and_grad(loss, (0, 1)), *shapes) == 3 * forward - 2 * 3 * 4 * 5


def test_the_kernel_gradient_of_a_convolution_costs_as_much_as_the_convolution():
    shapes = [(2, 8, 8, 3), (3, 3, 3, 16)]
    forward = counted(conv, *shapes)
    gradient = counted(jax.grad(lambda x, k: conv(x, k).sum(), 1), *shapes)
    assert gradient == forward  # the forward pass itself is not used


def test_a_pallas_kernel_counts_once_for_each_point_of_its_grid():
    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    rows, whole = pallas.BlockSpec((8, 32), lambda i: (i, 0)), pallas.BlockSpec((32, 16), lambda i: (0, 0))
    tiled = pallas.pallas_call(
        kernel,
        grid=(4,),
        in_specs=[rows, whole],
        out_specs=pallas.BlockSpec((8, 16), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((32, 16), jnp.float32),
    )
    assert counted(tiled, (32, 32), (32, 16)) == 2 * 32 * 32 * 16


def test_a_function_in_place_of_a_jaxpr_is_refused():
    with pytest.raises(TypeError, match=r"pass jax.make_jaxpr\(function\)"):
        flops(jnp.matmul)
