"""Inspecting: what JAX and XLA made of a function."""

from mlax.inspect._flops import flops
from mlax.inspect._memory import all_bytes, free_bytes, used_bytes
from mlax.inspect._sizes import gib
from mlax.inspect._transfers import Row, Transfers, collected, transfers

__all__ = ["Row", "Transfers", "flops", "transfers"]
