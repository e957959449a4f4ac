"""References for text generation, from transformers: greedy and beam search, and the probabilities of samplers.

Prompts are padded on the left, as transformers need them. Stop tokens are such that rows end at different times.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from zoo_weights import fill

PAD, NEW_TOKENS, LENGTHS = 52, 20, (11, 7, 1)
CONFIGS = {
    "gpt2": {"vocab_size": 53, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {
        "vocab_size": 53,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
}
BEAMS = [  # number, length penalty, early stopping
    (2, 1.0, False),
    (4, 1.0, False),
    (4, 0.0, False),
    (4, 2.0, True),
    (3, -1.0, "never"),
    (3, 1.0, "never"),
]
SAMPLERS = [
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.65},
    {"min_p": 0.4},
    {"repetition_penalty": 1.7},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.85, "min_p": 0.7, "repetition_penalty": 1.3},
]


def build(family: str) -> torch.nn.Module:
    kinds = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}
    config, kind = kinds[family]
    model = kind(config(**CONFIGS[family], bos_token_id=0, eos_token_id=0, pad_token_id=PAD)).eval()
    state = {name: torch.from_numpy(fill(name, tuple(each.shape))) for name, each in model.state_dict().items()}
    if family == "gpt2":
        state["lm_head.weight"] = state["transformer.wte.weight"]
    model.load_state_dict(state)
    return model


def texts(family: str) -> dict[str, np.ndarray]:
    model = build(family)
    longest = max(LENGTHS)
    prompts = np.random.default_rng(2).integers(0, PAD, (len(LENGTHS), longest))
    mask = np.arange(longest) >= longest - np.array(LENGTHS)[:, None]
    prompts = np.where(mask, prompts, PAD)

    def generate(**options) -> np.ndarray:
        arguments = {"attention_mask": torch.from_numpy(mask).long(), "max_new_tokens": NEW_TOKENS, "pad_token_id": PAD}
        tokens = model.generate(torch.from_numpy(prompts), **arguments, do_sample=False, **options)
        tokens = tokens[:, longest:].numpy()
        return np.pad(tokens, ((0, 0), (0, NEW_TOKENS - tokens.shape[1])), constant_values=PAD)

    free = generate(eos_token_id=None)
    stop = [int(free[0, 4]), int(free[1, 9])]
    arrays = {"prompts": prompts, "lengths": LENGTHS, "stop": stop, "free": free, "greedy": generate(eos_token_id=stop)}
    for i, (beams, penalty, early) in enumerate(BEAMS):
        options = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
        arrays[f"beams {i}"] = generate(eos_token_id=stop, **options)
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    return {**arrays, "config": json.dumps({"model_type": family, **CONFIGS[family]}), "shapes": json.dumps(shapes)}


def probabilities() -> dict[str, np.ndarray]:
    logits = np.float32([[1.0, -1.2, 0.6, 0.1, -0.3, 0.35, -0.9, -0.05, 0.8]])
    seen = np.array([[0, 3, 4]])
    kinds = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    arrays = {"logits": logits, "seen": seen}
    for i, options in enumerate(SAMPLERS):
        processors = LogitsProcessorList([kind(options[name]) for name, kind in kinds.items() if name in options])
        filtered = processors(torch.from_numpy(seen), torch.from_numpy(logits.copy()))
        arrays[f"sample {i}"] = filtered.softmax(-1).numpy()
    return {**arrays, "samplers": json.dumps(SAMPLERS)}


def main() -> None:
    folder = Path(__file__).parent
    for family in CONFIGS:
        arrays = {**texts(family), "beams": json.dumps(BEAMS)}
        np.savez_compressed(folder / f"generation_{family}.npz", **arrays)
        for name in itertools.chain(["free", "greedy"], [f"beams {i}" for i in range(len(BEAMS))]):
            print(family, name, arrays[name].tolist())
    np.savez_compressed(folder / "sampling.npz", **probabilities())


if __name__ == "__main__":
    main()
