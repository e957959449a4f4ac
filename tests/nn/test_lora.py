"""LoRA, beyond the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn, optim, train
from mlax.core import map_layers, unflatten_paths
from tests.arrays import normal
from tests.layers import Block
from tests.references.experts import assert_agrees_with_torch

RNG = jax.random.key(0)
X = normal(4, 6)


def test_outputs_and_gradients_agree_with_torch():
    assert_agrees_with_torch("lora", nn.LoRA(nn.Linear(5), rank=2, alpha=4.0))


def test_lora_is_initially_the_plain_linear_with_the_same_weights():
    plain, _ = nn.Linear(5).init(RNG, X)
    trainables, _ = nn.LoRA(nn.Linear(5), rank=2).init(RNG, X)
    jax.tree.map(np.testing.assert_array_equal, plain, {name: trainables[name] for name in plain})
    np.testing.assert_array_equal(nn.LoRA(nn.Linear(5), rank=2).fwd(X, trainables)[0], nn.Linear(5).fwd(X, plain)[0])


@pytest.mark.parametrize("bias", [True, False])
def test_merged_weights_compute_the_same(bias):
    with jax.enable_x64(True):
        x = jnp.asarray(X, jnp.float64)
        layer = nn.LoRA(nn.Linear(5, bias=bias), rank=3, alpha=7.0, up_init=mlax.Normal(1.0))
        trainables, _ = layer.init(RNG, x)
        merged = nn.merge_lora(layer, trainables)
        assert "lora" not in merged and merged.keys() == nn.Linear(5, bias=bias).init(RNG, x)[0].keys()
        got, _ = nn.Linear(5, bias=bias).fwd(x, merged)
        np.testing.assert_allclose(got, layer.fwd(x, trainables)[0], rtol=1e-13, atol=1e-13)
        assert not np.allclose(got, nn.Linear(5, bias=bias).fwd(x, {k: trainables[k] for k in merged})[0])


MODEL = mlax.Series(embed=nn.Linear(6), blocks=mlax.Repeat(mlax.Remat(Block(6, dropout=0.0)), 2), head=nn.Linear(3))


def with_lora(model):
    return mlax.wrap(model, ("blocks/stacked/up", "head"), lambda layer: nn.LoRA(layer, rank=2, alpha=4.0))


def test_parts_of_a_model_are_wrapped_and_merged_by_path():
    pretrained, state = MODEL.init(RNG, X)
    model = with_lora(MODEL)
    made, _ = model.init(jax.random.key(1), X)
    live = mlax.select(made, "**/lora/*")
    assert set(mlax.paths(live)) == {
        "blocks/stacked/up/lora/down",
        "blocks/stacked/up/lora/up",
        "head/lora/down",
        "head/lora/up",
    }
    assert live["blocks"]["stacked"]["up"]["lora"]["down"].shape == (2, 6, 2)

    @jax.jit
    def step(live):
        def loss(live):
            y, _ = model.fwd(X, mlax.merge(live, pretrained), state)
            return ((y - 1.0) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(live)
        return value, jax.tree.map(lambda w, g: w - 0.02 * g, live, grads)

    first, _ = step(live)
    for _ in range(20):
        last, live = step(live)
    assert last < 0.7 * first

    tuned = mlax.merge(live, pretrained)
    merged = nn.merge_lora(model, tuned)
    assert set(mlax.paths(merged)) == set(mlax.paths(pretrained))
    np.testing.assert_allclose(MODEL.fwd(X, merged, state)[0], model.fwd(X, tuned, state)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(merged["embed"]["kernel"], pretrained["embed"]["kernel"])


IDS = jnp.arange(8, dtype=jnp.int32).reshape(2, 4) % 7


def tied(first, second, *ties):
    """Two Linears with tied leaves, random trainables for them, and the output."""
    model = mlax.Tied(mlax.Series(embed=nn.Embed(7, 5), first=first, second=second), *ties)
    shapes, _ = model.init(RNG, IDS)
    leaves = {path: normal(*mlax.get(shapes, path).shape, seed=i) for i, path in enumerate(mlax.paths(shapes))}
    return model, unflatten_paths(leaves.items())


def without_lora(model):
    return map_layers(model, "", lambda path, layer: layer.layer if isinstance(layer, nn.LoRA) else layer)


def test_tied_leaves_beside_lora_stay_tied():
    ties = [mlax.Tie("second/bias", to="first/bias")]
    model, trainables = tied(nn.LoRA(nn.Linear(5), 2), nn.LoRA(nn.Linear(5), 2), *ties)
    merged = nn.merge_lora(model, trainables)
    assert mlax.paths(merged) == ("embed/table", "first/bias", "first/kernel", "second/kernel")
    wanted, _ = model.fwd(IDS, trainables)
    np.testing.assert_allclose(without_lora(model).fwd(IDS, merged)[0], wanted, rtol=1e-5, atol=1e-5)


def test_tied_kernels_with_one_tied_lora_stay_tied():
    leaves = ("kernel", "lora/down", "lora/up")
    ties = [mlax.Tie(f"second/{leaf}", to=f"first/{leaf}") for leaf in leaves]
    model, trainables = tied(nn.LoRA(nn.Linear(5), 2), nn.LoRA(nn.Linear(5), 2), *ties)
    merged = nn.merge_lora(model, trainables)
    assert mlax.paths(merged) == ("embed/table", "first/bias", "first/kernel", "second/bias")
    plain = mlax.Tied(without_lora(model.layer), ties[0])
    np.testing.assert_allclose(plain.fwd(IDS, merged)[0], model.fwd(IDS, trainables)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "tie"),
    [
        (nn.Linear(5), nn.LoRA(nn.Linear(7), 2), mlax.Tie("second/kernel", to="embed/table", transpose=True)),
        (nn.LoRA(nn.Linear(5), 2), nn.Linear(5), mlax.Tie("second/kernel", to="first/kernel")),
        (nn.LoRA(nn.Linear(5), 2), nn.LoRA(nn.Linear(5), 2), mlax.Tie("second/kernel", to="first/kernel")),
    ],
)
def test_a_tied_kernel_that_merging_would_change_is_refused_and_can_be_untied(first, second, tie):
    model, trainables = tied(first, second, tie)
    with pytest.raises(ValueError, match=f"merge_lora: {tie.leaf} is tied to {tie.to}, but merging would make them"):
        nn.merge_lora(model, trainables)
    merged = nn.merge_lora(model.layer, model.untie(trainables))
    plain = without_lora(model.layer)
    np.testing.assert_allclose(plain.fwd(IDS, merged)[0], model.fwd(IDS, trainables)[0], rtol=1e-5, atol=1e-5)


def test_the_example_in_the_docstring_gives_pretrained_weights_a_lora():
    attend = mlax.Series(query=nn.Linear(6), out=nn.Linear(6))
    model = mlax.Series(blocks=mlax.Repeat(mlax.Series(attend=attend), 2))
    pretrained, _ = model.init(RNG, X)
    lines = [
        line.strip() for line in nn.LoRA.__doc__.splitlines() if line.strip().startswith(("tuned =", "trainables ="))
    ]
    names = {"mlax": mlax, "nn": nn, "model": model, "pretrained": pretrained, "rng": jax.random.key(1), "x": X}
    exec("\n".join(lines).replace("rank=8", "rank=2"), names)
    tuned, trainables = names["tuned"], names["trainables"]
    assert mlax.paths(mlax.select(trainables, "!**/lora/*")) == mlax.paths(pretrained)
    assert len(mlax.paths(trainables)) == 2 * len(mlax.paths(pretrained))
    np.testing.assert_array_equal(tuned.fwd(X, trainables)[0], model.fwd(X, pretrained)[0])
    merged = nn.merge_lora(tuned, trainables)
    jax.tree.map(np.testing.assert_array_equal, merged, pretrained)


def test_merging_weights_that_were_donated_is_an_error_that_says_so():
    layer = nn.LoRA(nn.Linear(3), rank=1)
    trainables, _ = layer.init(RNG, X)
    trainables["kernel"].delete()
    with pytest.raises(ValueError, match="merge_lora: trainables/kernel was donated to an earlier call"):
        nn.merge_lora(layer, trainables)


def test_weights_of_pytorch_are_fine_tuned_by_lora_and_merged():
    model = mlax.Series(body=nn.Linear(8), tanh=mlax.F(jnp.tanh), head=nn.Linear(3))
    shapes = {"body.weight": (8, 6), "body.bias": (8,), "head.weight": (3, 8), "head.bias": (3,)}
    state_dict = {name: np.asarray(normal(*shape)) for name, shape in shapes.items()}
    pretrained, _ = nn.from_torch(model, state_dict, X)
    tuned = mlax.wrap(model, nn.Linear, lambda layer: nn.LoRA(layer, rank=2, alpha=8.0))
    trainables = mlax.merge(pretrained, mlax.select(tuned.init(RNG, X)[0], "**/lora/*"))
    before, wanted = jax.tree.map(np.asarray, pretrained), model.fwd(X, pretrained)[0] + 1.0

    def objective(batch, trainables, non_trainables, *, rng=None, inference_mode=False):
        y, new = tuned.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return ((y - batch["y"]) ** 2).mean(-1), new

    step = train.step(objective, optim.AdamW(0.02), train="**/lora/*")
    state, losses = step.init(RNG, trainables), []
    for _ in range(20):
        state, metrics = step(state, {"x": X, "y": wanted})
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.3 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, mlax.select(state.trainables, "!**/lora/*"), before)
    merged = nn.merge_lora(tuned, state.trainables)
    assert mlax.paths(merged) == mlax.paths(before)
    np.testing.assert_allclose(model.fwd(X, merged)[0], tuned.fwd(X, state.trainables)[0], rtol=1e-5, atol=1e-5)


def test_surgery_reaches_the_inner_linear():
    model = mlax.override(with_lora(MODEL), nn.Linear, accum_dtype="float32")
    assert mlax.get(model, "head").layer.accum_dtype == "float32"
    assert mlax.override(with_lora(MODEL), nn.LoRA, alpha=8.0) != with_lora(MODEL)


def test_weights_may_be_stored_in_another_dtype():
    layer = nn.LoRA(nn.Linear(5, param_dtype="float32"), rank=2)
    trainables, _ = layer.init(RNG, X.astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(trainables)} == {jnp.dtype("float32")}
    assert layer.fwd(X.astype(jnp.bfloat16), trainables)[0].dtype == jnp.bfloat16


def test_errors_say_what_is_wrong():
    with pytest.raises(TypeError, match=r"MLP\(\(3,\)\) is not a Linear; wrap each Linear that it is made of, once"):
        nn.LoRA(nn.MLP((3,)), rank=2)
    with pytest.raises(ValueError, match="rank is 0, but must be an integer of at least 1"):
        nn.LoRA(nn.Linear(5), rank=0)
    with pytest.raises(ValueError, match=r"the rank 6 is above the largest rank of a 6 x 5 matrix; pass at most 5"):
        nn.LoRA(nn.Linear(5), rank=6).init(RNG, X)
    with pytest.raises(ValueError, match=r"there is no LoRA in Linear\(5\)"):
        nn.merge_lora(nn.Linear(5), nn.Linear(5).init(RNG, X)[0])
    with pytest.raises(ValueError, match=r"the trainables have no lora/down; pass those of the model with LoRA"):
        nn.merge_lora(nn.LoRA(nn.Linear(5), rank=2), nn.Linear(5).init(RNG, X)[0])
    with pytest.raises(ValueError, match=r"trainables lacks lora/(up, lora/down|down, lora/up)"):
        nn.LoRA(nn.Linear(5), rank=2).fwd(X, nn.Linear(5).init(RNG, X)[0] | {"lora": {}})
