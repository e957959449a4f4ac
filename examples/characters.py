"""Train a byte-level transformer language model on the source of Python's standard library.

    python examples/characters.py [--steps 1400] [--run runs/characters]     # or: mlax train examples/characters.py

takes 5.5 minutes on two CPU cores and reaches 1.73 to 1.74 bits per byte on held-out files, over two seeds (Python
3.12; with --context 256 --batch 8 it is 1.70, in 6.5 minutes). The hyperparameters were chosen on the same files, so
that is slightly optimistic. Then it generates some Python, in one compiled program. The text comes with Python: nothing
is downloaded.
"""

import dataclasses
import functools
import math
import sysconfig
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn, optim, train


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings; each field is a command-line option."""

    steps: int = 1400  # training steps in all, including those of a run that is resumed
    batch: int = 16  # windows of text per step
    context: int = 128  # bytes per window
    width: int = 128  # features of each token
    depth: int = 4  # transformer blocks
    heads: int = 4  # attention heads of each block
    rate: float = 0.02  # of Muon, for the matrices; AdamW trains the rest with a quarter of it
    seed: int = 0  # for the weights, the shuffling and the sample
    sample: int = 600  # bytes to generate at the end
    run: str | None = "runs/characters"  # the run directory


@mlax.frozen
class Block(mlax.Composite):
    """A transformer block, causal self-attention and an MLP: (b, t, d) to (b, t, d)."""

    width: int
    heads: int
    cache: int | None = None

    def parts(self):
        return {
            "norm1": nn.RMSNorm(),
            "attend": nn.MultiHeadAttention(
                self.heads, causal=True, rotary=nn.Rotary(), qk_norm=nn.RMSNorm(), bias=False, cache=self.cache
            ),
            "norm2": nn.RMSNorm(),
            "think": nn.MLP((4 * self.width, self.width), bias=False),
        }

    def wire(self, sub, x):
        x = x + sub.attend(sub.norm1(x))
        return x + sub.think(sub.norm2(x))


@mlax.frozen
class LanguageModel(mlax.Composite):
    """Predict the next byte: (b, t) bytes to (b, t, 256) logits, or, given the next bytes, to their losses (b, t).

    With a key-value `cache` of that many bytes, each call continues from the previous ones, with the same weights.
    """

    width: int
    depth: int
    heads: int
    cache: int | None = None

    def parts(self):
        block = Block(self.width, self.heads, self.cache)
        return {
            "embed": nn.Embed(256, self.width, table_init=mlax.Normal(1.0)),
            "blocks": mlax.Repeat(block, self.depth, mode="unroll"),
            "norm": nn.RMSNorm(),
            "head": nn.CrossEntropyHead(nn.Linear(256, bias=False)),
        }

    def wire(self, sub, x, labels=None):
        x = sub.norm(sub.blocks(sub.embed(x)))
        return sub.head(x if labels is None else {"x": x, "labels": labels})


def corpus(limit=8_000_000):
    """Python's standard library as two byte arrays: training text, and test text from other files."""
    folder = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "lib2to3", "pydoc_data"}
    names = [path.relative_to(folder) for path in folder.rglob("*.py")]
    names = [name for name in names if not excluded & {*name.parts}]
    names.sort(key=lambda name: zlib.crc32(name.as_posix().encode()))  # shuffled, but the same on every machine

    def read(names, limit):
        text = b"".join((folder / name).read_bytes() for name in names)
        return np.frombuffer(text[:limit], np.uint8)

    held_out = len(names) // 16
    return read(names[held_out:], limit), read(names[:held_out], limit // 40)


def windows(text, context):
    """The text as rows of context + 1 bytes that overlap by one byte, without a copy."""
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]


def train_model(model, optimizer, config):
    """Train `model` to predict each byte from those before it; returns what `train.fit` returns."""

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        text = batch["text"].astype(jnp.int32)  # (b, t + 1)
        losses, non_trainables = model.fwd(
            (text[:, :-1], text[:, 1:]), trainables, non_trainables, rng=rng, inference_mode=inference_mode
        )  # (b, t)
        return {"loss": losses, "bits_per_byte": losses / math.log(2)}, non_trainables

    text, test_text = corpus()
    feed = train.Feed({"text": windows(text, config.context)}, config.batch, seed=config.seed)
    test = train.Feed({"text": windows(test_text, config.context)}, 64)
    step = train.step(objective, optimizer)
    weights_rng, rng = jax.random.split(jax.random.key(config.seed))
    state = step.init(rng, *model.init(weights_rng, feed.example["text"]))
    every = max(1, config.steps // 4)
    return train.fit(
        step, state, feed, steps=config.steps, run=config.run, evaluate=test, evaluate_every=every, config=config
    )


@functools.partial(jax.jit, static_argnames=("model", "length"))
def generate(model, trainables, prompt, rng, length, temperature=0.8):
    """Continue `prompt` (b, t) by `length` bytes, (b, length), in one program with a key-value cache."""
    decoder = dataclasses.replace(model, cache=prompt.shape[1] + length)
    _, cache = decoder.init(rng, prompt)  # an empty cache; these initial weights are not used
    logits, cache = decoder.fwd(prompt, trainables, cache, inference_mode=True)

    def next_byte(carry, rng):
        logits, cache = carry
        byte = jax.random.categorical(rng, logits / temperature)  # (b,)
        logits, cache = decoder.fwd(byte[:, None], trainables, cache, inference_mode=True)
        return (logits[:, -1], cache), byte

    _, generated = jax.lax.scan(next_byte, (logits[:, -1], cache), jax.random.split(rng, length))
    return generated.T


def generate_text(generate, model, trainables, config, prompt=b"class "):
    """`prompt` and its continuation by `generate`, as a string."""
    start = jnp.asarray(np.frombuffer(prompt, np.uint8)[None], jnp.int32)
    generated = generate(model, trainables, start, jax.random.key(config.seed), config.sample)
    return (prompt + bytes(np.asarray(generated[0], np.uint8))).decode(errors="replace")


def main(config: Config) -> dict[str, float]:
    """Train, evaluate and generate; returns the scores on the held-out files."""
    model = LanguageModel(config.width, config.depth, config.heads)
    rate = optim.WarmupCosine(config.rate, warmup=config.steps // 20, total=config.steps)
    matrices = ("blocks/**/kernel",)
    rest = optim.AdamW(optim.ScaledSchedule(rate, 0.25), b2=0.99)
    optimizer = optim.Muon(rate, matrices=matrices, rest=rest)
    result = train_model(model, optim.ClipGlobalNorm(optimizer, 1.0), config)
    print(generate_text(generate, model, result.state.trainables, config))
    return dict(result.scores)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
