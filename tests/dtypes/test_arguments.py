"""Arguments that are dtypes: what is not one is refused with the names of the function and the argument."""

import inspect

import jax.numpy as jnp
import pytest

from mlax import dtypes, nn, ops, zoo

WRONG = "floaty"
IMAGE, SEQUENCE, ROWS = jnp.ones((2, 6, 6, 4)), jnp.ones((2, 8, 4)), jnp.ones((2, 4))
HEADS, KERNEL, TABLE = jnp.ones((2, 8, 2, 4)), jnp.ones((4, 5)), jnp.ones((5, 4))
WINDOW, LABELS, PLACES = jnp.ones((5, 3, 3, 4)), jnp.ones((2, 8), "int32"), jnp.arange(3)
SCAN = (SEQUENCE, SEQUENCE, jnp.ones((4, 3)), jnp.ones((2, 8, 3)), jnp.ones((2, 8, 3)), jnp.ones(4))
CALLS = {  # by function, with the arguments before the dtype
    ops.adaptive_pool: (IMAGE, 2),
    ops.alibi: (2, PLACES, PLACES),
    ops.attention: (HEADS, HEADS, HEADS),
    ops.attention_backend: (HEADS, HEADS, HEADS),
    ops.attention_weights: (HEADS, HEADS),
    ops.batch_statistics: (IMAGE,),
    ops.conv: (IMAGE, WINDOW),
    ops.conv_transpose: (IMAGE, WINDOW),
    ops.ctc_loss: (SEQUENCE, LABELS[:, :3]),
    ops.global_pool: (IMAGE,),
    ops.group_norm: (IMAGE,),
    ops.kernel_backend: (ROWS,),
    ops.layer_norm: (ROWS,),
    ops.linear: (ROWS, KERNEL),
    ops.linear_cross_entropy: (SEQUENCE, KERNEL, LABELS),
    ops.local_response_norm: (IMAGE, 3),
    ops.mean_pool: (IMAGE, 2),
    ops.pool: (IMAGE, jnp.add, 0.0, 2),
    ops.quantize: (ROWS,),
    ops.quantized_linear: (ROWS, jnp.ones((4, 5), "int8"), jnp.ones(5)),
    ops.residual_layer_norm: (ROWS,),
    ops.residual_rms_norm: (ROWS,),
    ops.rms_norm: (ROWS,),
    ops.rotary: (HEADS,),
    ops.selective_scan: SCAN,
    ops.sinusoids: (PLACES, 4),
    ops.softmax: (ROWS,),
    ops.softmax_cross_entropy: (SEQUENCE, LABELS),
    ops.tied_cross_entropy: (SEQUENCE, TABLE, LABELS),
    ops.tied_logits: (ROWS, TABLE),
    ops.weight_norm: (KERNEL, jnp.ones(5)),
    nn.quantize: (nn.Linear(5), {"kernel": KERNEL}),
    dtypes.audit: (jnp.sin, ROWS),
    dtypes.cast: (ROWS,),
    zoo.normalize_images: (jnp.ones((2, 4, 4, 3)),),
}
OPTIONS = {ops.group_norm: {"groups": 2}}


def dtype_arguments(function):
    return [name for name in inspect.signature(function).parameters if name.endswith("dtype")]


def test_every_operation_with_a_dtype_is_listed_here():
    functions = [getattr(ops, name) for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]
    assert not [each.__name__ for each in functions if dtype_arguments(each) and each not in CALLS]


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_what_is_not_a_dtype_is_refused_with_the_names_of_function_and_argument(function):
    argument = dtype_arguments(function)[0]
    wanted = f"{function.__name__}: {argument} is 'floaty', which is not a dtype; pass a name such as 'bfloat16'"
    with pytest.raises(TypeError, match=wanted):
        function(*CALLS[function], **{argument: WRONG}, **OPTIONS.get(function, {}))
