"""Peak FLOP/s by the name of the device."""

from types import SimpleNamespace

import pytest

from mlax.train import peak_flops


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("TPU v4", 275e12),
        ("TPU v4 lite", 138e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peak_flops_are_found_by_whole_words_of_the_device_kind(kind, expected):
    assert peak_flops(SimpleNamespace(device_kind=kind)) == expected
