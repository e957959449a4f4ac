import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn, zoo
from tests.zoo.reference import Reference

VARIATIONS = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mixtral", "phi3")


def cases(*everyday):
    """Over these variations, and over all others only with `--thorough`."""
    others = [pytest.param(name, marks=pytest.mark.thorough) for name in VARIATIONS if name not in everyday]
    return pytest.mark.parametrize("case", [*everyday, *others], indirect=True)


@pytest.fixture(scope="module")
def case(request):
    """A variation: its reference, the model, and weights that came back bitwise."""
    reference = Reference(f"llama/{request.param}")
    model = zoo.llama_from_config(reference.config)
    state = reference.state()
    if model.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return reference, model, reference.check_round_trip(model, state, names(model))[0]


def names(model):
    """Of the modules of transformers, whose experts are fused, unlike those in files."""
    return "modules" if model.experts else None


@cases("qwen2", "gemma2", "gemma3", "mixtral", "phi3")
def test_logits_and_gradients_equal_those_of_transformers_with_padding(case):
    reference, model, trainables = case
    tokens, lengths = jnp.asarray(reference["tokens"], "int32"), jnp.asarray(reference["lengths"], "int32")
    is_token = np.float32(np.arange(tokens.shape[1]) < reference["lengths"][:, None])[:, :, None]
    weights = np.float32(np.random.default_rng(1).standard_normal(reference["logits"].shape)) * is_token

    def loss(trainables):
        logits, _ = model.fwd((tokens, lengths), trainables)
        return (logits * weights).sum(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    np.testing.assert_allclose(logits * is_token, reference["logits"], atol=5e-5)
    reference.check_gradients(model, gradient, names=names(model))


@cases("gemma3", "mixtral")
def test_prompts_of_two_lengths_and_then_token_by_token_give_the_logits_of_transformers(case):
    reference, model, trainables = case
    row, wanted = reference["tokens"][0], reference["logits"][0]  # the one without padding
    decoder = zoo.decoder(model, len(row))
    scaling = model.rotary.scaling
    if isinstance(scaling, nn.DynamicNTKScaling):  # which must know how long the sequence will be
        decoder = mlax.override(decoder, nn.Rotary, scaling=dataclasses.replace(scaling, time=len(row)))
    lengths = np.array([7, 1])  # beyond the windows, and a first token alone
    steps = np.array([row[length : length + 4] for length in lengths])
    prompts = jnp.asarray(np.array([row, row])[:, :7], "int32")
    _, cache = jax.eval_shape(decoder.init, jax.random.key(0), prompts)
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)

    @jax.jit
    def decode(trainables, cache):
        first, cache = decoder.fwd((prompts, jnp.asarray(lengths, "int32")), trainables, cache, inference_mode=True)

        def step(cache, token):
            logits, cache = decoder.fwd(token[:, None], trainables, cache, inference_mode=True)
            return cache, logits[:, 0]

        _, logits = jax.lax.scan(step, cache, jnp.asarray(steps.T, "int32"))
        return jnp.concatenate([first.swapaxes(0, 1), logits])  # (1 + 4, 2, v)

    logits = decode(trainables, cache)
    for number, length in enumerate(lengths):
        np.testing.assert_allclose(logits[:, number], wanted[length - 1 : length + 4], atol=5e-5)


@cases()
def test_greedy_generation_gives_the_tokens_of_transformers(case):
    reference, model, trainables = case
    if isinstance(model.rotary.scaling, nn.DynamicNTKScaling):
        pytest.skip("transformers scales each token by the length so far, and does not rotate cached keys again")
    tokens, lengths = jnp.asarray(reference["tokens"], "int32"), jnp.asarray(reference["lengths"], "int32")
    result = zoo.generate(model, trainables, tokens, lengths, max_new_tokens=12)
    np.testing.assert_array_equal(result.tokens, reference["greedy"])


PARAMETERS = {  # as published; the first of each family every day, the others with `--thorough`
    zoo.llama: {
        "3.2-1b": 1_235_814_400,
        "2-7b": 6_738_415_616,
        "2-13b": 13_015_864_320,
        "2-70b": 68_976_648_192,
        "3-8b": 8_030_261_248,
        "3.1-70b": 70_553_706_496,
        "3.1-405b": 405_853_388_800,
        "3.2-3b": 3_212_749_824,
    },
    zoo.mistral: {"7b": 7_241_732_096, "7b-v0.3": 7_248_023_552, "nemo-12b": 12_247_782_400},
    zoo.qwen2: {
        "0.5b": 494_032_768,
        "1.5b": 1_543_714_304,
        "3b": 3_085_938_688,
        "7b": 7_615_616_512,
        "14b": 14_770_033_664,
        "32b": 32_763_876_352,
        "72b": 72_706_203_648,
    },
    zoo.qwen3: {
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
    },
    zoo.gemma: {"7b": 8_537_680_896, "2b": 2_506_172_416},
    zoo.gemma2: {"27b": 27_227_128_320, "2b": 2_614_341_888, "9b": 9_241_705_984},
    zoo.gemma3: {"1b": 999_885_952, "270m": 268_098_176},
    zoo.mixtral: {"8x7b": 46_702_792_704, "8x22b": 140_620_634_112},
    zoo.phi3: {"mini": 3_821_079_552, "medium": 13_960_238_080},
}


def test_the_published_sizes_have_their_numbers_of_parameters_and_their_config_json(thorough):
    for function, sizes in PARAMETERS.items():
        for size, number in list(sizes.items())[: None if thorough else 1]:
            model = function(size)
            trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
            assert sum(leaf.size for leaf in jax.tree.leaves(trainables)) == number, (function, size)
            assert zoo.llama_from_config(model.config()) == model
    with pytest.raises(ValueError, match="the size is '9b', but must be one of 2-7b"):
        zoo.llama("9b")


CONFIG = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "head_dim": 4,
}


def test_a_config_json_of_transformers_4_is_read():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    model = zoo.llama_from_config({**CONFIG, "rope_theta": 5e5, "rope_scaling": scaling})
    assert model.rotary == nn.Rotary(base=5e5, scaling=nn.YaRNScaling(4.0, length=16))
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling, "sliding_window_pattern": 3}
    model = zoo.llama_from_config({**CONFIG, **old, "model_type": "gemma3_text", "sliding_window": 5})
    assert model.rotary == nn.Rotary(base=1e6, scaling=nn.LinearScaling(8.0)) and model.local_rotary == nn.Rotary()
    assert model.windows == (5, 5, None) and model.tied
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    assert zoo.llama_from_config({**CONFIG, **qwen}).windows == (None, None, None, 5)
    assert zoo.llama_from_config({**CONFIG, **qwen, "use_sliding_window": False}).windows == (None,)
    assert zoo.llama_from_config({**CONFIG, "model_type": "mistral", "sliding_window": None}).windows == (None,)


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3', but must be one of llama"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*, but only None is supported"),
        ({"mlp_bias": True}, "mlp_bias is True, but only False"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be one of silu"),
        ({"pad_token_id": 50}, "pad_token_id is 50, but must be a token from 0 to 49"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576, but must be"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0, but must be above 0"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, but must be above 1"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type is 'longrope', but must be one of default"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor is -1.0, but must be above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is False"),
        ({"rope_parameters": {"mrope_section": [1, 1]}}, "mrope_section of the rotary parameters are not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, but only 1.0"),
        ({"rope_parameters": [1]}, "the rotary parameters are list, but must be a dict"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act is 'silu', but must be one of gelu"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types is .*, but must be a list of 4"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0.0, but must be above 0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0, but only None"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok is 1, but must be from 2 to 8"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "rope_type is 'su', but must be one of default"),
    ],
)
def test_a_config_json_that_would_compute_something_else_is_refused_by_the_name_of_its_field(fields, match):
    with pytest.raises(ValueError, match=match):
        zoo.llama_from_config(CONFIG | fields)


def test_a_field_that_the_config_json_of_the_family_does_not_have_is_not_lost():
    model = zoo.Llama(width=16, hidden=24, depth=2, heads=4, qk_norm=True)
    with pytest.raises(
        ValueError, match=r"config\.json of the family 'llama' has no qk_norm=True; choose another family"
    ):
        model.config()
    assert dataclasses.replace(model, family="qwen3", last_only=True).config()["model_type"] == "qwen3"
    with pytest.raises(ValueError, match="windows is \\(\\), but must be a tuple of sizes"):
        zoo.Llama(windows=())


def test_surgery_on_the_last_norm_leaves_those_of_the_layers():
    model = zoo.Llama(width=16, hidden=24, depth=2, heads=4)
    edited = mlax.replace(model, "norm", nn.RMSNorm(eps=1.0))
    assert mlax.get(edited, "norm").eps == 1.0 and mlax.get(edited, "blocks/stacked/norm1").eps == 1e-5


def test_the_experts_of_mixtral_are_separate_in_files_and_fused_in_modules_and_their_losses_can_be_captured():
    model = zoo.Llama(vocabulary=5, width=4, hidden=3, depth=2, heads=2, experts=(2, 1))
    trainables, _ = model.init(jax.random.key(0), model.example_input())
    separate, fused = zoo.state_dict(model, trainables), zoo.state_dict(model, trainables, names="modules")
    gate_up = fused["model.layers.1.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (2, 6, 4)
    for expert in range(2):
        names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w{number}.weight" for number in (1, 3)]
        np.testing.assert_array_equal(gate_up[expert], np.concatenate([separate[name] for name in names]))
    router = separate["model.layers.1.block_sparse_moe.gate.weight"]
    np.testing.assert_array_equal(router, fused["model.layers.1.mlp.gate.weight"])
    tokens = jax.ShapeDtypeStruct((3, 5), np.int32)
    outputs = jax.eval_shape(mlax.capture(model, "**/moe"), tokens, trainables)[2]
    _, losses = outputs["blocks/stacked/mlp/moe"]
    assert losses["balance"].shape == (2, 3)  # of each layer and row
