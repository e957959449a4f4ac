"""The dtype guarantee: who may change a dtype, where, and the audit that proves nobody else does."""

from mlax.dtypes._audit import Departure, DtypeDeparture, audit, check
from mlax.dtypes._cast import cast
from mlax.dtypes._choices import mixed_bfloat16, mixed_float16
from mlax.dtypes._mixed import Mixed

__all__ = [
    "Departure",
    "DtypeDeparture",
    "Mixed",
    "audit",
    "cast",
    "check",
    "mixed_bfloat16",
    "mixed_float16",
]
