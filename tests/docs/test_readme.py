"""What the README and CONTRIBUTING show works as it stands."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page):
    text = (ROOT / page).read_text()
    return [textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.S | re.M)]


def test_the_quickstart_runs_as_it_stands_and_learns(tmp_path):
    quickstart = blocks("README.md")[0]
    assert len(quickstart.strip().splitlines()) < 30
    script = tmp_path / "quickstart.py"
    script.write_text(quickstart)
    run = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=True)
    loss = float(re.search(r"loss ([0-9.]+)", run.stdout).group(1))
    assert loss < 0.05
    assert "'hidden': {'bias': (32,), 'kernel': (1, 32)}" in run.stdout


def test_the_block_of_the_readme_runs():
    import jax
    import jax.numpy as jnp

    import mlax
    from mlax import nn

    scope = {"mlax": mlax, "nn": nn, "jax": jax}
    exec(blocks("README.md")[1], scope)
    x = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    trainables, _ = jax.eval_shape(scope["model"].init, jax.random.key(0), x)
    assert mlax.get(trainables, "blocks/up/kernel").shape == (12, 64, 256)


def test_the_training_of_the_readme_learns_and_resumes(tmp_path, monkeypatch):
    import jax
    import jax.numpy as jnp

    import mlax
    from mlax import nn, optim

    monkeypatch.chdir(tmp_path)
    model = mlax.Series(hidden=nn.Linear(32), tanh=mlax.F(jnp.tanh), head=nn.Linear(1))
    scope = {"model": model, "optim": optim, "jax": jax, "jnp": jnp, "x": jnp.linspace(-3, 3, 256)[:, None]}
    exec(blocks("README.md")[2], scope)
    assert scope["result"].scores["loss"] < 0.1
    again = dict(scope)
    exec(blocks("README.md")[2], again)
    assert again["result"].scores == scope["result"].scores


def test_the_layer_of_contributing_keeps_its_word(tmp_path):
    """The ten-minute layer is put where the page says, row and all, and held to the contract."""
    ops_file, layer_file, row, _ = blocks("CONTRIBUTING.md")
    subprocess.run(["cp", "-r", ROOT / "mlax", ROOT / "tests", ROOT / "pyproject.toml", tmp_path], check=True)
    (tmp_path / "mlax/ops/_gate.py").write_text(ops_file)
    (tmp_path / "mlax/nn/_gate.py").write_text(layer_file)
    for room, name in (("ops", "gate"), ("nn", "Gate")):
        door = tmp_path / "mlax" / room / "__init__.py"
        door.write_text(door.read_text() + f"\nfrom mlax.{room}._gate import {name}\n__all__.append({name!r})\n")
    catalogue = tmp_path / "tests/catalogue/first.py"
    catalogue.write_text(catalogue.read_text().replace("ROWS = {\n", f"ROWS = {{\n{textwrap.indent(row, '    ')}"))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/contract", "-k", "Gate or row", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) > 40


def test_the_optimizer_of_contributing_keeps_its_word(tmp_path, monkeypatch):
    import jax
    import jax.numpy as jnp

    from mlax import optim

    (tmp_path / "sign_sgd.py").write_text(blocks("CONTRIBUTING.md")[3])
    monkeypatch.syspath_prepend(tmp_path)
    from sign_sgd import SignSGD  # pyright: ignore[reportMissingImports]

    optimizer = optim.ClipGlobalNorm(SignSGD(optim.Cosine(0.1, 100), rounding=optim.Master()), 1.0)
    trainables = {"kernel": jnp.full((4, 4), 3.0, jnp.bfloat16)}
    state = optimizer.init(trainables)
    for _ in range(100):
        trainables, state = jax.jit(optimizer.update)(trainables, state, trainables)
    assert state._fields == ("step", "mean", "master")
    assert jnp.abs(trainables["kernel"]).max() < 0.2
    assert "master" in optimizer.describe(trainables)
