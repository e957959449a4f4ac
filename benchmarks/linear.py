"""Claim: on a CPU, Linear over an input of three axes is at least 1.1 times as fast as `x @ kernel`.

The work is the MLP of a transformer, forward and backward: (16, 128, 256) to 1,024 features, GELU, and back to 256, in
float32. XLA's CPU compiler is slower over three axes than over two, so `ops.linear` flattens them around the product
if no axis but the first is sharded. Plain JAX is measured in both forms. Each implementation runs in its own process,
and the processes are interleaved, one step at a time, over pipes. PyTorch takes part if a Python that has it is given:

    python benchmarks/linear.py [python-with-torch]    # 1 minute

On a GPU, where `ops.linear` does not flatten, the same is measured over (16, 1024, 1024) in bfloat16, without a claim.
Set XLA_PYTHON_CLIENT_PREALLOCATE=false there, since three processes share its memory.

Typical, on 2 cores shared with 10 other processes, relative to plain JAX: mlax 0.68 and flattened plain JAX 0.69 with
JAX 0.10.2, 0.66 and 0.72 with JAX 0.12; PyTorch 2.13, which suffers most from busy cores, 1.4.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = {"cpu": (16, 128, 256, 1024, "float32"), "gpu": (16, 1024, 1024, 4096, "bfloat16")}
LIMIT = 1.1
ROUNDS = 25


def main(torch_python: str | None) -> None:
    from harness import interleave, print_table, seconds, verdict

    pythons = {"mlax": sys.executable, "plain JAX": sys.executable, "plain JAX, flattened": sys.executable}
    if torch_python and sizes() == SIZES["cpu"]:
        pythons["PyTorch"] = torch_python
    workers = {name: Worker(python, name) for name, python in pythons.items()}
    interleave({name: worker.step for name, worker in workers.items()}, rounds=3)  # compiles
    results = interleave({name: worker.step for name, worker in workers.items()}, rounds=ROUNDS)
    medians = {name: statistics.median(times) for name, times in results.items()}
    rows = []
    for name, duration in medians.items():
        ratio = duration / medians["plain JAX"]
        has_claim = name == "mlax" and sizes() == SIZES["cpu"]
        claim = verdict(f"at least {LIMIT} x as fast", ratio <= 1 / LIMIT) if has_claim else ""
        rows.append((name, seconds(duration), seconds(min(results[name])), f"{ratio:.2f}", claim))
    b, t, d, _, dtype = sizes()
    title = f"A GELU MLP on {dtype}[{b}, {t}, {d}], forward and backward: medians of {ROUNDS}"
    print_table(title, ("implementation", "step", "best", "/ plain JAX", "claim"), rows)
    for worker in workers.values():
        worker.close()


def sizes() -> tuple[int, int, int, int, str]:
    """Batch, time, width, hidden features, and dtype."""
    import jax

    return SIZES[jax.default_backend()]


class Worker:
    """A process that runs one step per line sent, and answers with its seconds."""

    def __init__(self, python: str, name: str):
        command = [python, __file__, "--work", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def work(name: str) -> None:
    step = torch_step() if name == "PyTorch" else jax_step(name)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def jax_step(name: str) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    import mlax

    def plain(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return x @ kernel + bias

    def flatten(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return (x.reshape(-1, x.shape[-1]) @ kernel + bias).reshape(*x.shape[:-1], -1)

    linear = {"mlax": mlax.ops.linear, "plain JAX": plain, "plain JAX, flattened": flatten}[name]
    b, t, d, f, dtype = sizes()
    up, down = mlax.nn.Linear(f), mlax.nn.Linear(d)
    x = jax.random.normal(jax.random.key(0), (b, t, d), dtype)
    weights = {"up": up.init(jax.random.key(1), x)[0], "down": down.init(jax.random.key(2), jnp.ones((1, f), dtype))[0]}

    @jax.jit
    def gradients(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            y = linear(jax.nn.gelu(linear(x, **weights["up"])), **weights["down"])
            return (y * y).mean()

        return jax.grad(loss, (0, 1))(weights, x)

    return lambda: jax.block_until_ready(gradients(weights, x))


def torch_step() -> Callable[[], Any]:
    import torch  # pyright: ignore[reportMissingImports]

    b, t, d, f, _ = SIZES["cpu"]
    model = torch.nn.Sequential(torch.nn.Linear(d, f), torch.nn.GELU("tanh"), torch.nn.Linear(f, d))
    x = torch.randn(b, t, d, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        x.grad = None
        model(x).square().mean().backward()

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
