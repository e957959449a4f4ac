"""Attention over shapes, dtypes and options on the default device, forward and backward, against its plain form.

    XLA_FLAGS=--xla_gpu_autotune_level=0 python scripts/attention_sweep.py [part of a name]    # two minutes

Each row is one attention: the backend that computes it, and the largest errors of the result and of the gradients,
relative to the largest value, from the plain form in float32 on the same inputs. Exits with 1 if any row raises or errs
by more than its dtype allows.
"""

import dataclasses
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax import dtypes, nn, ops

LENGTHS = (1, 7, 63, 197, 1000, 1025)
WIDTHS = (8, 20, 40, 64, 80, 128, 256, 320)
TOLERANCES = {"float32": 1e-2, "float16": 2e-2, "bfloat16": 1e-1, "mixed float16": 5e-3, "mixed bfloat16": 3e-2}
# a pure narrow softmax sums in the narrow dtype


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: its shapes, its dtypes and its options."""

    name: str
    mode: str = "mixed bfloat16"
    t: int = 197
    s: int | None = None  # None: t
    heads: int = 4
    kv_heads: int = 4
    width: int = 64
    value_width: int | None = None  # None: width
    options: tuple[tuple[str, Any], ...] = ()  # static ones
    arrays: tuple[str, ...] = ()  # more inputs, by name

    @property
    def dtype(self) -> str:
        return self.mode.split()[-1]


def with_options(name: str, *arrays: str, **more: Any) -> list[Case]:
    """The case in mixed precision, at an odd and an even length, and in float32."""
    fields = {field.name for field in dataclasses.fields(Case)}
    shape = {key: value for key, value in more.items() if key in fields}
    options = tuple((key, value) for key, value in more.items() if key not in fields)
    case = Case(name, options=options, arrays=arrays, **shape)
    cases = [case, dataclasses.replace(case, mode="float32")]
    return cases if "t" in shape else [*cases, dataclasses.replace(case, t=128)]


CASES = [
    *[Case("length", mode, t=t) for t in LENGTHS for mode in ("mixed bfloat16", "mixed float16")],
    *[Case("width", width=width) for width in WIDTHS],
    *[Case("width, even", width=width, t=128) for width in (8, 40, 256)],
    *[Case("dtype", mode) for mode in TOLERANCES],
    *with_options("causal", causal=True),
    *with_options("cross", s=63),
    *with_options("cross, causal, keys end first", s=64, causal=True),
    *with_options("cross, window past the keys", s=63, causal=True, window=9),
    *with_options("one query", t=1, s=197),
    *with_options("one key", t=197, s=1),
    *with_options("grouped", heads=8, kv_heads=2),
    *with_options("one key-value head", heads=8, kv_heads=1),
    *with_options("window back", causal=True, window=16),
    *with_options("window of one", causal=True, window=1),
    *with_options("window both ways", window=16),
    *with_options("segments", "segments"),
    *with_options("lengths", "lengths"),
    *with_options("lengths, causal, grouped", "lengths", causal=True, kv_heads=2),
    *with_options("lengths, window past the keys", "lengths", causal=True, window=9),
    *with_options("bias", "bias"),
    *with_options("bias of keys", "key_bias"),
    *with_options("mask", "mask"),
    *with_options("positions", "positions", causal=True),
    *with_options("sinks", "sinks"),
    *with_options("ALiBi", alibi=True),
    *with_options("soft cap", softcap=2.0),
    *with_options("scale", scale=0.3),
    *with_options("dropout", dropout=0.1),
    *with_options("narrow values", value_width=32),
    *with_options("chunked", implementation="chunked", causal=True),
]


def make_inputs(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that are differentiated, and those that are not."""
    draws = np.random.default_rng(0)
    b, t, s, h, g = 2, case.t, case.t if case.s is None else case.s, case.heads, case.kv_heads

    def normal(*shape: int) -> Any:
        return jnp.asarray(draws.normal(size=shape), case.dtype)

    floats = {
        "q": normal(b, t, h, case.width),
        "k": normal(b, s, g, case.width),
        "v": normal(b, s, g, case.value_width or case.width),
    }
    shapes = {"bias": (1, h, t, s), "key_bias": (b, 1, 1, s), "sinks": (h,)}
    floats |= {name.removeprefix("key_"): normal(*shape) for name, shape in shapes.items() if name in case.arrays}
    others = {
        "segments": (draws.integers(0, 3, (b, t)), draws.integers(0, 3, (b, s))),
        "lengths": np.asarray([0, max(1, s // 2)]),  # a row without keys
        "mask": draws.random((b, 1, t, s)) < 0.7,
        "positions": (np.sort(draws.integers(0, 99, (b, t))), np.sort(draws.integers(0, 99, (b, s)))),
    }
    return floats, jax.tree.map(jnp.asarray, {name: x for name, x in others.items() if name in case.arrays})


def run_case(case: Case) -> tuple[str, float, float]:
    """The backend, and the errors of the result and of the gradients."""
    floats, others = make_inputs(case)
    options = dict(case.options)
    accum_dtype = "float32" if case.mode.startswith("mixed") else None
    rng = jax.random.key(0) if "dropout" in options else None

    def attend(floats: Any, **more: Any) -> Any:
        y = ops.attention(**floats, **others, **{**options, **more}, rng=rng)
        return (y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), y

    def both(floats: Any, **more: Any) -> Any:
        (_, y), grads = jax.jit(jax.value_and_grad(lambda floats: attend(floats, **more), has_aux=True))(floats)
        return y, grads

    backend = ops.attention_backend(**floats, **others, **options, accum_dtype=accum_dtype)
    found = both(floats, accum_dtype=accum_dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), floats)
    wanted = both(wide, implementation="xla", precision="highest")
    return backend, relative_error(found[0], wanted[0]), relative_error(found[1], wanted[1])


def relative_error(found: Any, wanted: Any) -> float:
    """The largest difference of all leaves, relative to the largest value of all leaves."""
    pairs = [
        [np.asarray(x, np.float64) for x in pair] for pair in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    ]
    scale = max(np.abs(other).max(initial=1e-2) for _, other in pairs)
    return max(float(np.abs(one - other).max(initial=0.0)) for one, other in pairs) / scale


def vision_transformer() -> tuple[str, float, float]:
    """The attention of a ViT-B/16 as a layer, in mixed precision: 197 tokens."""
    layer = nn.MultiHeadAttention(12)
    x = jax.random.normal(jax.random.key(1), (8, 197, 768))
    trainables, _ = layer.init(jax.random.key(0), x)

    def both(layer: Any) -> Any:
        def loss(trainables: Any) -> Any:
            y = layer.fwd(x, trainables)[0]
            return (y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainables)
        return y, grads

    q = jax.ShapeDtypeStruct((8, 197, 12, 64), jnp.bfloat16)
    backend = ops.attention_backend(q, q, q, accum_dtype="float32")
    with jax.default_matmul_precision("highest"):
        wanted = both(layer)
    found = both(dtypes.mixed_bfloat16(layer))
    return backend, relative_error(found[0], wanted[0]), relative_error(found[1], wanted[1])


def transformed(form: str) -> tuple[str, float, float]:
    """Forward mode, second derivatives and `vmap` with the axis last or of the queries alone."""
    floats, _ = make_inputs(Case("", t=6, s=9, width=8))

    def attend(floats: Any, **more: Any) -> Any:
        return ops.attention(**floats, **more)

    def loss(floats: Any, **more: Any) -> Any:
        return (attend(floats, **more).astype(jnp.float32) ** 2).sum()

    def compute(floats: Any, **more: Any) -> Any:
        of = lambda x: loss(x, **more)  # noqa: E731
        if form == "forward mode":
            return jax.jvp(lambda x: attend(x, **more), (floats,), (floats,))
        if form == "gradient of a gradient":
            squares = lambda x: sum((g.astype(jnp.float32) ** 2).sum() for g in jax.tree.leaves(jax.grad(of)(x)))  # noqa: E731
            return loss(floats, **more), jax.grad(squares)(floats)
        if form == "Hessian":
            return loss(floats, **more), jax.hessian(lambda q: of({**floats, "q": q}))(floats["q"])
        stacked = jnp.stack([floats["q"], floats["q"] * 2], -1)
        return jax.vmap(lambda q: jax.value_and_grad(of)({**floats, "q": q}), -1)(stacked)

    backend = ops.attention_backend(**floats, accum_dtype="float32")
    found = jax.jit(lambda x: compute(x, accum_dtype="float32"))(floats)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), floats)
    wanted = jax.jit(lambda x: compute(x, implementation="xla", precision="highest"))(wide)
    return backend, relative_error(found[0], wanted[0]), relative_error(found[1], wanted[1])


FORMS = ("forward mode", "gradient of a gradient", "Hessian", "vmap of the queries, last axis")


def make_jobs() -> dict[str, tuple[float, Any, tuple[Any, ...]]]:
    """By name: the largest error allowed, a function and its arguments."""
    jobs: dict[str, tuple[float, Any, tuple[Any, ...]]] = {}
    for case in CASES:
        s = case.t if case.s is None else case.s
        name = f"{case.name}: {case.mode}, {case.t} x {s}, {case.heads}/{case.kv_heads} heads of {case.width}"
        jobs[name] = TOLERANCES[case.mode], run_case, (case,)
    jobs["layer of a ViT: mixed bfloat16, 197 tokens"] = TOLERANCES["mixed bfloat16"], vision_transformer, ()
    return jobs | {f"{form}: mixed bfloat16": (1e-1, transformed, (form,)) for form in FORMS}


def main(part: str) -> int:
    """Run the rows whose name contains `part`; 1 if any fails."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the device
    jobs = {name: job for name, job in make_jobs().items() if part in name}
    failures = 0
    print(f"JAX {jax.__version__}: {len(jobs)} rows", flush=True)
    # most of the time is compilation; processes, since cuDNN captures CUDA graphs, which threads would disturb
    workers = max(1, min(8, len(jobs), (os.cpu_count() or 2) // 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        started = {name: (tolerance, pool.submit(run, *of)) for name, (tolerance, run, of) in jobs.items()}
        for name, (tolerance, job) in started.items():
            try:
                backend, *errors = job.result()
                is_right = all(error <= tolerance for error in errors)
                words = f"{' '.join(f'{error:.1e}' for error in errors)}  {backend}"
            except Exception as error:
                is_right, words = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            failures += not is_right
            print(f"{'ok  ' if is_right else 'FAIL'} {name:75} {words}", flush=True)
    print(f"{len(jobs) - failures} of {len(jobs)} hold")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
