"""References for BERT and RoBERTa, from transformers: outputs and gradients of tiny models with random weights."""

import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
import transformers
from zoo_weights import digest, fill

SIZES = {
    "vocab_size": 53,
    "max_position_embeddings": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
ROBERTA = {**SIZES, "model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
BERT = {**SIZES, "model_type": "bert", "type_vocab_size": 2}
MODELS = {
    "bert": (BERT, "BertModel"),
    "bert_masked_lm": (BERT, "BertForMaskedLM"),
    "bert_classifier": (BERT, "BertForSequenceClassification"),
    "roberta_masked_lm": (ROBERTA, "RobertaForMaskedLM"),
    "roberta_classifier": (ROBERTA, "RobertaForSequenceClassification"),
}
LENGTHS = (11, 7, 2)
CLASSES = 3


def main() -> None:
    for name, (config, architecture) in MODELS.items():
        make(name, {**config, "architectures": [architecture]}, getattr(transformers, architecture))


def make(name: str, config: dict, architecture: type) -> None:
    options = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    if name.endswith("classifier"):
        config["id2label"] = options["id2label"] = {index: f"LABEL_{index}" for index in range(CLASSES)}
    settings = architecture.config_class(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = architecture(settings).eval()
    prefix = "bert." if name == "bert" else ""  # which names have in the models with heads
    shapes = {prefix + key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    state = {key: torch.from_numpy(fill(key, shape)) for key, shape in shapes.items()}
    tied = {key: find_tied(key) for key in shapes if find_tied(key)}
    state |= {key: state[other] for key, other in tied.items()}
    model.load_state_dict({key.removeprefix(prefix): each for key, each in state.items()})

    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, np.random.default_rng(0).integers(2, 53, mask.shape), settings.pad_token_id)
    segments = np.random.default_rng(2).integers(0, settings.type_vocab_size, tokens.shape)
    inputs = {"attention_mask": mask, "token_type_ids": segments}
    outputs = model(torch.from_numpy(tokens), **{key: torch.from_numpy(each).long() for key, each in inputs.items()})
    arrays = {
        key: each * torch.from_numpy(mask)[:, :, None] if each.ndim == 3 else each
        for key, each in outputs.items()
        if isinstance(each, torch.Tensor)
    }
    random = np.random.default_rng(1)
    sum((each * torch.from_numpy(random.standard_normal(each.shape))).sum() for each in arrays.values()).backward()
    gradients = {
        f"grad {prefix}{key}": digest(prefix + key, each.grad.numpy()) for key, each in model.named_parameters()
    }
    np.savez_compressed(
        Path(__file__).with_name(f"{name}.npz"),
        config=json.dumps(config),
        shapes=json.dumps(shapes),
        tied=json.dumps(tied),
        tokens=tokens,
        segments=segments,
        lengths=LENGTHS,
        **{key: each.detach().numpy() for key, each in arrays.items()},
        **gradients,
    )


def find_tied(name: str) -> str | None:
    """The weight that another is tied to in a masked language model."""
    if name.endswith("decoder.weight"):
        return f"{'bert' if name.startswith('cls') else 'roberta'}.embeddings.word_embeddings.weight"
    return name.replace("decoder.bias", "bias") if name.endswith("decoder.bias") else None


if __name__ == "__main__":
    main()
