import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import files, nn, zoo
from tests.zoo.reference import Reference

TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


class Case:
    """A reference, its model and weights, and its inputs."""

    def __init__(self, name):
        self.reference = Reference(name)
        self.model = zoo.t5_from_config({**self.reference.config, "dropout_rate": 0.0})
        tied = (*TIED, "lm_head.weight") if self.model.tied else TIED
        state = self.reference.state()
        self.state = {**state, **dict.fromkeys(tied, state["shared.weight"])}
        self.trainables, _ = self.reference.check_round_trip(self.model, self.state)
        names = ("tokens", "lengths", "source", "source_lengths")
        self.x = tuple(jnp.asarray(self.reference[name], "int32") for name in names)


@pytest.fixture(scope="module", params=["t5", "t5_v1_1"])
def case(request):
    return Case(request.param)


def run_with(case, other):
    """A mark: the tests that compile a program for generation run with one case, and with `--thorough` with both."""
    return pytest.mark.parametrize("case", [case, pytest.param(other, marks=pytest.mark.thorough)], indirect=True)


def test_logits_and_gradients_equal_those_of_transformers_with_padding(case):
    model, reference, (tokens, lengths, source, source_lengths) = case.model, case.reference, case.x
    is_token = np.float32(np.arange(tokens.shape[1]) < lengths[:, None])[:, :, None]
    weights = np.float32(np.random.default_rng(2).standard_normal(reference["logits"].shape)) * is_token

    def loss(trainables):
        logits, _ = model.fwd(case.x, trainables)
        return (logits * weights).sum(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(case.trainables)
    np.testing.assert_allclose(logits * is_token, reference["logits"], atol=5e-5)
    reference.check_gradients(model, gradient)

    encoded, _ = jax.jit(model.fwd)((None, None, source, source_lengths), case.trainables)
    is_source = np.float32(np.arange(source.shape[1]) < source_lengths[:, None])
    np.testing.assert_allclose(encoded * is_source[:, :, None], reference["encoded"], atol=1e-5)
    last_only = dataclasses.replace(model, last_only=True)
    again, _ = jax.jit(last_only.fwd)((tokens, lengths, encoded, source_lengths), case.trainables)
    np.testing.assert_allclose(again[:, 0], logits[np.arange(3), lengths - 1], atol=1e-5)
    shapes = [jax.eval_shape(model.init, jax.random.key(0), (tokens, None, each))[0] for each in (source, encoded)]
    assert shapes[0] == shapes[1]


@run_with("t5_v1_1", other="t5")
def test_greedy_tokens_for_sources_of_different_lengths_are_those_of_transformers(case):
    _, _, source, source_lengths = case.x
    start, stop, wanted = jnp.zeros((3, 1), "int32"), int(case.reference["stop"]), case.reference["greedy"]
    inputs = (source, source_lengths)
    result = zoo.generate(case.model, case.trainables, start, inputs=inputs, max_new_tokens=12, stop=stop)
    np.testing.assert_array_equal(result.tokens, wanted[:, 1:])
    assert result.lengths.tolist() == [12, 6 if case.model.tied else 2, 12]


@run_with("t5", other="t5_v1_1")
def test_beams_for_sources_of_different_lengths_are_those_of_transformers(case):
    _, _, source, source_lengths = case.x
    start, stop, wanted = jnp.zeros((3, 1), "int32"), int(case.reference["stop"]), case.reference["beams"]
    options = {"inputs": (source, source_lengths), "max_new_tokens": 12, "stop": stop}
    result = zoo.beam_search(case.model, case.trainables, start, beams=3, **options)
    np.testing.assert_array_equal(result.tokens, wanted[:, 1:])


@run_with("t5", other="t5_v1_1")
def test_targets_of_different_lengths_are_continued_as_in_one_call(case):
    tokens, _, source, source_lengths = case.x
    model = case.model
    wanted, _ = jax.jit(model.fwd)((tokens, None, source, source_lengths), case.trainables)
    decoder = zoo.decoder(model, 12)
    lengths = jnp.array([5, 1, 3])
    first = (tokens[:, :5], lengths, source, source_lengths)
    _, state = jax.eval_shape(decoder.init, jax.random.key(0), first)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    step = jax.jit(decoder.fwd)
    logits, state = step(first, case.trainables, state)
    np.testing.assert_allclose(logits[:, 0], wanted[np.arange(3), lengths - 1], atol=5e-5)
    following = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
    logits, state = step(following, case.trainables, state)
    np.testing.assert_allclose(logits[:, 0], wanted[np.arange(3), lengths], atol=5e-5)
    products = str(step.trace(following, case.trainables, state).jaxpr).count("dot_general")
    assert products == 6 + 4 + (2 if model.tied else 3) + 1  # of self-attention, cross-attention without k and v, ...


SIZES = {"11b": 11_307_321_344, "v1.1-small": 76_961_152}
MORE_SIZES = {
    "small": 60_506_624,
    "base": 222_903_552,
    "large": 737_668_096,
    "3b": 2_851_598_336,
    "v1.1-base": 247_577_856,
    "v1.1-large": 783_150_080,
    "v1.1-xl": 2_849_757_184,
    "v1.1-xxl": 11_135_332_352,
}


@pytest.mark.parametrize("sizes", [SIZES, pytest.param(MORE_SIZES, marks=pytest.mark.thorough)], ids=["few", "all"])
def test_the_published_sizes_have_their_numbers_of_parameters(sizes):
    for size, number in sizes.items():
        model = zoo.t5(size)
        trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        assert mlax.count(trainables) == number


def test_a_saved_folder_loads_again(tmp_path, case):
    zoo.save(tmp_path / "t5", case.model, case.trainables)
    loaded = zoo.load(tmp_path / "t5")
    assert loaded.model == case.model
    jax.tree.map(np.testing.assert_array_equal, loaded.trainables, case.trainables)


@pytest.mark.parametrize("case", ["t5_v1_1"], indirect=True)
def test_the_output_layer_of_a_folder_of_transformers_5_is_tied_unless_its_file_has_another(tmp_path, case):
    config = {**case.model.config(), "tie_word_embeddings": True, "scale_decoder_outputs": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {name: array for name, array in case.state.items() if name not in TIED}
    files.save(tmp_path / "model.safetensors", state)
    loaded = zoo.load(tmp_path)
    assert loaded.model == case.model and not loaded.model.tied and not loaded.model.scaled
    jax.tree.map(np.testing.assert_array_equal, loaded.trainables, case.trainables)

    del state["lm_head.weight"]
    files.save(tmp_path / "model.safetensors", state)
    model, trainables, _ = zoo.load(tmp_path)
    assert model == dataclasses.replace(case.model, tied=True)
    is_token = np.float32(np.arange(case.x[0].shape[1]) < case.x[1][:, None])
    logits, _ = jax.jit(model.fwd)(case.x, trainables)
    np.testing.assert_allclose(logits * is_token[:, :, None], case.reference["tied_logits"], atol=5e-5)
    zoo.save(tmp_path, model, trainables)
    assert zoo.load(tmp_path).model == model

    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"missing: lm_head.weight"):
        zoo.load(tmp_path)


def test_configurations_before_transformers_5_have_one_field_for_tying_and_scaling():
    for size, wanted in {"v1.1-small": False, "small": True}.items():
        config = zoo.t5(size).config()
        del config["scale_decoder_outputs"]
        model = zoo.t5_from_config(config)
        assert (model.tied, model.scaled) == (wanted, wanted)
    with pytest.raises(ValueError, match="feed_forward_proj is 'selu', but must be one of relu"):
        zoo.t5_from_config({**config, "feed_forward_proj": "selu"})


def test_initial_queries_make_up_for_scores_without_a_scale():
    model = zoo.t5("small")
    query = mlax.get(model, "decode/blocks/stacked/cross/query")
    kernel, _ = query.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 1, 512), "float32"))
    np.testing.assert_allclose(kernel["kernel"].std(), (512 * 64) ** -0.5, rtol=0.02)


def test_inputs_in_another_order_are_errors(case):
    tokens, _, source, _ = case.x
    with pytest.raises(ValueError, match="with the tokens of the target first"):
        case.model.fwd((source, tokens), case.trainables)
    with pytest.raises(ValueError, match="neither tokens nor a source"):
        case.model.fwd((None, None), case.trainables)
    with pytest.raises(ValueError, match="with cross=True x attends to a source"):
        case.model.fwd(tokens, case.trainables)
    with pytest.raises(ValueError, match="init needs tokens and a source"):
        case.model.init(jax.random.key(0), tokens)
    with pytest.raises(ValueError, match="the size is 'tiny', but must be one of small"):
        zoo.t5("tiny")


def test_the_encoder_of_a_decoder_has_no_cache(case):
    decoder = zoo.decoder(case.model, 7)
    found = {path for path, layer in mlax.layers(decoder).items() if getattr(layer, "cache", None) == 7}
    assert found == {"decode/blocks/stacked/attend", "decode/blocks/stacked/cross", "decode/relative"}
    assert isinstance(mlax.get(decoder, "encode/relative"), nn.RelativeBias)
