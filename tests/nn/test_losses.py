"""Losses: those of mlax against PyTorch and float64, and which of Optax's keep to the guarantees of mlax."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlax import dtypes, ops
from tests.asserts import assert_close
from tests.catalogue.row import FLOATS

REFERENCES = np.load(Path(__file__).parents[1] / "references/losses.npz")
LARGE = {"float16": 3e4, "bfloat16": 1e37, "float32": 1e37, "float64": 1e300}


def reference(case):
    return {name.split("/")[1]: REFERENCES[name] for name in REFERENCES.files if name.startswith(f"{case}/")}


def pull_back(loss, x, g):
    """The losses, and the gradient of the sum of `loss(x) * g`."""

    @jax.jit
    def run(x, g):
        y, vjp = jax.vjp(loss, x)
        return y, vjp(g)[0]

    return run(x, g)


def lengths_to_mask(lengths, size):
    return jnp.arange(size) < jnp.asarray(lengths)[:, None]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("classes", {}),
        ("smoothed", {"smoothing": 0.1}),
        ("probabilities", {}),
        ("smoothed_probabilities", {"smoothing": 0.2}),
        ("padded", {}),
    ],
)
def test_cross_entropy_is_that_of_pytorch(case, options):
    with jax.enable_x64(True):
        wanted = {name: jnp.asarray(array) for name, array in reference(case).items()}
        labels = wanted["labels"]
        mask = labels >= 0 if case == "padded" else None
        y, d_x = pull_back(
            lambda x: ops.softmax_cross_entropy(x, labels, mask=mask, **options), wanted["x"], wanted["g"]
        )
        assert_close(y, wanted["y"], 1e-12, 1e-12)
        assert_close(d_x, wanted["d_x"], 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", [{}, {"smoothing": 0.1, "z_loss": 1e-4}, {"mask": jnp.arange(6) < 4}])
def test_cross_entropy_of_few_classes_is_the_same_on_a_gpu(dtype, options, monkeypatch):
    """There the logit of the label is a masked sum."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 10)), dtype).at[0, 1].set(jnp.inf)
    labels, g = jnp.int32([1, 9, 0, 4, 10, -1]), jnp.ones(6, dtype)
    by_gather, by_sum = [], []
    for found in (by_gather, by_sum):
        found.extend(pull_back(lambda x: ops.softmax_cross_entropy(x, labels, **options), x, g))
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # not bitwise: where a CPU has instructions for float16, LLVM contracts other products and sums in each program
    assert_close(by_sum, by_gather, 2 * float(jnp.finfo(dtype).eps))
    if "mask" not in options:
        assert np.isnan(by_sum[0][4:]).all()


def test_ctc_is_that_of_pytorch():
    with jax.enable_x64(True):
        wanted = {name: jnp.asarray(array) for name, array in reference("ctc").items()}
        masks = {
            "logit_mask": lengths_to_mask(wanted["logit_lengths"], 12),
            "label_mask": lengths_to_mask(wanted["label_lengths"], 4),
        }
        y, d_x = pull_back(lambda x: ops.ctc_loss(x, wanted["labels"], **masks), wanted["x"], wanted["g"])
        assert_close(y, wanted["y"], 1e-12, 1e-12)
        assert_close(d_x, wanted["d_x"], 1e-12, 1e-12)


def test_labels_without_an_alignment_have_an_infinite_loss_without_gradient():
    x, labels = jnp.asarray(np.zeros((2, 3, 4), np.float32)), jnp.int32([[1, 1, -100], [1, 2, -100]])
    masks = {
        "logit_mask": jnp.array([[True, True, False], [True, True, True]]),  # [1, 1] needs three logits
        "label_mask": labels >= 0,
    }
    x = jnp.where(masks["logit_mask"][..., None], x, jnp.nan)
    y, d_x = pull_back(lambda x: ops.ctc_loss(x, labels, **masks), x, jnp.ones(2))
    assert y[0] == jnp.inf and np.isfinite(y[1])
    assert not d_x[0].any() and d_x[1].any() and jnp.isfinite(d_x).all()


def test_cross_entropy_adds_the_z_loss():
    x, labels = jnp.float32([[1, 2, 5], [0, 0, 0]]), jnp.int32([2, 1])
    extra = jax.jit(lambda x: ops.softmax_cross_entropy(x, labels, z_loss=0.1) - ops.softmax_cross_entropy(x, labels))(
        x
    )
    np.testing.assert_allclose(extra, 0.1 * jax.nn.logsumexp(x, -1) ** 2, rtol=1e-5)


def test_cross_entropy_has_the_derivatives_of_its_formula_in_both_modes_and_of_second_order():
    """By logits and by probabilities."""

    def loss(x, labels):
        return ops.softmax_cross_entropy(x, labels, smoothing=0.1, z_loss=0.01).sum()

    def formula(x, labels):
        smoothed = 0.9 * labels + 0.1 / 4
        return jnp.sum(0.01 * jax.nn.logsumexp(x, -1) ** 2 - jnp.sum(smoothed * jax.nn.log_softmax(x), -1))

    @jax.jit
    def derivatives(*args):
        return [(jax.jacfwd(f, (0, 1))(*args), jax.hessian(f, (0, 1))(*args)) for f in (loss, formula)]

    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(2, 4))
        found, wanted = derivatives(x, np.exp(x[::-1]) / np.exp(x[::-1]).sum(-1, keepdims=True))
        assert_close(found, wanted, 1e-10, 1e-10)


@pytest.mark.parametrize(
    ("name", "accum"), [("float16", None), ("bfloat16", None), ("bfloat16", "float32"), ("float32", None)]
)
def test_cross_entropy_over_fifty_thousand_classes_is_that_of_float64(name, accum):
    """Values and gradients within a few epsilons, small losses among large logits included."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 50257, 4)
    x = 4 * rng.normal(size=(4, 50257))
    x[:2, labels] += 20
    narrow = jnp.asarray(x, name)
    x = np.asarray(narrow, np.float64)
    log_sum = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
    rows = np.arange(4)
    wanted, gradient = log_sum - x[rows, labels], np.exp(x - log_sum[:, None])
    gradient[rows, labels] -= 1
    ones = jnp.ones(4, accum or name)
    y, d_x = pull_back(
        lambda x: ops.softmax_cross_entropy(x, jnp.asarray(labels, np.int32), accum_dtype=accum), narrow, ones
    )
    assert y.dtype == jnp.dtype(accum or name) and d_x.dtype == narrow.dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=4 * float(jnp.finfo(y.dtype).eps))
    np.testing.assert_allclose(np.asarray(d_x, np.float64), gradient, atol=2 * float(jnp.finfo(name).eps))


def losses(dtype):
    """Losses as functions of one argument, which the guide shows; the last axis are classes or coordinates."""
    labels, columns = np.int32([0, 2, 1, 1]), np.arange(3)
    targets, binary = jnp.asarray(columns == labels[:, None], dtype), jnp.asarray([[1] * 3, [0] * 3] * 2, dtype)
    labels, ones = jnp.asarray(labels), jnp.asarray(np.ones((4, 3)), dtype)
    return {
        "ops.softmax_cross_entropy": lambda x: ops.softmax_cross_entropy(x, labels, smoothing=0.1),
        "ops.softmax_cross_entropy of probabilities": lambda x: ops.softmax_cross_entropy(x, targets),
        "ops.ctc_loss": lambda x: ops.ctc_loss(jnp.stack([x, x]), jnp.int32([[1, 2], [2, 2]])),
        "sigmoid_binary_cross_entropy": lambda x: optax.sigmoid_binary_cross_entropy(x, binary),
        "hinge_loss": lambda x: optax.hinge_loss(x, 2 * binary - 1),
        "huber_loss": lambda x: optax.huber_loss(x, ones),
        "log_cosh": lambda x: optax.log_cosh(x, ones),
        "squared_error": lambda x: optax.squared_error(x, ones),
        "softmax_cross_entropy_with_integer_labels": lambda x: optax.softmax_cross_entropy_with_integer_labels(
            x, labels
        ),
        "softmax_cross_entropy": lambda x: optax.softmax_cross_entropy(x, targets),
        "kl_divergence": lambda x: optax.kl_divergence(jax.nn.log_softmax(x), targets),
        "sigmoid_focal_loss": lambda x: optax.sigmoid_focal_loss(x, binary),
        "cosine_distance": lambda x: optax.cosine_distance(x, ones, epsilon=1e-6),
        "triplet_margin_loss": lambda x: optax.losses.triplet_margin_loss(x, ones, targets),
    }


WITHOUT_SUMS = {"sigmoid_binary_cross_entropy", "hinge_loss", "huber_loss", "log_cosh", "squared_error"}
UNBOUNDED = {"squared_error", "triplet_margin_loss"}  # the square of a large number is infinite


RARELY = {"hinge_loss", "log_cosh", "softmax_cross_entropy", "sigmoid_focal_loss", "cosine_distance"}  # Optax's own


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in RARELY)) for name in losses("float32")]
)
def test_a_loss_keeps_the_declared_dtype_and_is_finite_at_extreme_logits(name):
    """Sums of Optax's losses are accumulated in float32 and rounded to the dtype of the logits; all else is in it."""
    for dtype in FLOATS:
        with jax.enable_x64(dtype == "float64"):
            loss, x = losses(dtype)[name], np.random.default_rng(0).normal(size=(4, 3)).astype(dtype)

            def value_and_gradient(x, loss=loss):
                return pull_back(loss, x, jnp.ones_like(jax.eval_shape(loss, x)))

            y, d_x = jax.eval_shape(value_and_gradient, x)
            assert y.dtype == d_x.dtype == jnp.dtype(dtype)
            if name.startswith("ops") or name in WITHOUT_SUMS or dtype in ("float32", "float64"):
                assert dtypes.audit(value_and_gradient, x) == ()
            if dtype in ("float16", "float32") and name not in UNBOUNDED:
                for large in (x * LARGE[dtype] / 4, np.where([True, False, False], -LARGE[dtype], x)):
                    found = value_and_gradient(large.astype(dtype))
                    assert all(np.isfinite(each).all() for each in found), (dtype, large)


def test_optax_losses_that_fail_under_strict_promotion_are_not_recommended():
    """If one of them succeeds, the guide can recommend it."""
    x, labels = jnp.ones((4, 3), jnp.bfloat16), jnp.int32([0, 2, 1, 1])
    zeros = jnp.zeros((1, 4), jnp.bfloat16)
    for loss in (
        lambda: optax.ctc_loss(x[None], zeros, labels[None, :2], zeros[:, :2]),
        lambda: optax.losses.ntxent(x, labels),
        lambda: optax.losses.multiclass_hinge_loss(x, labels),
        lambda: optax.losses.multiclass_perceptron_loss(x, labels),
        lambda: optax.losses.multiclass_sparsemax_loss(x, labels),
    ):
        with pytest.raises(jax.dtypes.TypePromotionError if hasattr(jax.dtypes, "TypePromotionError") else ValueError):
            jax.eval_shape(loss)
