"""References for GPT-2, from transformers: logits and gradients of a tiny model with random weights."""

import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
from transformers import GPT2Config, GPT2LMHeadModel
from zoo_weights import digest, fill

CONFIG = {"vocab_size": 53, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
LENGTHS = (11, 7, 1)


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(**CONFIG, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    state = {name: torch.from_numpy(fill(name, shape)) for name, shape in shapes.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    model.load_state_dict(state)
    tokens = np.random.default_rng(0).integers(0, 53, (len(LENGTHS), max(LENGTHS)))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    logits = model(torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask).long()).logits
    weights = torch.from_numpy(np.random.default_rng(1).standard_normal(logits.shape)) * mask[:, :, None]
    (logits * weights).sum().backward()
    gradients = {f"grad {name}": digest(name, each.grad.numpy()) for name, each in model.named_parameters()}
    np.savez_compressed(
        Path(__file__).with_name("gpt2.npz"),
        config=json.dumps(CONFIG),
        shapes=json.dumps(shapes),
        tokens=tokens,
        lengths=LENGTHS,
        logits=logits.detach().numpy() * mask[:, :, None],
        **gradients,
    )


if __name__ == "__main__":
    main()
