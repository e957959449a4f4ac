"""What CONTRIBUTING shows works as it stands."""

import re
import subprocess
import sys
import textwrap

from tests.docs.blocks import ROOT, blocks


def test_the_layer_of_contributing_passes_the_contract(tmp_path):
    """The ten-minute layer is added to the files that the page names, row and all, and tested against the contract."""
    named = re.findall(r"^\*\*\d\. .*?, in `(\S+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    op, layer, row, _ = (block.code for block in blocks("CONTRIBUTING.md"))
    subprocess.run(["cp", "-r", ROOT / "mlax", ROOT / "tests", ROOT / "pyproject.toml", tmp_path], check=True)
    ops_file, nn_file, catalogue = (tmp_path / file for file in named)
    for file, code, name in ((ops_file, op, "gate"), (nn_file, layer, "Gate")):
        file.write_text(f"{file.read_text()}\n\n{code}")
        door = file.parent / "__init__.py"
        module = f"mlax.{file.parent.name}.{file.stem}"
        door.write_text(f"{door.read_text()}\nfrom {module} import {name}\n__all__.append({name!r})\n")
    rows = f"ROWS = {{\n{textwrap.indent(row, '    ')}"
    catalogue.write_text(catalogue.read_text().replace("ROWS = {\n", rows))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/contract", "-k", "Gate or row", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) > 40


def test_the_optimizer_of_contributing_works(tmp_path, monkeypatch):
    import jax
    import jax.numpy as jnp

    from mlax import optim

    (tmp_path / "sign_momentum.py").write_text(blocks("CONTRIBUTING.md")[3].code)
    monkeypatch.syspath_prepend(tmp_path)
    from sign_momentum import SignMomentum  # pyright: ignore[reportMissingImports]

    optimizer = optim.ClipGlobalNorm(SignMomentum(optim.Cosine(0.1, 100), rounding=optim.MasterWeights()), 1.0)
    trainables = {"kernel": jnp.full((4, 4), 3.0, jnp.bfloat16)}
    state = optimizer.init(trainables)
    for _ in range(100):
        trainables, state = jax.jit(optimizer.update)(trainables, state, trainables)
    assert state._fields == ("step", "mean", "master")
    assert jnp.abs(trainables["kernel"]).max() < 0.2
    assert "master" in optimizer.describe(trainables)


def test_contributing_names_files_that_exist():
    named = re.findall(r"`((?:mlax|tests|docs|benchmarks)/[\w./-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    assert [file for file in named if not (ROOT / file).exists()] == []
