"""Every model of the catalogue can be quantized."""

import jax
import jax.numpy as jnp
import pytest

from mlax import dtypes, nn, zoo
from tests.catalogue import MODELS
from tests.zoo.decoders import prompts, tiny_gpt2

NAMES = ("GPT2", "T5", "Llama as Mixtral")  # the others are left to `make thorough`


@pytest.mark.parametrize(
    "name", [name if name in NAMES else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS]
)
def test_a_model_with_int8_kernels_has_its_outputs_and_stays_in_one_dtype(name):
    if name == "ResNet basic":
        pytest.skip("it has no Linear")
    model, x, trainables, state = MODELS[name].init("bfloat16")
    small, codes = nn.quantize(model, trainables)
    kernels = [leaf for leaf in jax.tree.leaves(codes) if leaf.dtype == jnp.int8]
    assert kernels and len(jax.tree.leaves(codes)) == len(jax.tree.leaves(trainables)) + len(kernels)

    def both(x, trainables, codes, state):
        return [
            each.fwd(x, given, state, inference_mode=True)[0] for each, given in ((model, trainables), (small, codes))
        ]

    with pytest.raises(ValueError, match=r"the weight map has no name for .*scale"):
        zoo.state_dict(small, codes, state)  # the codes alone would be other weights
    wanted, found = jax.eval_shape(both, x, trainables, codes, state)
    assert jax.tree.map(str, found) == jax.tree.map(str, wanted)
    assert dtypes.audit(lambda *given: both(*given)[1], x, trainables, codes, state, dtype="bfloat16") == ()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantized_model_generates_the_tokens_of_its_uncached_logits(dtype):
    model, trainables = nn.quantize(*tiny_gpt2(), dtype)
    tokens, _ = prompts(50, 5, 5)
    found = zoo.generate(model, trainables, tokens, max_new_tokens=8).tokens
    logits, _ = model.fwd(jnp.concatenate([tokens, found[:, :-1]], axis=1), trainables)
    assert logits[:, 4:].argmax(-1).tolist() == found.tolist()
