"""References for Llama and its relatives, from transformers: logits and gradients of tiny models."""

import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
import transformers
from zoo_weights import digest, fill

SIZES = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 5}
GROUPED = {"num_key_value_heads": 2, "num_hidden_layers": 2}
LENGTHS = (11, 7, 1)
FULL, LOCAL = "full_attention", "sliding_attention"
CONFIGS = {  # lengths are beyond windows, and beyond the contexts of scaled rotary embeddings
    "llama2": (
        "llama",
        {
            "num_hidden_layers": 2,
            "attention_bias": True,
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0},
        },
    ),
    "llama3": (
        "llama",
        {
            **GROUPED,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 4}),
    "qwen2": (
        "qwen2",
        {
            **GROUPED,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 2.0,
            },
        },
    ),
    "qwen3": (
        "qwen3",
        {
            **GROUPED,
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
            },
        },
    ),
    "gemma": ("gemma", {**GROUPED, "head_dim": 12}),
    "gemma2": (
        "gemma2",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "sliding_window": 4,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "sliding_window": 4,
            "query_pre_attn_scalar": 9,
            "layer_types": [LOCAL, LOCAL, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
                LOCAL: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 3, "sliding_window": 5}),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 5, "partial_rotary_factor": 0.5}),
}


def main() -> None:
    for name, (kind, options) in CONFIGS.items():
        config = transformers.AutoConfig.for_model(kind, **SIZES, **options)
        write(name, transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def write(name: str, model: torch.nn.Module) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    state = {key: torch.from_numpy(fill(key, shape)) for key, shape in shapes.items()}
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS)))
    tokens[0, 3] = SIZES["pad_token_id"]  # whose embedding gets no gradient
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    logits = model(torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask).long()).logits
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal(logits.shape) * mask[:, :, None])
    (logits * weights).sum().backward()
    config = model.config.to_dict()
    np.savez_compressed(
        Path(__file__).parent / "llama" / f"{name}.npz",
        config=json.dumps({key: value for key, value in config.items() if key != "transformers_version"}),
        shapes=json.dumps(shapes),
        tokens=tokens,
        lengths=LENGTHS,
        logits=logits.detach().numpy() * mask[:, :, None],
        greedy=[generate(model, row[:length]) for row, length in zip(tokens, LENGTHS, strict=True)],
        **{f"grad {key}": digest(key, each.grad.numpy()) for key, each in model.named_parameters()},
    )


def generate(model: torch.nn.Module, prompt: np.ndarray) -> np.ndarray:
    """The next tokens by greedy search, with transformers' cache."""
    prompt = torch.from_numpy(prompt[None])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}
    return model.generate(prompt, max_new_tokens=12, **options)[0, prompt.shape[1] :].numpy()


if __name__ == "__main__":
    main()
