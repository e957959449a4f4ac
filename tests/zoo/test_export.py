"""Exported models run elsewhere: StableHLO in a process without mlax, ONNX in onnxruntime."""

import jax
import numpy as np
import pytest
from jax import export

from mlax import zoo
from tests.docs.blocks import run_page
from tests.processes import outputs_of, start_python

PROGRAM = """
import sys
import numpy as np
from jax import export

exported = export.deserialize(open(sys.argv[1], "rb").read())
found = np.load(sys.argv[2])
for batch in (1, 3):
    logits = exported.call(found["tokens"][:batch], found["lengths"][:batch])
    np.testing.assert_allclose(logits, found["logits"][:batch], atol=1e-5)
assert "mlax" not in sys.modules
print("equal")
"""


def test_an_exported_language_model_runs_in_a_process_without_mlax(tmp_path):
    model = zoo.GPT2(vocabulary=31, positions=16, width=16, depth=2, heads=2)
    trainables, _ = model.init(jax.random.key(0), model.example_input())
    b, t = export.symbolic_shape("b, t", constraints=("t <= 16",))
    tokens, lengths = (jax.ShapeDtypeStruct(shape, "int32") for shape in ((b, t), (b,)))
    predict = jax.jit(lambda *x: model.fwd(x, trainables, inference_mode=True)[0])
    (tmp_path / "model").write_bytes(export.export(predict)(tokens, lengths).serialize())
    inputs = np.random.default_rng(0).integers(0, 31, (3, 7)).astype(np.int32), np.array([7, 3, 1], np.int32)
    np.savez(tmp_path / "x.npz", tokens=inputs[0], lengths=inputs[1], logits=predict(*inputs))
    (output,) = outputs_of(start_python("-c", PROGRAM, tmp_path / "model", tmp_path / "x.npz"))
    assert output == "equal\n"


def test_the_models_of_the_page_on_export_run_as_onnx(tmp_path, monkeypatch):
    pytest.importorskip("jax2onnx", reason="the extra onnx is not installed")
    monkeypatch.chdir(tmp_path)
    run_page("docs/guides/export.md", peer="ONNX", **run_page("docs/guides/export.md"))
