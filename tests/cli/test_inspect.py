"""mlax inspect prints the summary of the model that a file builds, and explains what is missing."""

import sys

import pytest

from mlax.cli import main

MODEL = """
import jax
import jax.numpy as jnp
import mlax
from mlax import nn

model = mlax.Series(up=nn.Linear(32), act=jax.nn.gelu, head=nn.Linear(4))

def build():
    return model, jnp.zeros((8, 16))

def alone():
    return model

def sized(width):
    return nn.Linear(width)

def pair():
    return mlax.F(lambda inputs: inputs[0] * inputs[1].astype("float32"))

def plain():
    def double(x):
        with jax.named_scope("first"):
            return x @ x
    return double, jnp.ones((8, 8))

def number():
    return 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def test_the_summary_of_a_model_is_printed(file, capsys):
    assert main(["inspect", f"{file}:build"]) == 0
    printed = capsys.readouterr().out
    assert "up: Linear(32)" in printed and "float32[8, 16]" in printed and "676 parameters" in printed
    assert main(["inspect", f"{file}:alone", "--shape", "4,16", "--dtype", "bfloat16", "--inference"]) == 0
    printed = capsys.readouterr().out
    assert "bfloat16[4, 16]" in printed and printed.endswith("0 backward\n")
    assert main(["inspect", f"{file}:model", "--shape", "(2, 3, 16)"]) == 0  # a variable
    assert (
        main(["inspect", f"{file}:pair", "--shape", "8", "--shape", "8", "--dtype", "float32", "--dtype", "int32"]) == 0
    )


def test_a_report_is_written_and_plain_functions_show_their_cost(file, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["inspect", f"{file}:plain", "--report", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "first" in printed and "FLOPs/byte" in printed and printed.endswith(f"wrote {page}\n")
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("{file}", [], r"add the name of a function of that file: mlax inspect .*model\.py:build"),
        ("{file}:bild", [], r"has no 'bild'; there is build\."),
        ("nowhere.py:build", [], r"there is no file nowhere\.py"),
        ("{file}:sized", [], r"sized needs width; write a function without parameters"),
        ("{file}:number", [], r"gives 3, but must give a model"),
        ("{file}:alone", [], r"gives a model without an input; pass the shape of one: --shape"),
        ("{file}:alone", ["--shape", "8xx"], r"--shape 8xx is not a shape"),
        ("{file}:alone", ["--shape", "8", "--dtype", "float33"], r"--dtype float33 is not a dtype"),
        ("{file}:alone", ["--shape", ""], r"the input is a scalar"),
        ("{file}:plain", ["--shape", "8"], r"builds a function, not a model"),
    ],
)
def test_what_is_missing_is_said(file, target, options, message):
    with pytest.raises(SystemExit, match=message):
        main(["inspect", target.format(file=file), *options])
