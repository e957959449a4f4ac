"""Stacks of layers: what Repeat, Map and experts mark by the name "stacked" is updated layer by layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, optim
from mlax._jax import to_host
from mlax.core import flatten_paths, stacked_axes, unflatten_paths
from tests.arrays import normal

SGD = optim.SGD(1.0)
WHOLE_LEAF = {
    "Muon": optim.Muon(1e-2),
    "SOAP": optim.SOAP(1e-2),
    "Adafactor": optim.Adafactor(1e-2),
    "GaLore": optim.GaLore(1e-2, rank=2),
    "LAMB": optim.LAMB(1e-2),
    "LARS": optim.LARS(1.0),
    "ClipNorm": optim.ClipNorm(SGD, 0.5),
    "ClipAdaptive": optim.ClipAdaptive(SGD, 0.1),
    "Rates around Muon": optim.Rates(optim.Muon(1e-2), (("**/kernel", 0.5),)),
}
QUICK = ("Muon", "Adafactor", "LAMB", "LARS", "ClipNorm", "ClipAdaptive")  # the others decompose, or wrap these
RARELY = functools.partial(pytest.param, marks=pytest.mark.thorough)
X = jnp.ones((2, 3, 4))


@mlax.frozen
class Block(mlax.Composite):
    """A linear map, and a mixture of experts."""

    def parts(self):
        return {"linear": nn.Linear(4, bias=False), "moe": nn.MoE(nn.Linear(4, bias=False), 2, k=1)}

    def wire(self, sub, x):
        return x + sub.moe(sub.linear(x))[0]


def model(mode="scan"):
    return mlax.Series(blocks=mlax.Repeat(Block(), 2, mode=mode), head=nn.Linear(2))


def draw(tree, seed):
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [normal(*leaf.shape, seed=seed + i) for i, leaf in enumerate(leaves)])


def layers_of(tree):
    """The leaves with every layer of a stack as a separate leaf."""
    layers = {}
    for path, leaf in flatten_paths(tree).items():
        for index in np.ndindex(leaf.shape[: stacked_axes(path)]):
            names = iter(index)
            name = "/".join(f"layer{next(names)}" if part == "stacked" else part for part in path.split("/"))
            layers[name] = leaf[index]
    return unflatten_paths(layers.items())


def take_steps(optimizer, trainables, gradients, compiled=False):
    update, state = jax.jit(optimizer.update) if compiled else optimizer.update, optimizer.init(trainables)
    for grads in gradients:
        trainables, state = update(grads, state, trainables)
    return trainables


@pytest.mark.parametrize("name", [name if name in QUICK else RARELY(name) for name in WHOLE_LEAF])
def test_each_layer_of_a_stack_is_updated_as_if_it_were_alone(name, thorough):
    optimizer, shapes = WHOLE_LEAF[name], jax.eval_shape(model().init, jax.random.key(0), X)[0]
    trainables, gradients = draw(shapes, 0), [draw(shapes, seed) for seed in (10, 20)]
    alone = take_steps(optimizer, layers_of(trainables), [layers_of(grads) for grads in gradients], compiled=True)
    assert optimizer.is_chunkable("blocks/stacked/linear/kernel")
    eager = [(trainables, False)] if thorough else []  # the contract compares both
    on_host = [(to_host(trainables), True)] if thorough or name in ("Muon", "ClipAdaptive") else []
    for where, compiled in (*eager, (trainables, True), *on_host):
        new = jax.device_get(take_steps(optimizer, where, gradients, compiled))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), layers_of(new), alone)


@pytest.mark.parametrize(
    "name", ["Muon", *map(RARELY, ("SOAP", "Adafactor", "LAMB", "GaLore")), "ClipAdaptive", "LayerwiseRates"]
)
def test_a_stack_that_is_sharded_over_explicit_axes_is_updated_alike(name):
    optimizer = WHOLE_LEAF.get(name) or optim.LayerwiseRates(optim.LAMB(1e-2), "**", 0.5)
    mesh = jax.make_mesh((2, 4), ("layers", "model"), axis_types=(AxisType.Explicit,) * 2)
    w = {"stacked": {"experts": {"stacked": {"kernel": normal(2, 4, 6, 4)}}}}
    placed = jax.device_put(w, NamedSharding(mesh, P("layers", "model", None, None)))
    with jax.set_mesh(mesh):
        new = take_steps(optimizer, placed, [placed, placed], compiled=True)
    assert jax.tree.leaves(new)[0].sharding == jax.tree.leaves(placed)[0].sharding
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        new,
        take_steps(optimizer, w, [w, w], compiled=True),
    )


def test_the_marks_are_the_same_in_every_mode_and_survive_gradients():
    structures = set()
    for mode in ("scan", "remat", "unroll"):
        trainables, state = model(mode).init(jax.random.key(0), X)
        grads = jax.eval_shape(jax.grad(lambda t, m=mode, s=state: model(m).fwd(X, t, s)[0].sum()), trainables)
        structures.add(jax.tree.structure((trainables, trainables)) == jax.tree.structure((grads, trainables)))
        structures.add(jax.tree.structure(grads))
    assert len(structures) == 2 and True in structures
    axes = {path: stacked_axes(path) for path in flatten_paths(trainables)}
    assert axes["blocks/stacked/linear/kernel"] == 1 and axes["head/kernel"] == 0
    assert axes["blocks/stacked/moe/experts/stacked/kernel"] == 2


def test_a_stack_made_by_hand_is_named_by_a_pattern_and_a_marked_one_may_not_be():
    for wrapper in (optim.ClipNorm(SGD, 0.5, stacked="kernel"), optim.ClipAdaptive(SGD, 0.1, stacked="kernel")):
        marked = type(wrapper)(SGD, wrapper.limit)
        w, g = normal(3, 4, 5), normal(3, 4, 5, seed=1)
        by_hand = take_steps(wrapper, {"kernel": w}, [{"kernel": g}])["kernel"]
        by_path = take_steps(marked, {"stacked": {"kernel": w}}, [{"stacked": {"kernel": g}}])["stacked"]["kernel"]
        np.testing.assert_array_equal(by_hand, by_path)
        assert not np.array_equal(by_hand, take_steps(marked, {"kernel": w}, [{"kernel": g}])["kernel"])
    with pytest.raises(ValueError, match="whose path says already that it is a stack"):
        optim.LAMB(0.1, stacked="blocks/**").init({"blocks": {"stacked": {"kernel": normal(3, 4, 5)}}})


def test_layerwise_rates_count_the_layers_of_a_repeat_but_not_experts_beside_other_leaves():
    optimizer = optim.LayerwiseRates(SGD, ("embed", "blocks/**", "moe/**"), 0.5)
    trainables = {
        "embed": jnp.zeros(2),
        "blocks": {"stacked": {"kernel": jnp.zeros((3, 2))}},
        "moe": {"router": jnp.zeros(2), "experts": {"stacked": {"kernel": jnp.zeros((4, 2))}}},
    }
    new = take_steps(optimizer, trainables, [jax.tree.map(jnp.ones_like, trainables)])
    np.testing.assert_allclose(new["moe"]["experts"]["stacked"]["kernel"], -np.ones((4, 2)))
    np.testing.assert_allclose(new["blocks"]["stacked"]["kernel"][:, 0], [-0.125, -0.25, -0.5])
    np.testing.assert_allclose(new["embed"], [-0.0625] * 2)
    lamb = optim.LayerwiseRates(optim.LAMB(1.0, decay=0.0), ("blocks/**",), 0.5)  # a rate for each of nested layers
    w = {"blocks": {"stacked": {"experts": {"stacked": {"kernel": normal(3, 2, 4)}}}}}
    moved = jax.tree.map(jnp.subtract, take_steps(lamb, w, [w]), w)
    plain = jax.tree.map(jnp.subtract, take_steps(optim.LAMB(1.0, decay=0.0), w, [w]), w)
    ratio = jax.tree.leaves(moved)[0] / jax.tree.leaves(plain)[0]
    np.testing.assert_allclose(ratio, np.broadcast_to(np.array([0.25, 0.5, 1.0])[:, None, None], (3, 2, 4)), rtol=1e-5)
    two = optim.LayerwiseRates(SGD, ("**",))
    with pytest.raises(ValueError, match=r"first axes of \[2, 3\].*a separate pattern"):
        two.factors({"a/stacked/w": (2, 1), "b/stacked/w": (3, 1)})


def test_muon_refuses_a_kernel_that_may_be_a_stack_or_a_convolution():
    with pytest.raises(ValueError, match=r"may be a convolution's or a stack.*matrices=.*stacked=\('conv/kernel',\)"):
        optim.Muon().init({"conv": {"kernel": jnp.ones((2, 3, 3))}})
    with pytest.raises(
        ValueError, match=r"\(2, 3, 3\) in each layer, which may be a convolution's.*matrices="
    ) as caught:
        optim.Muon().init({"conv": {"stacked": {"kernel": jnp.ones((5, 2, 3, 3))}}})
    assert "stacked=(" not in str(caught.value)
    optim.Muon(matrices="**/kernel").init({"conv": {"kernel": jnp.ones((2, 3, 3))}})
    optim.Muon(stacked="**/kernel").init({"conv": {"kernel": jnp.ones((2, 3, 3))}})


def test_muon_passes_overrides_chunks_and_wrappers_on_to_the_optimizer_of_the_rest():
    optimizer = optim.Muon(1.0, rest=optim.Adam(1.0, b1=0.5))
    assert optimizer.inner_optimizers() == (optimizer.rest,)
    assert optimizer.is_chunkable("bias") and not optimizer.is_chunkable("kernel")
    w = {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 2))}
    grads = {"bias": jnp.array([1.0, -1.0]), "kernel": jnp.eye(2)}
    state = optimizer.init(w)
    _, after = optimizer.update(grads, state, w, b1=0.0)
    np.testing.assert_allclose(after.mean["bias"], grads["bias"])
    still, _ = optimizer.update(grads, state, w, rate=0.0)  # Muon's own, since both have one
    np.testing.assert_array_equal(still["kernel"], w["kernel"])
    np.testing.assert_allclose(still["bias"], [-1.0, 1.0], rtol=1e-5)
    with pytest.raises(TypeError, match="no hyperparameter 'momentun'"):
        optimizer.update(grads, state, w, momentun=0.0)


@pytest.mark.parametrize("name", WHOLE_LEAF)
def test_an_empty_leaf_is_left_as_it_is(name):
    w = {
        "a": {"kernel": jnp.zeros((0, 3))},
        "b": {"stacked": {"kernel": jnp.zeros((2, 3, 0))}},
        "kernel": jnp.ones((2, 2)),
    }
    new = take_steps(WHOLE_LEAF[name], w, [w, w])
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, w)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


def test_the_name_of_a_stack_is_reserved():
    with pytest.raises(ValueError, match=r"a part cannot be called 'stacked'.*rename it"):
        mlax.Series(stacked=nn.Linear(2)).init(jax.random.key(0), X)

    @mlax.frozen
    class Named(mlax.Layer):
        """A layer with a variable of that name."""

        def init(self, rng, x):
            return {"stacked": jnp.ones(2)}, None

        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            return x, non_trainables

    with pytest.raises(ValueError, match=r"a variable cannot be called 'stacked'.*rename it"):
        Named().init(jax.random.key(0), X)


def test_weights_without_the_name_are_refused_with_the_way_to_insert_it():
    repeat = mlax.Series(blocks=mlax.Repeat(nn.Linear(4), 3))
    trainables, _ = repeat.init(jax.random.key(0), X)
    old = {"blocks": trainables["blocks"]["stacked"]}
    with pytest.raises(
        ValueError, match=r'under \'stacked\' alone.*mlax.rename\(trainables, {"blocks": "blocks/stacked"}'
    ):
        repeat.fwd(X, old)
    renamed = mlax.rename(old, {"blocks": "blocks/stacked"})
    np.testing.assert_array_equal(repeat.fwd(X, renamed)[0], repeat.fwd(X, trainables)[0])


def test_a_tie_inside_a_stack_transposes_each_layer():
    block = mlax.Series(up=nn.Linear(4, bias=False), down=nn.Linear(4, bias=False))
    tie = mlax.Tie("stacked/down/kernel", to="stacked/up/kernel", transpose=True)
    tied = mlax.Tied(mlax.Repeat(block, 4), tie)
    trainables, _ = tied.init(jax.random.key(0), X)
    wanted = X
    for kernel in trainables["stacked"]["up"]["kernel"]:
        wanted = wanted @ kernel @ kernel.T
    np.testing.assert_allclose(tied.fwd(X, trainables)[0], wanted, rtol=1e-5)
    with pytest.raises(ValueError, match="not in the same stack of layers"):
        mlax.Tied(
            mlax.Series(a=mlax.Repeat(nn.Linear(4), 4), b=mlax.Map(nn.Linear(4))),
            mlax.Tie("b/kernel", to="a/stacked/kernel"),
        ).init(jax.random.key(0), X)
