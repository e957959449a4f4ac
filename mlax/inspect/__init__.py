"""Inspecting: what JAX and XLA made of a function."""

from mlax.inspect._flops import flops
from mlax.inspect._transfers import Row, Transfers, transfers

__all__ = ["Row", "Transfers", "flops", "transfers"]
