"""References for T5, from transformers: logits, gradients and generated tokens of tiny models with random weights."""

import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
from transformers import T5Config, T5ForConditionalGeneration
from zoo_weights import digest, fill

SIZES = {
    "vocab_size": 53,
    "d_model": 32,
    "d_kv": 6,  # heads * d_kv is not d_model
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
CONFIGS = {
    "t5": {**SIZES, "feed_forward_proj": "relu"},
    "t5_v1_1": {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
TIED_V1_1 = {  # what transformers 5 write for a new model of version 1.1
    **CONFIGS["t5_v1_1"],
    "tie_word_embeddings": True,
    "scale_decoder_outputs": False,
}
SOURCE_LENGTHS, LENGTHS = (13, 6, 1), (9, 1, 4)
STOP = 29  # ends some of the rows that are generated


def build(config: dict) -> T5ForConditionalGeneration:
    model = T5ForConditionalGeneration(T5Config(**config, dropout_rate=0.0, decoder_start_token_id=0)).eval()
    is_tied = config.get("tie_word_embeddings", True)
    if not is_tied:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(53, 32))  # transformers 5 tie it until weights are loaded
    state = {name: torch.from_numpy(fill(name, tuple(each.shape))) for name, each in model.state_dict().items()}
    tied = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    tied += ["lm_head.weight"] if is_tied else []
    model.load_state_dict({**state, **dict.fromkeys(tied, state["shared.weight"])})
    return model


def tokens_and_mask(lengths: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = np.random.default_rng(seed).integers(0, 53, (len(lengths), max(lengths)))
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return torch.from_numpy(tokens), torch.from_numpy(mask).long()


def tied_logits(inputs: dict, tokens: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """The logits of version 1.1 with the output layer that transformers 5 initialize it with: tied, without a scale."""
    logits = build(TIED_V1_1)(**inputs, decoder_input_ids=tokens, decoder_attention_mask=mask).logits
    return logits.detach().numpy() * mask[:, :, None].numpy()


def main() -> None:
    for name, config in CONFIGS.items():
        model = build(config)
        source, source_mask = tokens_and_mask(SOURCE_LENGTHS, 0)
        tokens, mask = tokens_and_mask(LENGTHS, 1)
        inputs = {"input_ids": source, "attention_mask": source_mask}
        encoded = model.encoder(**inputs).last_hidden_state * source_mask[:, :, None]
        logits = model(**inputs, decoder_input_ids=tokens, decoder_attention_mask=mask).logits
        weights = torch.from_numpy(np.random.default_rng(2).standard_normal(logits.shape)) * mask[:, :, None]
        (logits * weights).sum().backward()
        options = {"max_new_tokens": 12, "eos_token_id": STOP, "do_sample": False}
        greedy = model.generate(**inputs, **options)
        beams = model.generate(**inputs, **options, num_beams=3, length_penalty=1.0)
        np.savez_compressed(
            Path(__file__).with_name(f"{name}.npz"),
            config=json.dumps(config),
            shapes=json.dumps({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}),
            source=source,
            source_lengths=SOURCE_LENGTHS,
            tokens=tokens,
            lengths=LENGTHS,
            encoded=encoded.detach().numpy(),
            logits=logits.detach().numpy() * mask[:, :, None].numpy(),
            stop=STOP,
            greedy=greedy.numpy(),
            beams=beams.numpy(),
            **({"tied_logits": tied_logits(inputs, tokens, mask)} if name == "t5_v1_1" else {}),
            **{f"grad {name}": digest(name, each.grad.numpy()) for name, each in model.named_parameters()},
        )


if __name__ == "__main__":
    main()
