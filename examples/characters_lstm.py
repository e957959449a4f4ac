"""Train a stacked LSTM language model on bytes of Python: characters.py with another model.

    python examples/characters_lstm.py [--steps 1600] [--run runs/characters_lstm]

takes 5 minutes on two CPU cores and reaches 1.72 to 1.73 bits per byte on held-out files, over two seeds; the
transformer of characters.py reaches 1.73 to 1.74 in a little longer. The two were not tuned equally, so this is not a
comparison. The text, the objective and the loop are those of characters.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from characters import generate_text, train_model

import mlax
from mlax import nn, optim


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings; each field is a command-line option."""

    steps: int = 1600  # training steps in all, including those of a run that is resumed
    batch: int = 16  # windows of text per step
    context: int = 128  # bytes per window
    width: int = 256  # features of each LSTM
    depth: int = 2  # LSTMs on top of each other
    rate: float = 8e-3  # the peak learning rate
    seed: int = 0  # for the weights, the shuffling and the sample
    sample: int = 600  # bytes to generate at the end
    run: str | None = "runs/characters_lstm"  # the run directory


@mlax.frozen
class LanguageModel(mlax.Composite):
    """Predict the next byte: (b, t) bytes to (b, t, 256) logits, or, given the next bytes, to their losses (b, t).

    With `carry` it continues from the carries of the previous bytes: (carries, bytes) to (carries, logits), with the
    same weights.
    """

    width: int
    depth: int
    carry: bool = False

    def parts(self):
        layer = mlax.Recurrent(nn.LSTMCell(self.width), carry=self.carry)
        return {
            "embed": nn.Embed(256, self.width, table_init=mlax.Normal(1.0)),
            "layers": nn.Stacked(*[layer, nn.RMSNorm()] * self.depth, carry=self.carry),
            "head": nn.CrossEntropyHead(nn.Linear(256)),
        }

    def wire(self, sub, *inputs):
        if self.carry:
            carries, x = inputs
            carries, y = sub.layers((carries, sub.embed(x)))
            return carries, sub.head(y)
        x, *labels = inputs
        y = sub.layers(sub.embed(x))
        return sub.head({"x": y, "labels": labels[0]} if labels else y)

    def start(self, batch):
        """The initial carries, h and c for each layer."""
        cell = nn.LSTMCell(self.width)
        return (cell.initial_carry(jax.ShapeDtypeStruct((batch, self.width), jnp.float32)),) * self.depth


@functools.partial(jax.jit, static_argnames=("model", "length"))
def generate(model, trainables, prompt, rng, length, temperature=0.8):
    """Continue `prompt` (b, t) by `length` bytes, (b, length), in one program."""
    decoder = dataclasses.replace(model, carry=True)
    (carries, logits), _ = decoder.fwd((model.start(len(prompt)), prompt), trainables, inference_mode=True)

    def next_byte(carry, rng):
        carries, logits = carry
        byte = jax.random.categorical(rng, logits / temperature)  # (b,)
        (carries, logits), _ = decoder.fwd((carries, byte[:, None]), trainables, inference_mode=True)
        return (carries, logits[:, -1]), byte

    _, generated = jax.lax.scan(next_byte, (carries, logits[:, -1]), jax.random.split(rng, length))
    return generated.T


def main(config: Config) -> dict[str, float]:
    """Train, evaluate and generate; returns the scores on the held-out files."""
    model = LanguageModel(config.width, config.depth)
    rate = optim.WarmupCosine(config.rate, warmup=config.steps // 20, total=config.steps)
    result = train_model(model, optim.ClipGlobalNorm(optim.AdamW(rate, b2=0.99, decay=0.1), 1.0), config)
    print(generate_text(generate, model, result.state.trainables, config))
    return dict(result.scores)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
