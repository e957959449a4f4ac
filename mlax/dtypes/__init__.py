"""The dtype guarantee: mixed precision at declared boundaries, and an audit of every operation's dtype."""

from mlax.core import name_types as name_types
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

name_types(globals())
