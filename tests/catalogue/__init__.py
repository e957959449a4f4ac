"""The catalogue: one row for each public layer. Every promise of the contract is tested over every row.

A row is named after its layer; a second word tells rows of one layer apart. One file for each family.
"""

from tests.catalogue import core, first
from tests.catalogue.row import FLOATS, Row

ROWS: dict[str, Row] = {**core.ROWS, **first.ROWS}

__all__ = ["FLOATS", "ROWS", "Row"]
