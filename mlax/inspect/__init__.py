"""Inspection: what JAX and XLA made of a function, by layer."""

from mlax.core import format_bytes as format_bytes
from mlax.core import name_types as name_types
from mlax.inspect._compare import Comparison, Dtypes, LayerDifference, LayerDtypes, compare, dtypes
from mlax.inspect._cost import Cost, LayerCost, Peaks, cost
from mlax.inspect._cost import measure_peaks as measure_peaks
from mlax.inspect._device_memory import free_bytes as free_bytes
from mlax.inspect._device_memory import total_bytes as total_bytes
from mlax.inspect._device_memory import used_bytes as used_bytes
from mlax.inspect._flops import flops
from mlax.inspect._flops import operations as operations
from mlax.inspect._hlo import parse_hlo as parse_hlo
from mlax.inspect._memory import LiveBuffers, Memory, Moment, memory
from mlax.inspect._nonfinite import NonFinite, Statistics, nonfinite
from mlax.inspect._report import report
from mlax.inspect._report import write_report as write_report
from mlax.inspect._retrace import ArgumentChange, Compilation, Retraced, retrace
from mlax.inspect._stages import Constant, Donation, Match, Stages, stages
from mlax.inspect._summary import LayerSummary, Summary, summary
from mlax.inspect._summary import path_in_model as path_in_model
from mlax.inspect._summary import scope_table as scope_table
from mlax.inspect._transfer_events import TransferEvent as TransferEvent
from mlax.inspect._transfer_events import instruction_events as instruction_events
from mlax.inspect._transfers import Transfer, Transfers, transfers
from mlax.inspect._transfers import program_events as program_events
from mlax.inspect._transfers import summarize_events as summarize_events

__all__ = [
    "ArgumentChange",
    "Comparison",
    "Compilation",
    "Constant",
    "Cost",
    "Donation",
    "Dtypes",
    "LayerCost",
    "LayerDifference",
    "LayerDtypes",
    "LayerSummary",
    "LiveBuffers",
    "Match",
    "Memory",
    "Moment",
    "NonFinite",
    "Peaks",
    "Retraced",
    "Stages",
    "Statistics",
    "Summary",
    "Transfer",
    "Transfers",
    "compare",
    "cost",
    "dtypes",
    "flops",
    "memory",
    "nonfinite",
    "report",
    "retrace",
    "stages",
    "summary",
    "transfers",
]

name_types(globals())
