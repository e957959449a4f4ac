"""The catalogue: at least one row for each public layer, optimizer and model; every promise is tested over every row.

A row is named after what it builds; further words tell apart the rows of one layer. Each family has a file.
"""

from tests.catalogue import attention, conv, core, experts, linear, norms, optimizers, place, recurrent, zoo
from tests.catalogue.row import FLOATS, LayerRow, OptimizerRow, Row
from tests.catalogue.zoo import ModelRow

FAMILIES = (core, linear, conv, norms, attention, experts, recurrent, place)
LAYERS: dict[str, LayerRow] = {name: row for family in FAMILIES for name, row in family.ROWS.items()}
OPTIMIZERS: dict[str, OptimizerRow] = optimizers.ROWS
MODELS: dict[str, ModelRow] = zoo.ROWS

__all__ = ["FLOATS", "LAYERS", "MODELS", "OPTIMIZERS", "LayerRow", "ModelRow", "OptimizerRow", "Row"]
