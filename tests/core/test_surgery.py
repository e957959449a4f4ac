"""Surgery on descriptions and on variable trees, by path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn
from mlax.core import find_layers, matches
from tests.layers import Block

X = jnp.ones((2, 6))
MODEL = mlax.Series(
    embed=nn.Linear(6),
    blocks=mlax.Repeat(mlax.Remat(Block(6)), 2),
    tail=mlax.Residual(nn.LayerNorm()),
)


@pytest.fixture(scope="module")
def trainables():
    return MODEL.init(jax.random.key(0), X)[0]


def test_parts_are_found_by_path_through_wrappers():
    assert mlax.get(MODEL, "blocks/stacked/norm") == nn.LayerNorm()
    assert mlax.get(MODEL, "tail/layer") == nn.LayerNorm()
    assert mlax.get(MODEL, "blocks") == mlax.Repeat(mlax.Remat(Block(6)), 2)


def test_a_path_in_the_model_is_the_path_of_its_variables(trainables):
    owners = {path.rsplit("/", 1)[0] for path in mlax.paths(trainables)}
    assert owners <= set(mlax.layers(MODEL))


def test_replacing_a_part_changes_only_that_part():
    edited = mlax.replace(MODEL, "blocks/stacked/norm", nn.LayerNorm(eps=1e-3))
    assert mlax.get(edited, "blocks/stacked/norm") == nn.LayerNorm(eps=1e-3)
    assert mlax.get(edited, "blocks/stacked/up") == mlax.get(MODEL, "blocks/stacked/up")
    assert mlax.get(edited, "tail") == mlax.get(MODEL, "tail")
    assert edited != MODEL
    assert mlax.replace(edited, "blocks/stacked/norm", nn.LayerNorm(eps=1e-3)) == edited


def test_an_edited_model_runs_and_keeps_the_other_variables(trainables):
    edited = mlax.replace(MODEL, "blocks/stacked/norm", nn.Scaler())
    new, _ = edited.init(jax.random.key(0), X)
    assert "shift" not in new["blocks"]["stacked"]["norm"]
    np.testing.assert_array_equal(
        new["blocks"]["stacked"]["up"]["kernel"], trainables["blocks"]["stacked"]["up"]["kernel"]
    )


def test_a_pattern_replaces_every_match():
    edited = mlax.replace(MODEL, "**/norm", mlax.F(jnp.tanh))
    assert mlax.get(edited, "blocks/stacked/norm") == mlax.F(jnp.tanh)


def test_a_field_is_overridden_on_all_parts_of_a_type():
    edited = mlax.override(MODEL, nn.LayerNorm, accum_dtype="float32")
    norms = [layer for layer in mlax.layers(edited).values() if isinstance(layer, nn.LayerNorm)]
    assert [norm.accum_dtype for norm in norms] == ["float32", "float32"]
    both = mlax.override(MODEL, (nn.LayerNorm, nn.Linear), param_dtype="float32")
    assert mlax.get(both, "embed").param_dtype == mlax.get(both, "tail/layer").param_dtype == "float32"


def test_override_reaches_a_wrapped_layer_and_the_model_itself():
    assert mlax.override(mlax.Remat(nn.LayerNorm()), nn.LayerNorm, eps=0.1).layer.eps == 0.1
    assert mlax.override(mlax.Repeat(nn.LayerNorm(), 2), mlax.Repeat, mode="unroll").mode == "unroll"


def test_errors_of_surgery_suggest_the_closest_path():
    with pytest.raises(KeyError, match="'blocks/nrom' matches nothing; did you mean 'blocks/stacked/norm'"):
        mlax.get(MODEL, "blocks/nrom")
    with pytest.raises(KeyError, match="matches nothing"):
        mlax.replace(MODEL, "**/attend", nn.Linear(3))
    with pytest.raises(ValueError, match=r"no part is a Embed; the model is made of .*LayerNorm"):
        mlax.override(MODEL, nn.Embed, width=3)
    with pytest.raises(TypeError, match=r"LayerNorm\(\) has no field epsilon; it has .*eps"):
        mlax.override(MODEL, nn.LayerNorm, epsilon=1e-6)


def test_leaves_are_selected_by_pattern(trainables):
    kernels = mlax.select(trainables, "**/kernel")
    assert set(mlax.paths(kernels)) == {"embed/kernel", "blocks/stacked/up/kernel", "blocks/stacked/down/kernel"}
    assert mlax.select(trainables, "tail/**", "embed/bias").keys() == {"tail", "embed"}


def test_frozen_and_trainable_leaves_merge_into_the_whole_tree(trainables):
    live, frozen = mlax.freeze(trainables, "embed/**", "**/norm/*")
    assert "embed" not in live and set(frozen) == {"embed", "blocks"}
    whole = mlax.merge(live, frozen)
    assert jax.tree.structure(whole) == jax.tree.structure(trainables)
    jax.tree.map(np.testing.assert_array_equal, whole, trainables)


def test_frozen_leaves_get_no_gradient(trainables):
    model = mlax.Series(a=nn.Linear(6), b=nn.Linear(3))
    everything, _ = model.init(jax.random.key(0), X)
    live, frozen = mlax.freeze(everything, "a/**")
    grads = jax.grad(lambda live: model.fwd(X, mlax.merge(live, frozen))[0].sum())(live)
    assert set(mlax.paths(grads)) == {"b/kernel", "b/bias"}


def test_merging_one_leaf_twice_is_an_error(trainables):
    with pytest.raises(ValueError, match="two trees have the leaf 'embed/bias'"):
        mlax.merge(trainables, mlax.select(trainables, "embed/bias"))


def test_leaves_and_subtrees_are_renamed(trainables):
    renamed = mlax.rename(trainables, {"embed": "stem/proj", "tail/layer/scale": "tail/layer/gain"})
    assert "stem/proj/kernel" in mlax.paths(renamed) and "tail/layer/gain" in mlax.paths(renamed)
    assert mlax.count(renamed) == mlax.count(trainables)
    swapped = mlax.rename({"a": jnp.ones(1), "b": jnp.zeros(1)}, {"a": "b", "b": "a"})
    assert swapped["a"] == 0 and swapped["b"] == 1


def test_a_rename_that_collides_or_matches_nothing_is_an_error(trainables):
    with pytest.raises(ValueError, match="occurs twice"):
        mlax.rename(trainables, {"embed/kernel": "embed/bias"})
    with pytest.raises(ValueError, match="is already a leaf"):
        mlax.rename(trainables, {"tail": "embed/kernel"})
    with pytest.raises(KeyError, match="did you mean"):
        mlax.rename(trainables, {"embed/kernal": "x"})


def test_count_counts_parameters(trainables):
    assert mlax.count(trainables, "embed/*") == 6 * 6 + 6
    assert mlax.count(None) == 0
    assert mlax.count(jax.eval_shape(MODEL.init, jax.random.key(0), X)[0]) == mlax.count(trainables)


def test_counting_anything_but_a_variable_tree_is_an_error():
    with pytest.raises(TypeError, match=r"count takes variables, as init returns them, but got the model Linear\(3\)"):
        mlax.count(nn.Linear(3))
    with pytest.raises(TypeError, match=r"but got a tuple; write count\(trainables\)"):
        mlax.count(nn.Linear(3).init(jax.random.key(0), X))


def test_leaves_and_subtrees_are_replaced(trainables):
    edited = mlax.replace(trainables, "embed/bias", jnp.ones(6))
    assert edited["embed"]["bias"].sum() == 6 and trainables["embed"]["bias"].sum() == 0
    edited = mlax.replace(trainables, "tail/layer", {"gain": jnp.ones(6)})
    assert set(edited["tail"]["layer"]) == {"gain"}
    edited = mlax.replace(trainables, "**/bias", jnp.zeros(1))
    assert edited["blocks"]["stacked"]["up"]["bias"].shape == (1,)


def test_the_error_names_a_path_that_does_not_exist(trainables):
    with pytest.raises(KeyError, match="did you mean"):
        mlax.get(trainables, "embed/kernle")
    with pytest.raises(KeyError) as caught:
        mlax.get(trainables, "zzz/yyy")
    first = ", ".join(mlax.paths(trainables)[:8])
    assert str(caught.value).startswith(f"'zzz/yyy' matches nothing; there are {first}")
    assert mlax.get(trainables, "tail/layer").keys() == {"scale", "shift"}


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("**", "a/b", True),
        ("**/kernel", "kernel", True),
        ("**/kernel", "a/b/kernel", True),
        ("**/kernel", "kernel/a", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/xb", False),
        ("a/**", "a", True),
        ("a/**", "ab", False),
        ("*/k", "a/k", True),
        ("*/k", "a/b/k", False),
        ("lin*_0/k", "linear_0/k", True),
        ("a.b", "axb", False),
    ],
)
def test_patterns_match_whole_names(pattern, path, matches):
    leaves = mlax.rename({"leaf": 1, "other": 2}, {"leaf": path})
    if matches:
        assert path in mlax.paths(mlax.select(leaves, pattern))
    else:
        with pytest.raises(KeyError):
            mlax.select(leaves, pattern)


def test_presets_of_mixed_precision_widen_only_the_statistics():
    mixed = dtypes.mixed_bfloat16(MODEL)
    assert mlax.get(mixed, "blocks/stacked/norm").accum_dtype == "float32"
    assert mlax.get(mixed, "tail/layer").accum_dtype == "float32"
    assert mlax.get(mixed, "blocks/stacked/up").accum_dtype is None
    assert (mixed.compute, mixed.output, mixed.param_dtype) == ("bfloat16", "float32", "float32")


LEAVES = {name: {"kernel": 0, "bias": 0} for name in ("embed", "norm", "head")}


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (("!embed/**",), ("head/bias", "head/kernel", "norm/bias", "norm/kernel")),
        (("!embed/**", "!**/bias"), ("head/kernel", "norm/kernel")),
        (("**/kernel", "!embed/**"), ("head/kernel", "norm/kernel")),
        (("!embed/**", "**/kernel"), ("head/kernel", "norm/kernel")),
        (("head/*", "embed/kernel", "!**/bias"), ("embed/kernel", "head/kernel")),
    ],
)
def test_a_pattern_with_an_exclamation_mark_leaves_out_what_it_matches_in_any_order(patterns, wanted):
    assert mlax.paths(mlax.select(LEAVES, *patterns)) == wanted
    live, frozen = mlax.freeze(LEAVES, *patterns)
    assert mlax.paths(frozen) == wanted and not set(mlax.paths(live)) & set(wanted)
    assert tuple(path for path in mlax.paths(LEAVES) if matches(patterns, path)) == wanted


def test_a_pattern_that_leaves_out_nothing_or_all_is_an_error():
    with pytest.raises(KeyError, match=r"'!embd/\*\*' excludes nothing; did you mean '!embed/\*\*'\?"):
        mlax.select(LEAVES, "!embd/**")
    with pytest.raises(KeyError, match=r"'!norm/weight' excludes nothing; did you mean '!norm/kernel'\?"):
        mlax.count(LEAVES, "**", "!norm/weight")
    with pytest.raises(KeyError, match=r"'norm/\*', '!\*\*/\*' exclude all that they match"):
        mlax.freeze(LEAVES, "norm/*", "!**/*")


@mlax.frozen
class Twice(mlax.Wrapper):
    """A user's wrapper, without variables."""

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return 2 * y, new


@mlax.frozen
class Grouped(mlax.Composite):
    """Parts in a tuple and in a dict, and one that is not a field."""

    layers: tuple[mlax.Layer, ...]
    heads: dict[str, mlax.Layer]

    def parts(self):
        return {**super().parts(), "last": nn.Linear(6)}

    def wire(self, sub, x):
        for layer in sub.layers:
            x = layer(x)
        return sub.last(sub.heads["a"](x))


GROUPED = Grouped((nn.Linear(6), nn.LayerNorm()), {"a": nn.Linear(6)})
NESTED = mlax.Series(
    nn.Linear(6), blocks=MODEL, groups=GROUPED, each=mlax.Map(nn.Linear(1), variables=0), out=mlax.Remat(nn.Linear(6))
)
NESTED = mlax.replace(NESTED, "blocks/blocks/stacked/norm", nn.Linear(6))  # an edit
NESTED = mlax.Series(first=NESTED, last=nn.Linear(6))
WRAPPERS = {
    "LoRA": lambda layer: nn.LoRA(layer, rank=1),
    "Remat": mlax.Remat,
    "SpectralNorm": nn.SpectralNorm,
    "WeightNorm": nn.WeightNorm,
    "Mixed": lambda layer: dtypes.Mixed(layer, compute="bfloat16", output="float32"),
    "Twice": Twice,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_layer_of_a_class_is_wrapped_once_and_the_other_variables_keep_their_paths(name):
    x = X[..., None]

    def call(model, rng, x):
        made = model.init(rng, x)
        return made[0], model.fwd(x, *made, rng=rng)[0]

    shapes = {}
    for model in (NESTED, mlax.wrap(NESTED, nn.Linear, WRAPPERS[name])):
        shapes[model], y = jax.eval_shape(functools.partial(call, model), jax.random.key(0), x)
        assert y.shape == (2, 6, 6) and y.dtype == x.dtype
    plain, wrapped = (set(mlax.paths(tree)) for tree in shapes.values())
    owners = {path.removesuffix("kernel") for path in plain if path.endswith("kernel")}
    kept = {path for path in plain if not path.endswith("kernel")}
    added = {"LoRA": ("kernel", "lora/down", "lora/up"), "WeightNorm": ("kernel/direction", "kernel/magnitude")}
    assert wrapped == kept | {f"{owner}{leaf}" for owner in owners for leaf in added.get(name, ("kernel",))}
    assert len(owners) == len(find_layers(model, type(WRAPPERS[name](nn.Linear(1))))) - (name == "Remat") * 2


def test_layers_are_wrapped_by_pattern_parts_before_their_owners():
    edited = mlax.wrap(MODEL, ("blocks/**/norm", "tail", "tail/*", "!embed"), Twice)
    assert mlax.get(edited, "blocks/stacked/norm") == Twice(nn.LayerNorm())
    assert mlax.get(edited, "tail") == Twice(mlax.Residual(Twice(nn.LayerNorm())))
    assert mlax.get(edited, "embed") == nn.Linear(6)
    assert mlax.wrap(nn.Linear(3), "**", Twice) == mlax.wrap(nn.Linear(3), nn.Linear, Twice) == Twice(nn.Linear(3))
    outside = mlax.wrap(mlax.Series(a=mlax.Remat(nn.Linear(3))), "a", Twice)
    assert mlax.get(outside, "a") == Twice(mlax.Remat(nn.Linear(3)))


def test_equal_layers_stay_equal_and_those_of_several_classes_are_wrapped():
    model = mlax.Series(a=nn.Linear(6), b=nn.Linear(6), norm=nn.LayerNorm())
    edited = mlax.wrap(model, (nn.Linear, nn.LayerNorm), lambda layer: mlax.Series(layer, mlax.F(lambda x: x)))
    assert mlax.get(edited, "a") == mlax.get(edited, "b") and isinstance(mlax.get(edited, "norm"), mlax.Series)
    assert mlax.wrap(model, nn.Linear, Twice) == mlax.wrap(model, ("a", "b"), Twice)


def test_errors_of_wrap_say_what_to_wrap():
    with pytest.raises(ValueError, match=r"wrap: no part is a Embed or Conv; the model is made of Block, .*LayerNorm"):
        mlax.wrap(MODEL, (nn.Embed, nn.Conv), Twice)
    with pytest.raises(KeyError, match="'blocks/nrom' matches nothing; did you mean 'blocks/stacked/norm'"):
        mlax.wrap(MODEL, "blocks/nrom", Twice)
    with pytest.raises(TypeError, match=r"what the function returned for LayerNorm\(\) is the class Twice, .*Twice\("):
        mlax.wrap(MODEL, nn.LayerNorm, lambda layer: Twice)
    with pytest.raises(TypeError, match=r"wrap: got \(\), but takes a class, a pattern, or a tuple of either"):
        mlax.wrap(MODEL, (), Twice)
    with pytest.raises(TypeError, match=r"LoRA\(Linear\(6\), 1\) is not a Linear; wrap each Linear .*, once"):
        mlax.wrap(mlax.wrap(MODEL, nn.Linear, WRAPPERS["LoRA"]), nn.Linear, WRAPPERS["LoRA"])


def test_a_field_that_would_not_reach_a_part_that_was_edited_is_refused():
    @mlax.frozen
    class Net(mlax.Composite):
        width: int
        rate: float = 0.0

        def parts(self):
            return {"up": nn.Linear(self.width)}

        def wire(self, sub, x):
            return (1 + self.rate) * sub.up(x)

    edited = mlax.override(Net(4), nn.Linear, precision="highest")
    with pytest.raises(ValueError, match=r"width=8 of .* would not reach its part 'up', which was edited before"):
        mlax.override(edited, Net, width=8)
    assert mlax.get(mlax.override(edited, Net, rate=0.5), "up") == nn.Linear(4, precision="highest")
    assert mlax.get(mlax.override(mlax.override(Net(4), Net, width=8), nn.Linear, bias=False), "up").features == 8
