"""The examples in docstrings run and show what they print."""

import doctest
import inspect
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import mlax
from mlax import optim
from scripts.pages import format_examples, rooms

ABSTRACT = {optim.Optimizer, optim.Leafwise, optim.OptimizerWrapper, optim.Schedule}
SCOPE = {**rooms(), "jax": jax, "jnp": jnp, "math": math, "mlax": mlax, "optax": optax}
PUBLIC = {f"{page}.{name}": getattr(room, name) for page, room in rooms().items() for name in room.__all__}
WITH_EXAMPLES = {name: value for name, value in PUBLIC.items() if ">>>" in (inspect.getdoc(value) or "")}


def run_examples(name, text):
    """Run the examples of a docstring; returns what doctest reports about those that fail."""
    test = doctest.DocTestParser().get_doctest(text, dict(SCOPE), name, None, None)
    reports: list[str] = []
    doctest.DocTestRunner().run(test, out=reports.append)
    return "".join(reports)


def run_traced(name, text):
    """The same inside a trace: shapes are as they are outside of it, and nothing is compiled."""
    reports: list[str] = []
    jax.eval_shape(lambda: reports.append(run_examples(name, text)))
    return reports[0]


def test_every_layer_optimizer_and_schedule_has_an_example():
    kinds = (mlax.Layer, optim.Optimizer, optim.Schedule)
    for name, value in PUBLIC.items():
        if inspect.isclass(value) and issubclass(value, kinds) and name.startswith(("nn.", "optim.")):
            assert name in WITH_EXAMPLES or value in ABSTRACT, f"{name} has no example in its docstring"


def test_the_examples_of_docstrings_print_what_they_show():
    for name, value in WITH_EXAMPLES.items():
        text = inspect.getdoc(value)
        report = run_traced(name, text) and run_examples(name, text)  # few need values
        assert not report, report


@pytest.mark.parametrize("run", [run_examples, run_traced])
def test_an_example_that_prints_something_else_is_reported(run):
    assert "Got:\n    2" in run("example", ">>> 1 + 1\n3")
    assert "ZeroDivisionError" in run("example", ">>> 1 / 0")
    assert not run("example", ">>> jnp.ones(3).shape\n(3,)")


def test_the_site_shows_an_example_as_code_and_its_output():
    text = "A layer.\n\n>>> x = f(\n...     1)\n>>> x\n2\n\nMore."
    blocks = "```python\nx = f(\n    1)\nx\n```\n\n```text\n2\n```"
    assert format_examples(text) == f"A layer.\n\n{blocks}\n\nMore."
