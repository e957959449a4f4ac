"""Claim: a LoRA step with `train=` costs no more FLOPs and no more memory than with the frozen tree kept apart by hand.

    python benchmarks/lora_step.py                                                       # a minute on a CPU
    python benchmarks/lora_step.py --depth 12 --width 768 --heads 12 --batch 8 --length 512      # on a GPU

A GPT with a LoRA around every Linear is compiled three times: with `train.step(train="**/lora/*")`; with the same step
over the LoRA leaves alone, where the frozen weights are an argument that is neither donated nor returned; and with all
weights trained. It prints the FLOPs, as mlax counts them in the jaxpr and as XLA counts them in the compiled program
(the body of a scan once); the bytes of the optimizer's slots; and the memory of the compiled program: arguments,
outputs, outputs that reuse the memory of arguments, temporaries, and their peak: arguments + outputs - reused +
temporaries. Outputs are without the table of pointers to them, 8 bytes for each.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from harness import print_table, verdict
from rich import print

import mlax
from mlax import inspect, nn, optim, train

LORA = "**/lora/*"
MIB = 2**20


@mlax.frozen
class Block(mlax.Composite):
    width: int
    heads: int

    def parts(self):
        return {
            "norm1": nn.LayerNorm(),
            "attend": nn.MultiHeadAttention(self.heads, causal=True),
            "norm2": nn.LayerNorm(),
            "up": nn.Linear(4 * self.width),
            "down": nn.Linear(self.width),
        }

    def wire(self, sub, x):  # (b, t, d)
        x = x + sub.attend(sub.norm1(x))
        return x + sub.down(jax.nn.gelu(sub.up(sub.norm2(x))))


def main(options: argparse.Namespace) -> None:
    plain = mlax.Series(
        embed=nn.Embed(options.vocabulary, options.width),
        blocks=mlax.Repeat(Block(options.width, options.heads), options.depth),
        norm=nn.LayerNorm(),
        head=nn.Linear(options.vocabulary),
    )
    model = mlax.wrap(plain, nn.Linear, lambda layer: nn.LoRA(layer, rank=options.rank))
    tokens = jax.ShapeDtypeStruct((options.batch, options.length), jnp.int32)
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def objective(batch, trainables, non_trainables, *, rng=None, inference_mode=False):
        logits, new = model.fwd(batch, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:])
        return losses.mean(-1), new

    optimizer = optim.ClipGlobalNorm(optim.AdamW(1e-3), 1.0)
    rows = {
        "train=": measure(train.step(objective, optimizer, train=LORA), trainables, tokens),
        "apart by hand": measure_apart(objective, optimizer, trainables, tokens),
        "all trained": measure(train.step(objective, optimizer), trainables, tokens),
    }
    share = mlax.count(trainables, LORA) / mlax.count(trainables)
    print(f"{mlax.count(trainables):,} weights, of which LoRA {share:.1%}, on {jax.devices()[0].device_kind}")
    names = list(rows["train="])
    print_table("A step", ("", *rows), [(name, *(_show(name, row[name]) for row in rows.values())) for name in names])
    found, wanted = rows["train="], rows["apart by hand"]
    for name in ("GFLOPs (mlax)", "GFLOPs (XLA)", "slots", "peak"):
        print(
            verdict(
                f"{name}: {_show(name, found[name])}, by hand {_show(name, wanted[name])}", found[name] <= wanted[name]
            )
        )


def measure(step: train.Step, trainables: Any, batch: Any) -> dict[str, float]:
    """The cost of a step whose state holds all weights."""
    state = jax.eval_shape(step.init, jax.random.key(1), trainables)
    return cost(step.advance, (0,), state, batch)


def measure_apart(objective: Any, optimizer: optim.Optimizer, trainables: Any, batch: Any) -> dict[str, float]:
    """The cost of a step whose state holds the trained weights only."""
    live, frozen = mlax.freeze(trainables, f"!{LORA}")
    state = jax.eval_shape(train.step(objective, optimizer).init, jax.random.key(1), live)

    def advance(state: Any, batch: Any, frozen: Any) -> Any:
        def apart(batch: Any, live: Any, *rest: Any, **options: Any) -> Any:
            return objective(batch, mlax.merge(live, frozen), *rest, **options)

        return train.step(apart, optimizer).advance(state, batch)

    return cost(advance, (0,), state, batch, frozen)


def cost(advance: Any, donated: tuple[int, ...], state: Any, *rest: Any) -> dict[str, float]:
    """FLOPs and bytes of the compiled step."""
    compiled = jax.jit(advance, donate_argnums=donated).lower(state, *rest).compile()
    memory, counted = compiled.memory_analysis(), compiled.cost_analysis()
    pointers = 8 * len(jax.tree.leaves(compiled.out_info))
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes - pointers
    reused, temporaries = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    return {
        "GFLOPs (mlax)": inspect.flops(jax.make_jaxpr(advance)(state, *rest)) / 1e9,
        "GFLOPs (XLA)": counted["flops"] / 1e9,
        "slots": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.optimizer)),
        "arguments": arguments,
        "outputs": outputs,
        "reused": reused,
        "temporaries": temporaries,
        "peak": arguments + outputs - reused + temporaries,
    }


def _show(name: str, value: float) -> str:
    return f"{value:.3f}" if name.startswith("GFLOPs") else f"{value / MIB:.2f} MiB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"depth": 4, "width": 256, "heads": 8, "vocabulary": 1024, "batch": 8, "length": 128, "rank": 8}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    main(parser.parse_args())
