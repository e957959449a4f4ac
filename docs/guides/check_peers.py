"""Run the blocks of other libraries in the migration guides, and compare their outputs with those of mlax.

    python docs/guides/check_peers.py [PyTorch=python] [Flax=python] [Equinox=python] [Haiku=python] [--write]

The blocks of a library run in the Python given for it, or in this one, and are skipped if it is not installed. They
write an input, an output and weights to a small file, which the mlax blocks then read. `--write` saves the files to
docs/guides/peers, for the tests, which do not install the libraries.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.docs.blocks import blocks, run_page  # noqa: E402

PEERS = {"PyTorch": "torch", "Flax": "flax", "Equinox": "equinox", "Haiku": "haiku"}


def main(*args: str) -> int:
    """Check every library; returns the number of failures."""
    pythons = dict(arg.split("=", 1) for arg in args if "=" in arg)
    failures = 0
    for peer, package in PEERS.items():
        python = pythons.get(peer, sys.executable)
        if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
            print(f"{peer:8} not installed in {python}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            error = check_page(peer, python, Path(folder))
            if not error and "--write" in args:
                shutil.copy(Path(folder) / f"{peer.lower()}.npz", ROOT / "docs/guides/peers")
        print(f"{peer:8} {error or 'agrees'}")
        failures += bool(error)
    return failures


def check_page(peer: str, python: str, folder: Path) -> str:
    """Run the page of a library in a folder; returns the error message, or an empty string."""
    page = f"docs/guides/from-{peer.lower()}.md"
    code = "\n".join(block.code for block in blocks(page) if block.peer == peer)
    process = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True)
    if process.returncode:
        return process.stderr[-2000:]
    os.chdir(folder)
    try:
        run_page(page)
    except AssertionError as error:
        return str(error)
    finally:
        os.chdir(ROOT)
    return ""


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
