"""The mesh of a plan: devices by named axes."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

REST = -1  # as many as are left


def sizes_of(given: Any) -> tuple[tuple[str, int], ...]:
    """Named sizes from a dict, pairs, or a mesh of JAX."""
    pairs = tuple(given.shape.items() if isinstance(given, Mesh) else dict(given).items())
    for name, size in pairs:
        if not isinstance(name, str) or not isinstance(size, int) or (size < 1 and size != REST):
            raise ValueError(f"mesh: {name!r} is {size!r}, but must be a number of devices, or {REST} for all others.")
    if sum(size == REST for _, size in pairs) > 1:
        raise ValueError(f"mesh: {dict(pairs)} leaves more than one axis to be found; say all but one.")
    return pairs


def filled(sizes: tuple[tuple[str, int], ...], devices: int) -> dict[str, int]:
    """The sizes, with the one that was left open."""
    said = math.prod(size for _, size in sizes if size != REST)
    left = [name for name, size in sizes if size == REST]
    if devices % said or devices < said:
        by = " x ".join(f"{name} {size}" for name, size in sizes if size != REST)
        fitting = [number for number in range(1, devices + 1) if devices % number == 0]
        fewer = f"Use some of them by plan.over(jax.devices()[:{said}]), or simulate" if said < devices else "Simulate"
        raise ValueError(
            f"mesh: {by} = {said} does not divide the {devices} device{'s' * (devices != 1)} there are; the numbers "
            f"that do are {', '.join(map(str, fitting))}. {fewer} more on a CPU "
            'by jax.config.update("jax_num_cpu_devices", n) before the first computation.'
        )
    return {name: devices // said if name in left else size for name, size in sizes}


@functools.lru_cache(maxsize=64)
def mesh_of(sizes: tuple[tuple[str, int], ...], devices: tuple[Any, ...]) -> Mesh:
    """The mesh over the first of these devices, whose axes XLA may split arrays over as it sees fit."""
    shape: Mapping[str, int] = filled(sizes, len(devices))
    number = math.prod(shape.values())
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=devices[:number])
