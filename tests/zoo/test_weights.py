"""Weight maps: the tables between the paths of variables and names in state dicts, and what is refused of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn, zoo
from tests.files.torch_archive import write_torch

RIGHT = {
    **zoo.map_embed("embed", "emb"),
    **zoo.map_linear("layers/stacked", "layers.*"),
    **zoo.map_linear("head", "fc"),
}


class Table:
    """Hashable, as fields must be."""

    def __init__(self, weight_map):
        self.weight_map = weight_map


@mlax.frozen
class Classifier(mlax.Composite):
    table: "Table"

    def parts(self):
        return {"embed": nn.Embed(10, 8), "layers": mlax.Repeat(nn.Linear(8), 2), "head": nn.Linear(3)}

    def wire(self, sub, tokens):
        return sub.head(sub.layers(sub.embed(tokens)).mean(axis=1))

    def example_input(self):
        return jax.ShapeDtypeStruct((1, 4), jnp.int32)

    def weight_map(self):
        return self.table.weight_map


def with_map(weight_map):
    return Classifier(Table(weight_map))


def zeros(tree):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def variables_of(model):
    return zeros(jax.eval_shape(model.init, jax.random.key(0), model.example_input()))


WRONG = {
    "a stack without a star": (
        {"layers/stacked/kernel": zoo.Weight("layers.weight", (1, 0))},
        r"'layers/stacked/kernel', 'layers.weight' with axes=\(1, 0\) .* of shape \(2, 8, 8\): each \* .*\(0 here\)",
    ),
    "too many stars": (
        {"head/bias": zoo.Weight("fc.*.*.bias")},
        r"'head/bias', 'fc.\*.\*.bias' with .* of shape \(3,\): .*2 here",
    ),
    "a transposed bias": (
        {"head/bias": zoo.Weight("fc.bias", (1, 0))},
        r"'head/bias', 'fc.bias' with axes=\(1, 0\) .* of shape \(3,\): .* axes is an order of the other 1",
    ),
    "axes that are not an order": ({"head/kernel": zoo.Weight("fc.weight", (0, 2))}, r"axes=\(0, 2\).*\(8, 3\)"),
    "unit axes": ({"head/bias": zoo.Weight("fc.bias", unit_axes=(5,))}, r"unit_axes=\(5,\), does not fit"),
    "a part that the model does not have": (
        {("head/bias", "head/shift"): zoo.Weight("fc.bias")},
        r"joins several leaves, but the model has no head/shift",
    ),
    "one name for two leaves": (
        {"head/bias": zoo.Weight("emb.weight")},
        r"gives embed/table and head/bias the same name, 'emb.weight'; .* `tied`",
    ),
    "one name for two layers of a stack": (
        {"layers/stacked/bias": zoo.Weight("layers.*.bias", start=3, step=0)},
        r"layers/stacked/bias two entries of one name, 'layers.3.bias'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_weight_map_names_the_entry_when_loading_and_writing(case):
    entries, words = WRONG[case]
    replaced = {path for key in entries for path in ([key] if isinstance(key, str) else key)}
    model = with_map(zoo.WeightMap({path: weight for path, weight in RIGHT.items() if path not in replaced} | entries))
    right = with_map(zoo.WeightMap(RIGHT))
    variables = variables_of(right)
    with pytest.raises(ValueError, match=words):
        zoo.load_weights(model, zoo.state_dict(right, *variables))
    with pytest.raises(ValueError, match=words):
        zoo.state_dict(model, *variables)


def test_a_weight_map_is_a_table_of_weights():
    variables = variables_of(with_map(zoo.WeightMap(RIGHT)))
    with pytest.raises(
        TypeError, match=r"weight_map\(\) returns a dict, but must return a zoo.WeightMap; .*\(entries\)"
    ):
        zoo.state_dict(with_map(RIGHT), *variables)
    with pytest.raises(TypeError, match=r"weight_map\(\) returns a dict"):
        zoo.load_weights(with_map(RIGHT), {})
    with pytest.raises(TypeError, match=r"entry 'head/bias' is a str, but must be a zoo.Weight"):
        zoo.state_dict(with_map(zoo.WeightMap({**RIGHT, "head/bias": "fc.bias"})), *variables)


def test_a_tied_name_is_not_that_of_a_leaf():
    model = with_map(zoo.WeightMap(RIGHT, tied={"fc.weight": "emb.weight"}))
    with pytest.raises(ValueError, match=r"gives the tied emb.weight and head/kernel the same name, 'fc.weight'"):
        zoo.state_dict(model, *variables_of(model))


def test_a_state_dict_lacks_no_variable_of_the_model():
    model = zoo.ResNet(depths=(1,), widths=(8,), block="basic", stem=4, classes=3)
    trainables, non_trainables = variables_of(model)
    with pytest.raises(ValueError, match=r"ResNet.* not passed, norm/mean, .*pass both trainables and non_trainables"):
        zoo.state_dict(model, trainables)
    state = zoo.state_dict(model, trainables, non_trainables, names="torchvision")
    assert state["bn1.num_batches_tracked"] == 0 and state["bn1.running_mean"].shape == (4,)


def test_names_behind_a_prefix_are_recognized(tmp_path):
    model = zoo.ResNet(depths=(1,), widths=(8,), block="basic", stem=4, classes=3)
    state = zoo.state_dict(model, *variables_of(model), names="torchvision")
    wrapped = {f"model.module.{name}": array for name, array in state.items()}
    with pytest.raises(
        ValueError, match=r"all names of the weights start with 'model.module.'; pass {.*state.items\(\)}\."
    ):
        zoo.load_weights(model, wrapped)
    write_torch(tmp_path / "x.pt", {**wrapped, "epoch": np.zeros(1, np.float32)})
    words = r"x.pt start with 'model.module.'; pass {.* if name.startswith.*load_torch\('.*x.pt', key='model'\)"
    with pytest.raises(ValueError, match=words):
        zoo.load_weights(model, tmp_path / "x.pt")
    gpt2 = zoo.GPT2(vocabulary=10, positions=4, width=4, depth=1, heads=1)
    state = zoo.state_dict(gpt2, *variables_of(gpt2))
    with pytest.raises(ValueError, match=r"start with 'module.'; pass"):
        zoo.load_weights(gpt2, {f"module.{name}": array for name, array in state.items()})


def test_another_number_of_classes_says_how_to_load_without_the_head():
    model = zoo.ResNet(depths=(1,), widths=(8,), block="basic", stem=4, classes=3)
    state = zoo.state_dict(model, *variables_of(model))
    with pytest.raises(ValueError, match=r"has 3 classes there: load it with classes=3 \(or with classes=None, which"):
        zoo.load_weights(dataclasses.replace(model, classes=5), state)
