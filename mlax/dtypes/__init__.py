"""The dtype guarantee: mixed precision as the only place that casts, and an audit that proves it."""

from mlax.dtypes._audit import DtypeError, DtypeViolation, audit, check
from mlax.dtypes._mixed import Mixed, cast, mixed_bfloat16, mixed_float16

__all__ = [
    "DtypeError",
    "DtypeViolation",
    "Mixed",
    "audit",
    "cast",
    "check",
    "mixed_bfloat16",
    "mixed_float16",
]
