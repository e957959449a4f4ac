"""Speed: steps, examples and arithmetic a second, beside what the device could do."""

import re
from typing import Any

import jax

# Dense bfloat16 operations a second without sparsity, as the makers' data sheets give them. The first name whose words
# are in that of the device is taken: of one card in several forms, the slower forms come first.
PEAKS = {
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def peak(device: Any) -> float | None:
    """The operations a second that the device is sold with; None if it is not in the list, as no CPU is."""
    return next((flops for name, flops in PEAKS.items() if re.search(rf"\b{name}\b", device.device_kind)), None)


def speed(rate: float | None, examples: int, flops: int) -> str:
    """The speed in words, from steps a second, examples a step and operations a step over all devices."""
    if rate is None:
        return ""
    words = f"{rate:.3g} steps/s  {rate * examples:,.0f} examples/s"
    each = rate * flops / jax.device_count()
    most = peak(jax.devices()[0])
    if most:
        return f"{words}  {each / most:.1%} of peak"
    return f"{words}  {each / 1e9:.3g} GFLOP/s" if flops else words
