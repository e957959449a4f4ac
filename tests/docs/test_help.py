"""What `help()` shows of every public name: at most a screen, with named types, and no machinery."""

import dataclasses
import importlib
import inspect
import pydoc

import jax
import pytest

import mlax
from mlax import nn, optim, place, train
from mlax.core import Documented, field_table

ROOMS = ("", ".nn", ".ops", ".optim", ".place", ".train", ".inspect", ".dtypes", ".files", ".zoo")
COLUMNS, LINES = 120, 60  # a screen
PRIVATE = ("jax._src", "jaxlib.", "typing.", "Annotated", "mlax.", "edits", "<function", "<PjitFunction")


def public_names():
    """(name, value) of every public class, function and alias; help of a module is all that it holds."""
    for room in ROOMS:
        module = importlib.import_module(f"mlax{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                yield f"mlax{room}.{name}", value


NAMES = dict(public_names())
CLASSES = {name: value for name, value in NAMES.items() if isinstance(value, type)}


def help_text(value):
    return pydoc.render_doc(value, renderer=pydoc.plaintext)


def screen_lines(text):
    return sum(max(1, -(-len(line) // COLUMNS)) for line in text.rstrip().splitlines())


def test_help_of_every_public_name_fits_a_screen():
    long = {name: lines for name, value in NAMES.items() if (lines := screen_lines(help_text(value))) > LINES}
    assert not long


def test_signatures_name_types_as_users_import_them():
    for name, value in NAMES.items():
        try:
            signature = str(inspect.signature(value))
        except (TypeError, ValueError):  # an alias, or an exception of Python's
            continue
        assert not [word for word in PRIVATE if word in signature], f"{name}{signature}"


def test_help_of_a_layer_is_its_signature_its_docstring_and_a_line_for_each_field():
    text = help_text(nn.Linear)
    assert "Linear(features: Size, *, bias: bool = True, kernel_init: Initializer = VarianceScaling()" in text
    assert "precision: PrecisionLike = None, accum_dtype: DType = None" in text
    lines = [line.removeprefix(" |  ") for line in text.splitlines()]
    first = lines.index("Fields:") + 1
    names = [field.name for field in dataclasses.fields(nn.Linear)]
    assert [line.strip().split(":")[0] for line in lines[first : first + len(names)]] == names
    assert lines[first + len(names)] == "Methods of mlax.Layer: init, fwd"
    for machinery in ("__eq__", "__reduce__", "__dataclass_fields__", "check_variables", "has_statistics"):
        assert machinery not in text


def test_every_field_of_a_description_has_a_meaning():
    for name, value in CLASSES.items():
        table = field_table(value) if isinstance(value, Documented) else ""
        for line in table.splitlines()[1:]:
            assert "  " in line.strip(), f"{name}: put a comment behind the field: {line.strip()}"


def test_fields_are_in_the_order_of_the_constructor():
    table = inspect.getdoc(optim.AdamW).partition("Fields:\n")[2]
    order = [line.strip().split(":")[0] for line in table.splitlines()[:10]]
    assert order == ["rate", "b1", "b2", "eps", "decay", "decayed", "accum_dtype", "slot_dtypes", "rounding", "stacked"]


@mlax.frozen
class Gate(mlax.Layer):
    width: mlax.Size  # of the gate
    scale: float = 1.0

    def init(self, rng, x):
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return self.scale * x, non_trainables


def test_a_class_of_a_user_is_documented_by_the_comments_on_its_fields():
    assert inspect.getdoc(Gate).splitlines() == [
        "Fields:",
        "    width: Size         of the gate",
        "    scale: float = 1.0",
        "Methods of mlax.Layer: init, fwd",
    ]
    assert str(inspect.signature(Gate)) == "(width: Size, scale: float = 1.0)"


def test_a_class_without_source_has_a_signature_and_no_comments():
    names = {"mlax": mlax, "__name__": "typed_in"}
    exec(
        "@mlax.frozen\nclass Typed(mlax.Series):\n    number: int = 3\n    def __init__(self): super().__init__()",
        names,
    )
    exec("@mlax.frozen\nclass Width(mlax.Tie):\n    width: mlax.Size = 3\n    dtype: mlax.DType = None", names)
    assert "width: Size = 3, dtype: DType = None" in str(inspect.signature(names["Width"]))


def test_completion_does_not_offer_what_only_surgery_sets():
    block = mlax.Residual(nn.Linear(3))
    assert {"layer", "shortcut", "init", "fwd"} <= set(dir(block))
    assert "edits" not in dir(block)
    assert "edits" not in dir(mlax.Residual)


@pytest.mark.parametrize(
    "kind", [train.TrainState, train.Fitted, optim.Slot, place.ProcessInfo], ids=lambda kind: kind.__name__
)
def test_a_documented_named_tuple_is_still_one(kind):
    made = kind(*range(len(kind._fields)))
    assert isinstance(kind, Documented)
    assert type(made._replace(**{kind._fields[0]: 7})) is kind
    assert made._asdict() == dict(zip(kind._fields, range(len(kind._fields)), strict=True))
    leaves, treedef = jax.tree.flatten(made)
    assert jax.tree.unflatten(treedef, leaves) == made
    assert getattr(inspect.getmodule(kind), kind.__name__) is kind  # so that it can be pickled
