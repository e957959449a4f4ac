"""Convolutions against PyTorch, against loops over windows, and their errors."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlax
from mlax import dtypes, nn, ops
from mlax.ops import parse_layout, prefers_canonical_conv
from tests.catalogue import conv as loops

RNG = jax.random.key(0)
TORCH = np.load(Path(__file__).parents[1] / "references" / "conv.npz")
CONVS = {
    "conv_line": nn.Conv(4, 3, strides=2, padding=1),
    "conv_plane": nn.Conv(4, (3, 2), strides=(2, 1), padding=(1, 0), dilation=(1, 2)),
    "conv_groups": nn.Conv(6, 3, padding=2, groups=2),
    "conv_depthwise": nn.Conv(6, (3, 1), padding="VALID", groups="depthwise"),
    "conv_volume": nn.Conv(3, (2, 3, 2), strides=(1, 2, 2), padding=(0, 1, 1)),
    "conv_empty": nn.Conv(3, 2, padding=0),
    "transpose_line": nn.ConvTranspose(4, 4, strides=3, padding=1, output_padding=2),
    "transpose_plane": nn.ConvTranspose(4, (3, 2), strides=(2, 1), padding=1, dilation=(1, 2)),
    "transpose_groups": nn.ConvTranspose(6, 3, strides=2, padding=1, output_padding=1, groups=2),
    "transpose_volume": nn.ConvTranspose(3, 2, strides=2, padding="VALID"),
    "transpose_one": nn.ConvTranspose(4, 2, strides=2, padding="VALID"),
}
SPELT = {3: "NWC/WIO", 4: "NHWC/HWIO", 5: "NDHWC/DHWIO"}


def torch_kernel(case, name):
    """PyTorch's kernel, or its gradient, as (output, input, window...): a transposed one has its inputs first."""
    kernel = TORCH[f"{case}/{name}"]
    if case.startswith("conv"):
        return kernel
    groups = CONVS[case].groups
    apart = kernel.reshape(groups, -1, *kernel.shape[1:])  # (groups, in / groups, out / groups, window...)
    return np.moveaxis(apart, 1, 2).reshape(-1, apart.shape[1], *kernel.shape[2:])


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=pytest.mark.thorough if layout == "spelt" and number % 4 else ())
        for number, case in enumerate(CONVS)
        for layout in ("channel_first", "channel_last", "spelt")
    ],
)
def test_outputs_and_gradients_agree_with_pytorch_in_every_layout(case, layout):
    image = loops.last if layout != "channel_first" else np.asarray
    kernel = {
        "channel_first": np.asarray,
        "channel_last": loops.last,
        "spelt": lambda kernel: np.moveaxis(kernel, (0, 1), (-1, -2)),
    }[layout]
    x = image(TORCH[f"{case}/x"]).astype(np.float32)
    layer = mlax.override(CONVS[case], mlax.Layer, layout=SPELT[x.ndim] if layout == "spelt" else layout)
    weights = {"kernel": kernel(torch_kernel(case, "kernel")), "bias": TORCH[f"{case}/bias"]}
    weights = dtypes.cast(jax.tree.map(jnp.asarray, weights), "float32")
    assert jax.tree.map(jnp.shape, layer.init(RNG, x)[0]) == jax.tree.map(jnp.shape, weights)

    y, pull = jax.vjp(jax.jit(lambda x, weights: layer.fwd(x, weights)[0]), x, weights)
    d_x, d_weights = pull(jnp.asarray(image(TORCH[f"{case}/weight"]), jnp.float32))
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(y, image(TORCH[f"{case}/y"]), **close)
    np.testing.assert_allclose(d_x, image(TORCH[f"{case}/d_x"]), **close)
    np.testing.assert_allclose(d_weights["kernel"], kernel(torch_kernel(case, "d_kernel")), **close)
    np.testing.assert_allclose(d_weights["bias"], TORCH[f"{case}/d_bias"], **close)


CANONICAL = {
    "features": (nn.Conv(40, 3, padding=1), (128, 4, 4, 1)),  # pieces of a batch
    "one place": (nn.Conv(6, 1, strides=2, padding=0), (70, 5, 4, 16)),  # pieces of 35 examples
    "apart": (nn.Conv(4, (3, 2), strides=(2, 1), padding=(1, 0), dilation=(1, 2)), (9, 7, 6, 16)),
    "spelt": (nn.Conv(4, 3, pad_with="reflect", layout="HCNW/IWHO"), (4, 8, 16, 5)),
    "volume": (nn.Conv(3, 2, strides=2), (8, 3, 4, 5, 16)),
}


@pytest.mark.parametrize("case", CANONICAL)
def test_derivatives_in_the_layout_of_fast_loops_equal_those_of_jax(case, monkeypatch):
    layer, shape = CANONICAL[case]
    x = jax.random.normal(RNG, shape)
    trainables, _ = layer.init(RNG, x)
    asked = []

    def loss(trainables, x):
        return jnp.mean(jnp.square(layer.fwd(x, trainables)[0]))

    def derivatives(trainables, x):
        both = jax.grad(loss, (0, 1))
        found = {
            "both": both(trainables, x),
            "kernel only": jax.grad(loss)(trainables, x),
            "forward": jax.jvp(loss, (trainables, x), (trainables, x)),
        }
        if case == "apart":
            found["second"] = jax.grad(lambda x: jnp.sum(both(trainables, x)[0]["kernel"]))(x)
            found["mapped"] = jax.vmap(both, (None, 0))(trainables, jnp.stack([x, -x]))
        return found

    def by(canonical):
        monkeypatch.setattr(
            inspect.getmodule(ops.conv),
            "prefers_canonical_conv",
            lambda *_: asked.append(canonical) or canonical,
        )
        return jax.jit(lambda *given: derivatives(*given))(trainables, x)

    canonical, own = by(True), by(False)
    assert True in asked and False in asked
    for name in own:
        for ours, theirs in zip(jax.tree.leaves(canonical[name]), jax.tree.leaves(own[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((2, 17, 20, 3), nn.Conv(5, 7, strides=2, padding=3)),
        ((2, 19, 1), nn.Conv(4, 5, strides=3, padding="SAME")),
    ],
)
def test_strides_that_a_gpu_folds_into_channels_change_no_derivative(shape, layer, monkeypatch):
    x = jax.random.normal(RNG, shape, jnp.bfloat16).astype(jnp.float32)
    trainables, _ = layer.init(RNG, x)

    def derivatives(x, trainables):
        y, pull = jax.vjp(lambda x, trainables: layer.fwd(x, trainables)[0], x, trainables)
        return y, pull(jnp.cos(y))

    plain = jax.jit(lambda *args: derivatives(*args))(x, trainables)
    monkeypatch.setattr(inspect.getmodule(ops.conv), "prefers_folded_strides", lambda *_: True)
    folded = jax.jit(lambda *args: derivatives(*args)).trace(x, trainables)
    strides = [
        each.params["window_strides"] for each in folded.jaxpr.eqns if each.primitive.name == "conv_general_dilated"
    ]
    assert all(max(each) == 1 for each in strides)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        folded.lower().compile()(x, trainables),
        plain,
    )


def test_in_a_loop_a_convolution_and_its_gradients_have_the_layout_of_fast_loops():
    layer, x = nn.Conv(4, 3, strides=2, bias=False), jnp.zeros((2, 8, 8, 3))

    @jax.jit
    def train(trainables, x):
        def step(trainables, _):
            grads, x_grad = jax.grad(lambda *args: jnp.sum(layer.fwd(args[1], args[0])[0] ** 2), (0, 1))(trainables, x)
            return jax.tree.map(lambda each, grad: each - grad * x_grad[0, 0, 0, 0], trainables, grads), None

        return jax.lax.scan(step, trainables, length=3)[0]

    program = train.lower(layer.init(RNG, x)[0], x).compile().as_text()
    assert set(re.findall(r"dim_labels=(\S+?)[,\s]", program)) == {"b01f_01io->b01f"}


def test_narrow_grouped_and_sharded_convolutions_keep_the_layouts_of_jax():
    x = jnp.zeros((8, 12, 12, 16))
    axes = parse_layout("conv", "channel_last", x)
    assert prefers_canonical_conv(x, axes, 1, None)
    assert not prefers_canonical_conv(x.astype(jnp.bfloat16), axes, 1, None)
    assert not prefers_canonical_conv(x, axes, 1, jnp.float32)
    assert not prefers_canonical_conv(x, axes, 2, None)
    with jax.set_mesh(jax.make_mesh((1,), ("b",), (jax.sharding.AxisType.Explicit,))):
        split = jax.reshard(x, jax.P("b"))
        assert not prefers_canonical_conv(split, axes, 1, None)


@pytest.mark.parametrize(("name", "mode"), [("circular", "circular"), ("reflect", "reflect"), ("edge", "replicate")])
def test_every_padding_mode_agrees_with_pytorch(name, mode):
    case = f"pad_{mode}"
    function = jax.jit(lambda x: ops.pad(x, (2, 3), ((3, 0), (2, 1)), name))
    y, pull = jax.vjp(function, jnp.asarray(TORCH[f"{case}/x"], jnp.float32))
    np.testing.assert_allclose(y, TORCH[f"{case}/y"], rtol=1e-6)
    (d_x,) = pull(jnp.asarray(TORCH[f"{case}/weight"], jnp.float32))
    np.testing.assert_allclose(d_x, TORCH[f"{case}/d_x"], rtol=1e-5, atol=1e-6)


def test_patches_agree_with_unfold_of_pytorch():
    layer = nn.Patches((3, 2), strides=(2, 1), padding=(1, 0), dilation=(1, 2), layout="channel_first")
    y, pull = jax.vjp(jax.jit(lambda x: layer.fwd(x, None)[0]), jnp.asarray(TORCH["unfold/x"], jnp.float32))
    np.testing.assert_allclose(y.reshape(2, 18, -1), TORCH["unfold/y"], rtol=1e-6)
    (d_x,) = pull(jnp.asarray(TORCH["unfold/weight"], jnp.float32).reshape(y.shape))
    np.testing.assert_allclose(d_x, TORCH["unfold/d_x"], rtol=1e-5, atol=1e-6)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), rank=st.integers(1, 3))
def test_a_convolution_equals_a_loop_over_windows(data, rank):
    def draw(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    window, strides, dilation, groups = draw(1, 3), draw(1, 3), draw(1, 2), data.draw(st.integers(1, 2))
    sizes = tuple((k - 1) * d + 1 + more for k, d, more in zip(window, dilation, draw(0, 3), strict=True))
    pads = tuple(zip(draw(0, 2), draw(0, 2), strict=True))
    x = np.random.default_rng(0).normal(size=(2, *sizes, 2 * groups)).astype(np.float32)
    layer = nn.Conv(3 * groups, window, strides=strides, padding=pads, dilation=dilation, groups=groups)
    trainables, _ = layer.init(RNG, x)
    want = loops.conv(x, np.asarray(trainables["kernel"]), 0, strides, pads, dilation, groups)
    np.testing.assert_allclose(layer.fwd(x, trainables)[0], want, rtol=1e-4, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 7), window=st.integers(1, 4), stride=st.integers(1, 4), dilation=st.integers(1, 2))
def test_transposed_same_convolution_is_the_gradient_of_same_convolution(size, window, stride, dilation):
    x = np.random.default_rng(0).normal(size=(2, size, 3)).astype(np.float32)
    up = nn.ConvTranspose(4, window, strides=stride, dilation=dilation, bias=False)
    kernel = up.init(RNG, x)[0]["kernel"]
    down = nn.Conv(3, window, strides=stride, dilation=dilation, bias=False)
    swapped = {"kernel": jnp.swapaxes(kernel, 0, -1)}
    y, pull = jax.vjp(lambda y: down.fwd(y, swapped)[0], jnp.zeros((2, size * stride, 4)))
    assert y.shape == x.shape
    np.testing.assert_allclose(up.fwd(x, {"kernel": kernel})[0], pull(jnp.asarray(x))[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.Conv, nn.ConvTranspose])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_causal_output_depends_on_nothing_after_it(kind, stride):
    layer = kind(3, 3, strides=stride, padding="CAUSAL", dilation=2)
    x = jax.random.normal(RNG, (1, 8, 2))
    trainables, _ = layer.init(RNG, x)
    seen = jax.jacobian(lambda x: layer.fwd(x, trainables)[0].sum((0, 2)))(x)  # (windows, 1, 8, 2)
    reached = np.asarray(abs(seen).sum((1, 3)) > 0)
    for place, row in enumerate(reached):
        now = place * stride if kind is nn.Conv else place // stride
        assert row[now] or kind is nn.ConvTranspose
        assert not row[now + 1 :].any()
    assert len(reached) == (8 // stride if kind is nn.Conv else 8 * stride)


def test_same_keeps_the_size_and_divides_it_by_the_stride_rounded_up():
    for size, stride, window in [(7, 1, 4), (7, 2, 3), (8, 3, 5), (1, 2, 3), (5, 4, 1)]:
        x = jax.ShapeDtypeStruct((2, size, 3), jnp.float32)
        layer = nn.Conv(4, window, strides=stride)
        y, _ = jax.eval_shape(layer.fwd, x, layer.init(RNG, x)[0])
        assert y.shape == (2, -(-size // stride), 4)


@pytest.mark.parametrize("layout", ["channel_last", "channel_first"])
def test_a_linear_on_patches_is_a_convolution(layout):
    x = jax.random.normal(RNG, (2, 6, 6, 3) if layout == "channel_last" else (2, 3, 6, 6))
    layer = nn.Conv(4, 3, strides=2, dilation=2, layout=layout)
    trainables, _ = layer.init(RNG, x)
    cut = nn.Patches(3, strides=2, padding="SAME", dilation=2, layout=layout).fwd(x, None)[0]
    channel = -1 if layout == "channel_last" else 1
    product = jnp.moveaxis(cut, channel, -1) @ trainables["kernel"].reshape(4, -1).T
    np.testing.assert_allclose(layer.fwd(x, trainables)[0], jnp.moveaxis(product, -1, channel), rtol=1e-4, atol=1e-5)


def test_the_kernel_is_initialized_by_its_fan_in_every_layout():
    shapes = {"channel_last": (1, 9, 9, 64), "channel_first": (1, 64, 9, 9), "NHWC/HWIO": (1, 9, 9, 64)}
    for layout, shape in shapes.items():
        kernel = nn.Conv(128, 3, groups=2, layout=layout).init(RNG, jnp.zeros(shape))[0]["kernel"]
        assert abs(float(kernel.std()) * (9 * 32) ** 0.5 - 1) < 0.05


def test_accum_dtype_accumulates_wide_forward_and_backward_and_returns_the_dtype_of_the_input():
    x = jnp.full((1, 4, 1024), 1.0, jnp.bfloat16)
    layer = nn.Conv(1, 1, kernel_init=mlax.Ones(), accum_dtype="float32")
    trainables, _ = layer.init(RNG, x)
    y, _ = layer.fwd(x, trainables)
    assert y.dtype == jnp.bfloat16 and (y == 1024).all()
    grads = jax.grad(lambda weights, x: layer.fwd(x, weights)[0].sum(dtype=jnp.bfloat16), (0, 1))(trainables, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    wide = [d.primitive for d in dtypes.audit(lambda x: layer.fwd(x, trainables)[0], x)]
    assert "conv_general_dilated" in wide


def test_param_dtype_stores_wide_weights():
    x = jnp.ones((2, 5, 3), jnp.bfloat16)
    layer = nn.Conv(4, 3, param_dtype="float32")
    trainables, _ = layer.init(RNG, x)
    assert trainables["kernel"].dtype == jnp.float32
    assert layer.fwd(x, trainables)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (
            nn.Conv(8, (3, 3)),
            (4, 32, 3),
            r"Conv\(8, \(3, 3\)\): window has 2 axes but the input \(4, 32, 3\) has 1 spatial "
            r"axis; pass window=\(3,\), or add the axis that is missing: x\[\.\.\., None\] for the channels",
        ),
        (
            nn.Conv(8, 3, strides=(1, 2, 3)),
            (4, 8, 8, 3),
            r"strides has 3 axes .* has 2 spatial axes; pass strides=\(1, 2\)",
        ),
        (nn.Conv(8, 3, padding=(1, 2)), (4, 8, 3), "padding has 2 axes .* for each, such as padding="),
        (nn.Conv(8, 3, padding="same"), (4, 8, 3), "padding is 'same', but must be 'SAME', 'VALID', 'CAUSAL'"),
        (nn.Conv(8, 3, padding=-1), (4, 8, 3), "0 or more"),
        (
            nn.Conv(8, 5, padding="VALID"),
            (4, 3, 3),
            "window covers 5 positions but the input .* has 3, plus 0 of padding",
        ),
        (nn.Conv(8, 3, padding="VALID", dilation=4), (4, 8, 3), "window covers 9 positions"),
        (
            nn.Conv(8, 3, groups=3),
            (4, 8, 4),
            "groups is 3, but must be .* divides the 4 channels .* and the 8 features",
        ),
        (nn.Conv(8, 3, groups="depthwise"), (4, 8, 3), "divides the 3 channels of the input and the 8 features"),
        (nn.Conv(8, 3, groups=0), (4, 8, 3), "groups is 0"),
        (nn.Conv(8, 0), (4, 8, 3), "window is 0, but must be integers, 1 or more"),
        (nn.Conv(8, 3, strides=0), (4, 8, 3), "strides is 0"),
        (nn.Conv(8, 3), (4, 3), "needs a batch axis, spatial axes and a channel axis"),
        (nn.Conv(8, 3, layout="NHHC"), (4, 8, 8, 3), "layout is 'NHHC', but must be 'channel_last'"),
        (nn.Conv(8, 3, layout="NHWC/HWI"), (4, 8, 8, 3), "layout is 'NHWC/HWI'"),
        (nn.Conv(8, 3, layout="NHWC"), (4, 8, 3), "'NHWC' has 4 axes but the input .* has 3"),
        (nn.Conv(8, 5, pad_with="reflect"), (4, 2, 3), "is reflect but axis 1 of the input .* allows at most 1"),
        (nn.ConvTranspose(8, 3, padding=4), (4, 2, 3), "crops all of axis 1 of the output"),
        (nn.ConvTranspose(8, 3, output_padding=(1, 1)), (4, 2, 3), "output_padding has 2 axes"),
        (nn.ConvTranspose(8, 3, groups=3), (4, 2, 4), "groups is 3"),
        (nn.Patches(4), (4, 3, 3), r"Patches\(4\): the window covers 4 positions"),
    ],
)
def test_errors_say_what_does_not_fit(layer, shape, words):
    with pytest.raises(ValueError, match=words) as caught:
        layer.init(RNG, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert str(caught.value).startswith(f"{layer}: ")


@pytest.mark.parametrize(
    ("layout", "shape", "given", "words"),
    [
        ("channel_last", (2, 8, 9, 1), (2, 8, 9), r"no channel axis; pass x\[\.\.\., None\]\.$"),
        ("channel_first", (2, 1, 8, 9), (2, 8, 9), r"no channel axis; pass x\[:, None\]\.$"),
        ("channel_last", (2, 8, 9, 3), (8, 9, 3), r"no batch axis; pass x\[None\]\.$"),
    ],
)
def test_the_error_of_an_image_without_a_channel_or_batch_axis_says_how_to_add_it(layout, shape, given, words):
    layer = nn.Conv(4, 3, layout=layout)
    trainables, _ = layer.init(RNG, jnp.ones(shape))
    with pytest.raises(ValueError, match=words):
        layer.fwd(jnp.ones(given), trainables)


@pytest.mark.parametrize("kind", [nn.Conv, nn.ConvTranspose])
def test_the_error_of_an_image_in_the_other_layout_names_the_layout_that_fits(kind):
    last, first = jnp.ones((2, 8, 9, 3)), jnp.ones((2, 3, 8, 9))
    for layer, x, other, words in (
        (kind(4, 3), last, first, "If the channels come first: layout='channel_first'."),
        (kind(4, 3, layout="channel_first"), first, last, "If the channels come last: layout='channel_last'."),
    ):
        trainables, _ = layer.init(RNG, x)
        with pytest.raises(ValueError, match="but the kernel") as caught:
            layer.fwd(other, trainables)
        assert str(caught.value).endswith(words)
        with pytest.raises(ValueError, match=r"of the input\.$"):
            layer.fwd(jnp.ones((2, 8, 9, 5) if x is last else (2, 5, 8, 9)), trainables)


@pytest.mark.parametrize("features", [0, -1, 2.0])
def test_invalid_features_are_errors(features):
    for kind in (nn.Conv, nn.ConvTranspose):
        with pytest.raises((TypeError, ValueError), match=r"features is .* but must be an integer of at least 1"):
            kind(features, 3)


@pytest.mark.parametrize("kind", [nn.Conv, nn.ConvTranspose])
def test_tensor_parallelism_shards_the_outputs_of_a_kernel_in_every_layout(kind):
    for layout in ("channel_last", "channel_first", "HWNC", "CHWN", "NHWC/HWIO", "NCHW/IOHW"):
        layer = kind(8, 3, layout=layout)
        axis = layer.tensor_parallel_axes(2)["kernel"]
        trainables, _ = jax.eval_shape(layer.init, RNG, jnp.zeros((5, 5, 5, 5)))
        assert trainables["kernel"].shape[axis] == 8


def test_another_kind_of_padding_is_refused():
    with pytest.raises(TypeError, match=r"`pad_with` is 'mirror', but must be 'zeros' or 'circular'"):
        nn.Conv(8, 3, pad_with="mirror")
    with pytest.raises(ValueError, match=r"pad_with is 'mirror', but must be one of zeros, circular"):
        ops.check_pad("pad", (2, 8), (1,), ((1, 1),), "mirror")
