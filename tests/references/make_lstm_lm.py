"""References for the LSTM language model, from torch.nn.LSTM: logits, gradients and greedy tokens."""

import json
from pathlib import Path

import numpy as np
import torch
from zoo_weights import digest, fill

CASES = {
    "lstm_lm": {"vocabulary": 53, "width": 12, "hidden": 10, "depth": 2, "tied": False},
    "lstm_lm_tied": {"vocabulary": 53, "width": 12, "depth": 1, "tied": True},
}
LENGTHS = (11, 7, 1)


class LanguageModel(torch.nn.Module):
    """With the names of PyTorch's word_language_model example."""

    def __init__(self, config: dict):
        super().__init__()
        hidden = config.get("hidden", config["width"])
        self.encoder = torch.nn.Embedding(config["vocabulary"], config["width"])
        self.rnn = torch.nn.LSTM(config["width"], hidden, config["depth"], batch_first=True)
        self.decoder = torch.nn.Linear(hidden, config["vocabulary"])
        if config["tied"]:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens, carry=None):
        y, carry = self.rnn(self.encoder(tokens), carry)
        return self.decoder(y), carry


def continue_greedily(model: LanguageModel, prompt: torch.Tensor, number: int) -> list[int]:
    """The likeliest next tokens of one row, with the state carried from call to call."""
    tokens, carry = [], None
    for _ in range(number):
        logits, carry = model(prompt[None], carry)
        prompt = logits[0, -1:].argmax(-1)
        tokens.append(int(prompt))
    return tokens


def main() -> None:
    for name, config in CASES.items():
        model = LanguageModel(config).eval()
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        state = {name: torch.from_numpy(fill(name, shape)) for name, shape in shapes.items()}
        model.load_state_dict({**state, "decoder.weight": state["encoder.weight"]} if config["tied"] else state)
        tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 53, (len(LENGTHS), max(LENGTHS))))
        mask = torch.from_numpy(np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None])
        logits, _ = model(tokens)  # causal: padding on the right changes nothing before it
        weights = torch.from_numpy(np.random.default_rng(1).standard_normal(logits.shape)) * mask[:, :, None]
        (logits * weights).sum().backward()
        gradients = {f"grad {name}": digest(name, each.grad.numpy()) for name, each in model.named_parameters()}
        with torch.no_grad():
            for parameter, each in model.named_parameters():  # other weights, with which the text is not monotonous
                each *= 0 if parameter == "decoder.bias" else 5
            greedy = [continue_greedily(model, row[:length], 9) for row, length in zip(tokens, LENGTHS, strict=True)]
        np.savez_compressed(
            Path(__file__).with_name(f"{name}.npz"),
            config=json.dumps(config),
            shapes=json.dumps(shapes),
            tokens=tokens,
            lengths=LENGTHS,
            logits=logits.detach().numpy() * mask[:, :, None].numpy(),
            greedy=greedy,
            **gradients,
        )


if __name__ == "__main__":
    main()
