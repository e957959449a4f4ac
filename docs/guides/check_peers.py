"""Run what the guides "From ..." show of the peers, and compare their outputs with those of mlax.

    python docs/guides/check_peers.py [PyTorch=python] [Flax=python] [Equinox=python] [Haiku=python] [--write]

Each peer's blocks run in the Python that is named for it, or in this one, and are left out where the peer is not
installed. They write a small file with an input, an output and weights; the blocks of mlax then read it. `--write`
keeps the files in docs/guides/peers, for the tests, which have no peers.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.docs.blocks import blocks, run  # noqa: E402

PEERS = {"PyTorch": "torch", "Flax": "flax", "Equinox": "equinox", "Haiku": "haiku"}


def main(*words: str) -> int:
    """Check all of them; gives the number of those that failed."""
    pythons = dict(word.split("=", 1) for word in words if "=" in word)
    failed = 0
    for peer, package in PEERS.items():
        python = pythons.get(peer, sys.executable)
        if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
            print(f"{peer:8} not installed in {python}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            failure = _checked(peer, python, Path(folder))
            if not failure and "--write" in words:
                shutil.copy(Path(folder) / f"{peer.lower()}.npz", ROOT / "docs/guides/peers")
        print(f"{peer:8} {failure or 'agrees'}")
        failed += bool(failure)
    return failed


def _checked(peer: str, python: str, folder: Path) -> str:
    """What went wrong, in words, or nothing."""
    page = f"docs/guides/from-{peer.lower()}.md"
    code = "\n".join(block.code for block in blocks(page) if block.peer == peer)
    done = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-2000:]
    os.chdir(folder)
    try:
        run(page)
    except AssertionError as failure:
        return str(failure)
    finally:
        os.chdir(ROOT)
    return ""


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
