"""Count kernels, bytes and memory of training steps and of an optimizer compiled for an NVIDIA H200, without a GPU.

    pip install "jax[cuda12]" && python -m benchmarks.gpu_programs [WORK ...] [--layers] [--hlo FOLDER]

XLA's compiler needs a description of a GPU, not the GPU, so a change of a program can be judged before it is timed.
Without the device nothing is autotuned: cuBLAS and cuDNN may use other algorithms, while kernels and memory are those
of the GPU. Bytes are what all kernels read and write, of a stack that is sliced or updated those of the slice.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # which looks for a driver
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import mlax
from mlax import dtypes, inspect, nn, ops, optim, train, zoo

H200 = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 2 }
runtime_version { major: 12 minor: 9 patch: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: 62914560 memory_bandwidth: 4800000000000 device_memory_size: 150000000000
}
device_description_str: "NVIDIA H200"
"""
PEAKS = inspect.Peaks("NVIDIA H200", "bfloat16", flops=790e12, bandwidth=4.3e12)  # as measured on one
WORKS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {  # a training step or a jitted function, and shapes
    "gpt2": lambda: language_step("unroll", 32),
    "gpt2 scanned": lambda: language_step("scan", 32),
    "gpt2 batch 64": lambda: language_step("unroll", 64),
    "vit": lambda: image_step(mlax.override(zoo.vit("base"), mlax.Repeat, mode="unroll")),
    "vit scanned": lambda: image_step(mlax.override(zoo.vit("base"), mlax.Repeat, mode="scan")),
    "resnet50": lambda: image_step(zoo.resnet(50)),
    "mlp": lambda: mlp_step(()),
    "mlp, 20 steps": lambda: mlp_step((20,)),
    "adamw": lambda: bare_update(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"among {', '.join(WORKS)}; all by default")
    parser.add_argument("--layers", action="store_true", help="a row for each layer and pass as well")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="write the compiled programs there")
    options = parser.parse_args()
    if unknown := set(options.works) - set(WORKS):
        parser.error(f"no such work: {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    print(f"JAX {jax.__version__}, compiled for an {PEAKS.device}")
    print(f"{'work':16}{'kernels':>9}{'GB':>9}{'GiB held':>10}{'compiled':>10}")
    for name in options.works or WORKS:
        with chosen_for(topology.devices[0]):
            count(name, topology.devices[0], options.layers, options.hlo)


@contextmanager
def chosen_for(device: Any) -> Iterator[None]:
    """Let mlax choose its kernels and forms as where this GPU is the default device."""
    backend = sys.modules[ops.attention_backend.__module__]
    attributes = {"platform": "gpu", "compute_capability": "9.0", "device_kind": device.device_kind, "core_count": 132}
    with (
        mock.patch("jax.default_backend", return_value="gpu"),
        mock.patch("jax.devices", return_value=[SimpleNamespace(**attributes)]),
        mock.patch.object(backend, "find_refusal", return_value=None),  # it would ask the device
    ):
        yield


def count(name: str, device: Any, layers: bool, folder: Path | None) -> None:
    function, args = WORKS[name]()
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    start = time.perf_counter()
    is_step = isinstance(function, train.Step)
    compiled = function.aot.compile(*args) if is_step else function.lower(*args).compile()
    seconds = time.perf_counter() - start
    cost = inspect.cost(function, *(() if is_step else args), peaks=PEAKS)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    held = memory.temp_size_in_bytes + memory.argument_size_in_bytes  # the state is donated
    kernels, moved = sum(row.kernels for row in cost.rows), sum(row.bytes for row in cost.rows)
    print(f"{name:16}{kernels:9,}{moved / 1e9:9.1f}{held / 2**30:10.1f}{seconds:8.1f} s", flush=True)
    if layers:
        print(cost)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name.replace(' ', '-')}.hlo").write_text(text)


def language_step(mode: Any, batch: int) -> tuple[Any, tuple[Any, ...]]:
    model = dtypes.mixed_bfloat16(mlax.override(zoo.gpt2("small"), mlax.Repeat, mode=mode))

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        inputs = batch["x"], None, batch["y"]
        return model.fwd(inputs, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    tokens = jax.ShapeDtypeStruct((batch, 1024), jnp.int32)
    return abstract_step(model, objective, {"x": tokens, "y": tokens})


def image_step(model: Any, batch: int = 256) -> tuple[Any, tuple[Any, ...]]:
    model = dtypes.mixed_bfloat16(model)

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return ops.softmax_cross_entropy(logits, batch["y"], accum_dtype="float32"), new

    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32)
    return abstract_step(model, objective, {"x": images, "y": jax.ShapeDtypeStruct((batch,), jnp.int32)})


def mlp_step(steps: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    model = nn.MLP((512, 512, 10), activation=jax.nn.relu)

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        logits, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return ops.softmax_cross_entropy(logits, batch["y"]), new

    rows = (*steps, 128)
    batch = {"x": jax.ShapeDtypeStruct((*rows, 784), jnp.float32), "y": jax.ShapeDtypeStruct(rows, jnp.int32)}
    return abstract_step(model, objective, batch, *steps)


def bare_update() -> tuple[Any, tuple[Any, ...]]:
    """AdamW over the 148 leaves that GPT-2 has in PyTorch, donated in the order of the arguments of `update`."""
    d, optimizer = 768, optim.AdamW(3e-4)
    block = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    vectors = {
        "norm1": d,
        "shift1": d,
        "norm2": d,
        "shift2": d,
        **{f"{name}_bias": n for name, (_, n) in block.items()},
    }
    shapes = {"table": (50_257, d), "positions": (1024, d), "norm": (d,), "shift": (d,)}
    shapes |= {f"{i}_{name}": shape for i in range(12) for name, shape in block.items()}
    shapes |= {f"{i}_{name}": (n,) for i in range(12) for name, n in vectors.items()}
    weights = {f"{name}/kernel": jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    update = jax.jit(optimizer.update, donate_argnums=(1, 2))
    return update, (weights, jax.eval_shape(optimizer.init, weights), weights)


def abstract_step(model: Any, objective: Any, batch: Any, steps_per_call: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """A training step, and the shapes of its state and of a batch."""
    step, key = train.step(objective, optim.AdamW(3e-4), steps_per_call=steps_per_call), jax.random.key(0)
    x = batch["x"] if steps_per_call == 1 else jax.ShapeDtypeStruct(batch["x"].shape[1:], batch["x"].dtype)
    variables = jax.eval_shape(model.init, key, x)
    return step, (jax.eval_shape(lambda key, variables: step.init(key, *variables), key, variables), batch)


if __name__ == "__main__":
    main()
