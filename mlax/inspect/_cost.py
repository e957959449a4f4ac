"""cost: FLOPs, bytes and time of a compiled function by layer, against the peaks of the device."""

import collections
import dataclasses
import functools
import glob
import tempfile
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlax._jax import fused_op_names, path_of, scopes_of_op_name
from mlax.core import Documented, align_columns, document_tuple, format_bytes
from mlax.inspect._compile import trace_and_compile
from mlax.inspect._flops import operations
from mlax.inspect._hlo import Computation, Instruction, Program, kernels, parse_hlo
from mlax.inspect._summary import format_flops

RUNS = 3  # that are timed


@document_tuple
class Peaks(NamedTuple):
    """What a device reached in a short measurement: a large matrix product, and a copy of a large array."""

    device: str  # its kind
    dtype: str  # of the product
    flops: float  # per second
    bandwidth: float  # bytes per second, read and written

    @property
    def ridge(self) -> float:
        """The arithmetic intensity above which the product, not the memory, is the limit."""
        return self.flops / self.bandwidth

    def __str__(self) -> str:
        return (
            f"{self.device}: {format_flops(self.flops)}FLOP/s in {self.dtype}, {format_bytes(self.bandwidth)}/s, "
            f"so that {self.ridge:.0f} FLOPs per byte balance"
        )


@document_tuple
class LayerCost(NamedTuple):
    """The cost of a layer in one pass, in all its repetitions, on one device."""

    path: str  # "" outside of a layer
    is_backward: bool  # whether it is the backward pass
    flops: int  # of matrix products and convolutions
    bytes: int  # that its kernels read and write
    kernels: int  # launches
    seconds: float | None  # measured, in one call; None if it was not

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def best_seconds(self, peaks: Peaks) -> float:
        """The time at the roofline: that of the product or that of the memory, whichever is longer."""
        return max(self.flops / peaks.flops, self.bytes / peaks.bandwidth)

    def limit(self, peaks: Peaks) -> str:
        """What limits it at the roofline: "compute" or "memory"."""
        return "compute" if self.flops / peaks.flops > self.bytes / peaks.bandwidth else "memory"


@dataclasses.dataclass(frozen=True, repr=False)
class Cost(metaclass=Documented):
    """The cost of a function by layer, the longest first; `print` shows a table."""

    rows: tuple[LayerCost, ...]  # one for each layer and pass
    peaks: Peaks  # of the device

    def __str__(self) -> str:
        measured = any(row.seconds is not None for row in self.rows)
        titles = ("layer", "pass", "FLOPs", "bytes", "FLOPs/byte", "limit", "kernels", "at best")
        table = [
            (*titles, "measured", "of best") if measured else titles,
            *(self._cells(row, measured) for row in self.rows),
        ]
        return "\n".join([str(self.peaks), *align_columns(table, right=(2, 3, 4, 6, 7, 8, 9)), self._total()])

    def __repr__(self) -> str:
        return str(self)

    def _cells(self, row: LayerCost, measured: bool) -> tuple[str, ...]:
        best = row.best_seconds(self.peaks)
        cells = (
            row.path or "(no layer)",
            "backward" if row.is_backward else "forward",
            format_flops(row.flops),
            format_bytes(row.bytes),
            f"{row.intensity:.3g}" if row.flops else "",
            row.limit(self.peaks),
            str(row.kernels),
            _format_seconds(best),
        )
        if not measured:
            return cells
        return (*cells, _format_seconds(row.seconds or 0), f"{row.seconds / best:.1f}x" if row.seconds and best else "")

    def _total(self) -> str:
        best = sum(row.best_seconds(self.peaks) for row in self.rows)
        seconds = [row.seconds for row in self.rows if row.seconds is not None]
        measured = f", measured {_format_seconds(sum(seconds))}" if seconds else ""
        return (
            f"total: {format_flops(sum(row.flops for row in self.rows)) or 0} FLOPs, "
            f"{format_bytes(sum(row.bytes for row in self.rows))}, at best {_format_seconds(best)}{measured}"
        )


def cost(function: Any, *args: Any, measure: bool = False, peaks: Peaks | None = None, **kwargs: Any) -> Cost:
    """FLOPs, bytes, arithmetic intensity and roofline position of a function by layer, forward and backward.

    `function` may be a `train.step`. FLOPs are counted in the jaxpr, bytes in the kernels of the compiled program, each
    as often as it runs; a fusion counts for the layer of its last operation. Over several devices, the numbers are of
    one of them, with an equal share of the FLOPs. With `measure=True` the function is run, so the arguments must be
    arrays and not be donated, and the time of each layer is read from the profiler.

    Without `peaks`, those of the device are measured, in about a second. Pass them for a device that is described by
    `jax.experimental.topologies` and is not here.
    """
    traced, compiled = trace_and_compile("cost", function, args, kwargs)
    if not measure:
        return cost_of(traced, compiled, None, peaks)
    compiled = without_command_buffers(traced, compiled)
    return cost_of(traced, compiled, measure_instructions(function, args, kwargs, compiled), peaks)


def cost_of(traced: Any, compiled: Any, seconds: dict[str, float] | None, peaks: Peaks | None = None) -> Cost:
    """The cost of a function that is traced, or None, and compiled; `seconds` are those of each HLO instruction."""
    program = parse_hlo(compiled.as_text() or "")
    counts: dict[tuple[str, bool], list[float]] = collections.defaultdict(lambda: [0, 0, 0, 0.0])
    dtypes = collections.Counter[str]()
    for operation in operations(traced.jaxpr) if traced is not None else ():
        if operation.flops:
            counts[operation.path, operation.is_backward][0] += operation.flops
            dtypes[str(operation.equation.invars[0].aval.dtype)] += operation.flops
    for kernel, computation, times in kernels(program):
        row = counts[_layer(kernel)]
        row[1] += times * _kernel_bytes(program, computation, kernel)
        row[2] += times
        row[3] += (seconds or {}).get(kernel.name, 0.0)
    devices = _devices(compiled)
    share = len(devices)
    peaks = peaks or measure_peaks(devices[0], dtypes.most_common(1)[0][0] if dtypes else "float32")
    rows = [
        LayerCost(
            path, backward, int(flops / share), int(size), int(number), None if seconds is None else spent / share
        )
        for (path, backward), (flops, size, number, spent) in counts.items()
        if flops or size
    ]
    rows.sort(key=lambda row: -row.best_seconds(peaks) if row.seconds is None else -row.seconds)
    return Cost(tuple(rows), peaks)


@functools.lru_cache
def measure_peaks(device: Any, dtype: str = "float32") -> Peaks:
    """Measure a device: the best of several runs of a matrix product, and of a copy."""
    size, length = (8192, 1 << 27) if device.platform != "cpu" else (1024, 1 << 24)
    with jax.default_device(device):
        a = jnp.ones((size, size), dtype)
        x = jnp.ones(length, jnp.float32)
        product = _best_seconds(lambda a: jax.lax.dot(a, a) * jnp.asarray(1 / size, a.dtype), a)
        copy = _best_seconds(lambda x: x + 1, x)
    return Peaks(device.device_kind, dtype, 2 * size**3 / product, 2 * 4 * length / copy)


def _best_seconds(function: Any, x: jax.Array, runs: int = 5) -> float:
    run = jax.jit(function, donate_argnums=0)  # in place, so that no memory is allocated meanwhile
    x = jax.block_until_ready(run(x))
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        x = jax.block_until_ready(run(x))
        best = min(best, time.perf_counter() - start)
    return best


def without_command_buffers(traced: Any, compiled: Any) -> Any:
    """On a GPU, the program without CUDA graphs, in which the profiler does not see the single kernels."""
    if traced is None or _devices(compiled)[0].platform != "gpu":
        return compiled
    return traced.lower().compile(compiler_options={"xla_gpu_enable_command_buffer": ""})


def measure_instructions(function: Any, args: Any, kwargs: Any, compiled: Any) -> dict[str, float]:
    """The seconds of each instruction of the compiled program in one call, read from the profiler."""
    run = function if compiled.in_tree != jax.tree.structure((args, kwargs)) else compiled
    jax.block_until_ready(run(*args, **kwargs))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(RUNS):
                jax.block_until_ready(run(*args, **kwargs))
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(file)
    seconds = collections.Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a type of JAX; an error would abort Python
        for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
            name = dict(event.stats).get("hlo_op")
            if name is not None:
                seconds[str(name)] += event.duration_ns / 1e9 / RUNS
    return dict(seconds)


def _kernel_bytes(program: Program, computation: Computation, kernel: Instruction) -> int:
    """The bytes that a kernel reads and writes; of an array that it slices or updates in part, those of the slice."""
    operands = [computation.instructions[name] for name in kernel.operands if name in computation.instructions]
    if kernel.opcode in ("fusion", "fusion-start") and kernel.called:
        return _fusion_bytes(program.computations[kernel.called[0]], operands)
    if kernel.opcode in ("dynamic-slice", "gather"):
        return 2 * kernel.bytes
    if kernel.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(each.bytes for each in operands[1:])
    return kernel.bytes + sum(each.bytes for each in operands)


def _fusion_bytes(fused: Computation, operands: list[Instruction]) -> int:
    users = collections.defaultdict[str, list[tuple[Instruction, str]]](list)
    for each in reversed(fused.instructions.values()):  # users first
        for name in each.operands:
            users[name] += users[each.name] if each.opcode == "bitcast" else [(each, name)]
    read = 0
    for each in fused.instructions.values():
        if each.opcode == "parameter":
            parts = [_part_bytes(user, name) for user, name in users[each.name]]
            is_partial = bool(parts) and None not in parts
            read += sum(filter(None, parts)) if is_partial else operands[int(each.operands[0])].bytes
    root = _skip_bitcasts(fused, fused.root)
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return read + sum(_written_bytes(fused, _skip_bitcasts(fused, result)) for result in results)


def _part_bytes(user: Instruction, name: str) -> int | None:
    """The bytes that an instruction reads of its operand `name`; None if all of them."""
    if user.opcode in ("dynamic-slice", "gather", "slice"):
        return user.bytes
    return 0 if user.opcode == "dynamic-update-slice" and user.operands[0] == name else None


def _written_bytes(fused: Computation, result: Instruction) -> int:
    is_update = result.opcode == "dynamic-update-slice" and result.operands[1] in fused.instructions
    return fused.instructions[result.operands[1]].bytes if is_update else result.bytes


def _skip_bitcasts(fused: Computation, each: Instruction) -> Instruction:
    while each.opcode == "bitcast":
        each = fused.instructions[each.operands[0]]
    return each


def _layer(kernel: Instruction) -> tuple[str, bool]:
    scopes = scopes_of_op_name(fused_op_names(kernel.op_name.partition(";")[0])[0])
    return path_of(scopes), any(scope.is_transformation and scope.name == "transpose" for scope in scopes)


def _devices(compiled: Any) -> list[Any]:
    """The devices that a program runs on, those of this process first."""
    shardings = [each for each in jax.tree.leaves(compiled.input_shardings) if hasattr(each, "device_set")]
    devices = shardings[0].device_set if shardings else jax.local_devices()[:1]
    return sorted(devices, key=lambda device: (device.process_index != jax.process_index(), device.id))


def _format_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
