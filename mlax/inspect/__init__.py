"""Inspecting: what JAX and XLA made of a function."""

from mlax.inspect._flops import flops

__all__ = ["flops"]
