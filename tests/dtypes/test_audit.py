"""audit finds every operation that leaves the declared dtype, with its layer and line."""

import functools
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from mlax import dtypes, nn

x = jnp.ones((4, 4), jnp.bfloat16)


def leak(x):
    with jax.named_scope("up"):
        return jnp.sin(x.astype(jnp.float32)).astype(x.dtype)


LEAK_LINE = f"test_audit.py:{inspect.getsourcelines(leak)[1] + 2} (leak)"


def scoped(name, function):
    def entered(*args):
        with jax.named_scope(name):
            return function(*args)

    return entered


def loss_of(function):
    return lambda x: function(x)[0, 0]


@jax.custom_jvp
def through_custom_jvp(x):
    return leak(x)


@through_custom_jvp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return leak(x), scoped("up", lambda t: (t.astype(jnp.float32) * 3).astype(t.dtype))(t)


def custom_vjp_of(function):
    made = jax.custom_vjp(function)
    made.defvjp(lambda x: (function(x), x), lambda x, g: (function(g),))
    return made


def through_scan(x):
    return lax.scan(lambda x, _: (leak(x), None), x, length=3)[0]


def through_while(x):
    return lax.while_loop(lambda x: x[0, 0] < 1, leak, x)


def through_loop(x):
    return lax.fori_loop(0, 3, lambda _, x: leak(x), x)


def through_cond(x):
    return lax.cond(x[0, 0] > 0, lambda x: x, leak, x)


def through_shard_map(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(leak, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def through_einsum(x):
    def product(x):
        wide = x.astype(jnp.float32)
        return jnp.einsum("ij,jk->ik", wide, wide).astype(x.dtype)

    return scoped("up", product)(x)


THROUGH = {
    "nothing": leak,
    "jit": jax.jit(leak),
    "vmap": jax.vmap(leak),
    "remat": jax.checkpoint(leak),
    "remat of jit": jax.checkpoint(jax.jit(leak)),
    "remat with a policy": jax.checkpoint(leak, policy=jax.checkpoint_policies.dots_saveable),
    "remat of custom_jvp": jax.checkpoint(through_custom_jvp),
    "vmap of custom_jvp": jax.vmap(through_custom_jvp),
    "scan": through_scan,
    "loop": through_loop,
    "cond": through_cond,
    "custom_jvp": through_custom_jvp,
    "custom_vjp": custom_vjp_of(leak),
    "shard_map": through_shard_map,
    "einsum": through_einsum,
}


def summary(violations):
    return [(violation.primitive, violation.inputs, violation.outputs) for violation in violations]


def paths(violations):
    return {violation.path for violation in violations}


LEAKED = [("convert_element_type", ("bfloat16",), ("float32",)), ("sin", ("float32",), ("float32",))]


@pytest.mark.parametrize("function", [*THROUGH.values(), through_while], ids=[*THROUGH, "while"])
def test_an_upcast_is_found_through_each_transformation_with_its_path(function):
    violations = dtypes.audit(scoped("model", scoped("mlp", function)), x)
    assert paths(violations) == {"model/mlp/up"}
    if function is not through_einsum:
        assert summary(violations) == LEAKED
        assert {violation.source for violation in violations} == {LEAK_LINE}


@pytest.mark.parametrize("function", THROUGH.values(), ids=THROUGH)
def test_the_gradient_reports_the_paths_of_the_forward_pass(function):
    model = scoped("model", scoped("mlp", function))
    violations = dtypes.audit(jax.grad(loss_of(model)), x)
    # In a branch that makes no residuals, cond itself fills in zeros of their dtype.
    filled = {"model/mlp"} if function is through_cond else set()
    assert paths(violations) == {"model/mlp/up"} | filled
    assert len(violations) > len(LEAKED)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, functools.partial(scoped, "outer")])
def test_a_gradient_inside_another_function_reports_each_path_once(wrap):
    gradient = jax.grad(lambda x: scoped("a", scoped("b", through_custom_jvp))(x).reshape(-1)[0])
    outer = "" if wrap in (jax.jit, jax.vmap) else "outer/"
    assert paths(dtypes.audit(wrap(gradient), x)) == {f"{outer}a/b/up"}


def test_a_gradient_of_a_gradient_reports_each_path_once():
    inner = jax.grad(loss_of(scoped("a", scoped("b", jax.checkpoint(leak)))))
    assert paths(dtypes.audit(jax.grad(loss_of(inner)), x)) == {"a/b/up"}


def test_three_scopes_in_a_scanned_rematted_block_are_named_forward_and_backward():
    block = jax.checkpoint(scoped("block", scoped("mlp", leak)))
    stack = scoped("blocks", lambda x: lax.scan(lambda x, _: (block(x), None), x, length=3)[0])
    forward, backward = dtypes.audit(stack, x), dtypes.audit(jax.grad(loss_of(stack)), x)
    assert paths(forward) == paths(backward) == {"blocks/block/mlp/up"}
    assert {violation.primitive for violation in backward} == {"convert_element_type", "sin", "cos", "mul"}


def test_a_layer_in_a_layer_of_the_same_name_keeps_both_names():
    def nested(function):
        return scoped("up", scoped("up", function))

    model = nested(through_custom_jvp)
    assert paths(dtypes.audit(model, x)) == {"up/up/up"}
    assert paths(dtypes.audit(jax.grad(loss_of(model)), x)) == {"up/up/up"}
    assert paths(dtypes.audit(nested(jax.grad(loss_of(through_custom_jvp))), x)) == {"up/up/up"}


def test_a_name_may_look_like_a_call():
    named = scoped("Linear(8)", through_custom_jvp)
    assert paths(dtypes.audit(jax.grad(loss_of(named)), x)) == {"Linear(8)/up"}


@pytest.mark.parametrize("flag, wrap", [("jax_remat3", jax.checkpoint), ("jax_custom_vjp3", custom_vjp_of)])
def test_an_upcast_is_found_through_a_high_level_primitive(flag, wrap):
    if not hasattr(jax.config, flag):
        pytest.skip(f"this JAX has no {flag}")
    jax.config.update(flag, True)
    try:
        model = scoped("model", scoped("mlp", wrap(leak)))
        forward, backward = dtypes.audit(model, x), dtypes.audit(jax.grad(loss_of(model)), x)
    finally:
        jax.config.update(flag, False)
    assert summary(forward) == LEAKED and len(backward) > len(LEAKED)
    assert paths(forward) == paths(backward) == {"model/mlp/up"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_clean_function_has_no_violations(dtype):
    def clean(x, key, labels):
        x = jax.nn.gelu(x @ x) * 2.0 + jnp.cumsum(x, 0) / jnp.sqrt(x.shape[0])
        x = lax.conv_general_dilated(x[None, None], x[None, None], (1, 1), "SAME")[0, 0]
        x = x + jnp.einsum("ij,kj->ik", x, x) + jax.random.normal(key, x.shape, x.dtype)
        return x[labels], jnp.max(x)

    arguments = x.astype(dtype), jax.random.key(0), jnp.arange(3)
    assert dtypes.audit(clean, *arguments) == ()
    gradient = jax.grad(lambda x, key, labels: clean(x, key, labels)[0][0, 0])
    assert dtypes.audit(gradient, *arguments) == ()
    assert dtypes.check(clean, *arguments) is None


def test_keys_integers_and_booleans_do_not_count():
    def function(x, key, n):
        bits = jax.random.bits(jax.random.fold_in(key, n), x.shape, jnp.uint8)
        return jnp.where((bits > 3) & (n > 0), x, jnp.zeros_like(x)), n + 1

    assert dtypes.audit(function, x, jax.random.key(0), jnp.int32(3)) == ()


@pytest.mark.parametrize("two", [np.float32(2), jnp.float32(2), np.full((4, 4), 2, np.float32)])
def test_a_product_with_a_float32_constant_is_found(two):
    with jax.numpy_dtype_promotion("standard"):
        violations = dtypes.audit(lambda x: x * two, x)
    assert [violation.primitive for violation in violations] == ["convert_element_type", "mul"]


def test_a_product_with_a_float32_one_hot_is_found():
    with jax.numpy_dtype_promotion("standard"):
        violations = dtypes.audit(lambda i, w: jax.nn.one_hot(i, 4) @ w, jnp.arange(3), x)
    assert "dot_general" in {violation.primitive for violation in violations}


@pytest.mark.parametrize("function", [jnp.sum, jnp.mean, jnp.var, jax.nn.softmax, jax.nn.logsumexp])
def test_a_reduction_that_is_float32_inside_is_found(function):
    violations = dtypes.audit(lambda x: function(x), x)
    assert ("reduce_sum", ("float32",), ("float32",)) in summary(violations)
    assert {violation.source.split(":")[0] for violation in violations} == {"test_audit.py"}


def test_only_a_cast_back_to_the_declared_dtype_is_allowed():
    weight = jnp.ones((4, 4), jnp.float32)
    assert dtypes.audit(lambda x, w: x @ w.astype(x.dtype), x, weight, dtype="bfloat16") == ()
    narrow = functools.partial(jnp.matmul, preferred_element_type=jnp.bfloat16)
    violations = dtypes.audit(narrow, weight, weight, dtype="bfloat16")
    assert summary(violations) == [("dot_general", ("float32", "float32"), ("bfloat16",))]
    compared = dtypes.audit(lambda x, w: w > 0, x, weight, dtype=jnp.bfloat16)
    assert summary(compared) == [("gt", ("float32", "float32"), ("bool",))]


def test_weak_scalars_are_allowed_and_weak_arrays_are_not():
    assert dtypes.audit(lambda x: x * (1 - jnp.power(0.999, 2.0)), x) == ()
    violations = dtypes.audit(lambda x: x + jnp.full(x.shape, 2.0), x)
    assert summary(violations) == [("broadcast_in_dim", ("float32",), ("float32",))]


def test_a_cast_from_a_dtype_to_itself_is_allowed():
    def strong(x):
        y = lax.convert_element_type(jnp.full((4,), 2.0), jnp.float32)  # from weak float32 to float32
        return x + y.astype(x.dtype)

    casts = [str(e) for e in jax.make_jaxpr(strong)(x).eqns if e.primitive.name == "convert_element_type"]
    assert len(casts) == 2
    assert "convert_element_type" not in {violation.primitive for violation in dtypes.audit(strong, x)}


def test_a_scatter_is_one_operation_at_its_line():
    def scatter(x, i):
        x = x.at[i].add(x[i])
        return x.at[i].add(x[i])

    table, i = jnp.ones((4, 4), jnp.float32), jnp.arange(3)
    violations = dtypes.audit(scatter, table, i, dtype="bfloat16")
    line = inspect.getsourcelines(scatter)[1]
    assert [(violation.primitive, violation.source) for violation in violations] == [
        ("gather", f"test_audit.py:{line + 1} (scatter)"),
        ("scatter-add", f"test_audit.py:{line + 1} (scatter)"),
        ("gather", f"test_audit.py:{line + 2} (scatter)"),
        ("scatter-add", f"test_audit.py:{line + 2} (scatter)"),
    ]


def test_complex_numbers_count():
    violations = dtypes.audit(lambda x: jnp.abs(jnp.fft.fft(x)), jnp.ones(4, jnp.float32))
    assert summary(violations)[-1] == ("abs", ("complex64",), ("float32",))


def test_an_unused_result_counts():
    def function(x):
        leak(x)
        return x

    assert summary(dtypes.audit(function, x)) == LEAKED


def test_float64_is_a_dtype_like_any_other():
    with jax.enable_x64(True):
        wide = jnp.ones((4, 4), jnp.float64)
        assert dtypes.audit(lambda x: jnp.sum(x @ x) * 2.0, wide) == ()
        violations = dtypes.audit(lambda x: x.astype(jnp.float64), wide.astype(jnp.float32))
    assert summary(violations) == [("convert_element_type", ("float32",), ("float64",))]


def test_shapes_are_traced_and_everything_else_is_static():
    def function(x, activation, trees, *, inference_mode, rate, state):
        assert inference_mode is True and rate == 0.5 and state is None and trees["name"] == "up"
        return activation(x + trees["bias"])

    shape = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    trees = {"bias": shape, "name": "up"}
    violations = dtypes.audit(function, shape, leak, trees, inference_mode=True, rate=0.5, state=None)
    assert summary(violations) == LEAKED


def test_no_dtype_among_the_arguments_is_an_error():
    with pytest.raises(TypeError, match=r"have int32 but .* needs one floating dtype; pass dtype="):
        dtypes.audit(lambda n: n + 1, jnp.int32(1))
    with pytest.raises(TypeError, match=r"have no arrays but"):
        dtypes.audit(lambda: None)
    assert dtypes.audit(lambda n: n + 1, jnp.int32(1), dtype="bfloat16") == ()


def test_several_dtypes_among_the_arguments_are_an_error():
    with pytest.raises(TypeError, match=r"have bfloat16, float32 but .* pass dtype="):
        dtypes.audit(lambda x, y: x, x, jnp.ones(3, jnp.float32))


def test_a_violation_in_core_reports_the_line_that_called_it():
    core = pathlib.Path(inspect.getfile(dtypes.audit)).parents[1] / "core" / "_composite.py"

    def fwd(function, x):
        return function(x) + x.astype(jnp.float32)

    fwd.__code__ = fwd.__code__.replace(co_filename=str(core))

    def wire(x):
        return fwd(lambda x: x.astype(jnp.float32), x)

    line = f"test_audit.py:{inspect.getsourcelines(wire)[1] + 1}"
    sources = [violation.source for violation in dtypes.audit(wire, x)]
    assert sources == [f"{line} (<lambda>)", f"{line} (wire)", f"{line} (wire)"]


def test_a_violation_reads_as_one_line():
    known = {"declared": "bfloat16", "outputs": ("float32",)}
    product = dtypes.DtypeViolation(
        path="blocks/mlp/up",
        primitive="dot_general",
        inputs=("bfloat16", "bfloat16"),
        source="model.py:31 (wire)",
        **known,
    )
    assert str(product) == (
        "blocks/mlp/up: dot_general bfloat16, bfloat16 -> float32, declared bfloat16, at model.py:31 (wire)"
    )
    bare = dtypes.DtypeViolation(path="", primitive="iota", inputs=(), source="", **known)
    assert str(bare) == "iota -> float32, declared bfloat16"


def test_check_raises_the_first_violation_and_says_what_to_do():
    with pytest.raises(dtypes.DtypeError) as error:
        dtypes.check(scoped("mlp", leak), x)
    assert str(error.value) == (
        f"mlp/up: convert_element_type bfloat16 -> float32, declared bfloat16, at {LEAK_LINE} "
        "(and 1 more, listed by audit); compute in the dtype of the input, "
        "or declare the override (accum_dtype, param_dtype, Mixed)."
    )
    assert isinstance(error.value, TypeError)


@pytest.mark.parametrize(
    "precision, found",
    [
        ("BF16_BF16_F32", "dot_general[BF16_BF16_F32]"),
        ("TF32_TF32_F32", "dot_general[TF32_TF32_F32]"),
        (jax.lax.DotAlgorithm(jnp.float16, jnp.float16, jnp.float32), "dot_general[float16]"),
        ("F32_F32_F32", None),
        ("highest", None),
        (None, None),
    ],
)
def test_a_product_that_is_computed_in_another_dtype_is_a_violation(precision, found):
    layer, x = nn.Linear(3, precision=precision), jnp.ones((2, 4))
    violations = dtypes.audit(layer.fwd, x, *layer.init(jax.random.key(0), x))
    assert [violation.primitive for violation in violations] == ([found] if found else [])
