"""The catalogue: one row for each public layer. Every promise of the contract is tested over every row.

A row is named after its layer; further words tell rows of one layer apart. One file for each family.
"""

from tests.catalogue import attention, conv, core, experts, first, norms, place, place_pipeline, recurrent
from tests.catalogue.row import FLOATS, Row

FAMILIES = (core, first, conv, norms, attention, experts, recurrent, place, place_pipeline)
ROWS: dict[str, Row] = {name: row for family in FAMILIES for name, row in family.ROWS.items()}

__all__ = ["FLOATS", "ROWS", "Row"]
