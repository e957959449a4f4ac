"""The dtype guarantee: who may change a dtype, where, and the audit that proves nobody else does."""

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
