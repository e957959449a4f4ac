"""The layer's path in the names of compiled operations."""

import pytest

from mlax._jax import fused_op_names, path_of, scopes_of_op_name


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("jit(f)/up/dot_general", "up"),
        ("jit(f)/jit(main)/transpose(jvp(model))/mlp/up/dot_general", "model/mlp/up"),
        ("jit(f)/jvp()/while/body/closed_call/blocks/up/add", "blocks/up"),
        ("jit(f)/transpose(jvp(blocks))/while/body/eval_jaxpr/checkpoint/rematted_computation/up/cos", "blocks/up"),
        ("jit(f)/blocks/cond/branch_1_fun/up/sin", "blocks/up"),
        ("jit(f)/vmap(up)/reduce_sum", "up"),
        ("jit(f)/transpose(jvp(a))/b/jvp(a)/b/mul", "a/b"),
        ("jit(f)/up/up/mul", "up/up"),
        ("jit(f)/Linear(8)/up/mul", "Linear(8)/up"),
        ("jit(f)/attend/bqhd,bkhd->bhqk/dot_general", "attend"),
        ("jit(f)/body/while/body/add", "body"),
        ("jit(f)/reduce_sum", ""),
        ("state['w']", ""),
        ("", ""),
    ],
)
def test_only_the_names_of_layers_remain_of_an_op_name(name, path):
    assert path_of(scopes_of_op_name(name)) == path


def test_a_fused_operation_has_the_names_of_all_its_parts():
    assert fused_op_names("jit(f)/(a/add:transpose(jvp(b))/mul)") == ["jit(f)/a/add", "jit(f)/transpose(jvp(b))/mul"]
    assert fused_op_names("f/(a/(x:y):z)") == ["f/a/x", "f/a/y", "f/z"]
    assert fused_op_names("jit(f)/up/add") == ["jit(f)/up/add"]
