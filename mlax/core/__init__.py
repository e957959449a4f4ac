"""The contract, combinators, wrappers, surgery and initializers: the names of `mlax` itself."""

from mlax._jax import named_key
from mlax.core._capture import Capture, call_shapes, capture
from mlax.core._chain import Chain, unstack
from mlax.core._checks import check_array, check_is_dtype, check_key, check_not_donated
from mlax.core._combinators import F, Parallel, Residual, Series
from mlax.core._composite import Composite, Sub, part_inputs
from mlax.core._display import Text, align_columns, count_of, format_bytes, function_name, print_pretty
from mlax.core._errors import (
    error_scope,
    missing_name_message,
    short_repr,
    short_signature,
    signature,
)
from mlax.core._frozen import fields_of, frozen, with_fields
from mlax.core._help import Documented, DocumentedProtocol, DType, Size, document_tuple, field_table, name_types
from mlax.core._initializers import (
    Constant,
    Identity,
    Initializer,
    Normal,
    Ones,
    Orthogonal,
    TruncatedNormal,
    Uniform,
    VarianceScaling,
    Zeros,
    glorot,
    he,
    lecun,
)
from mlax.core._layer import (
    Layer,
    Tree,
    header,
    jitted_init,
    shape_dtypes,
    variable_shapes,
)
from mlax.core._parts import check_layer, parts_of, split_parts
from mlax.core._paths import (
    EXCLUDE,
    STACKED,
    NoMatch,
    as_patterns,
    check_patterns,
    flatten_paths,
    match_paths,
    matches,
    no_match_message,
    replace_leaves,
    stacked_axes,
    unflatten_paths,
)
from mlax.core._recurrent import Cell, CompositeCell, Recurrent, unpack_sequence
from mlax.core._surgery import (
    all_layers,
    count,
    find_layers,
    freeze,
    get,
    layers,
    map_layers,
    merge,
    override,
    paths,
    rename,
    replace,
    select,
    wrap,
)
from mlax.core._tabulate import Table, print_as_table, short_summary, tabulate
from mlax.core._tied import Tie, Tied, untie
from mlax.core._wrappers import Map, Remat, Repeat, Wrapper, get_stack, init_stacked, name_stack

__all__ = [
    "Cell",
    "Chain",
    "Composite",
    "CompositeCell",
    "Constant",
    "DType",
    "F",
    "Identity",
    "Initializer",
    "Layer",
    "Map",
    "Normal",
    "Ones",
    "Orthogonal",
    "Parallel",
    "Recurrent",
    "Remat",
    "Repeat",
    "Residual",
    "Series",
    "Size",
    "Sub",
    "Tie",
    "Tied",
    "Tree",
    "TruncatedNormal",
    "Uniform",
    "VarianceScaling",
    "Wrapper",
    "Zeros",
    "all_layers",
    "capture",
    "count",
    "freeze",
    "frozen",
    "get",
    "glorot",
    "he",
    "layers",
    "lecun",
    "merge",
    "named_key",
    "override",
    "paths",
    "rename",
    "replace",
    "select",
    "stacked_axes",
    "tabulate",
    "unstack",
    "wrap",
]
name_types(globals())
