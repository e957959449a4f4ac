"""Every model of the catalogue goes to transformers or diffusers and back, by folders: bitwise, or this fails.

    python -m tests.references.check_folders .venv-references/bin/python

zoo.save writes a folder; `from_pretrained` loads it and must miss nothing; `save_pretrained` and torch.save write it
again; zoo.load must give the same model and the same weights. The second process has PyTorch, and this one has not.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(python: str) -> None:
    import jax
    import numpy as np

    from mlax import zoo
    from tests.catalogue.zoo import ROWS

    with tempfile.TemporaryDirectory() as home:
        for name, row in ROWS.items():
            if hasattr(row.model, "config"):
                shapes = jax.eval_shape(row.model.init, jax.random.key(0), row.model.example_input())
                rng = np.random.default_rng(0)
                variables = jax.tree.map(
                    lambda leaf: np.abs(rng.standard_normal(leaf.shape)).astype(leaf.dtype), shapes
                )
                zoo.save(Path(home, "mlax", name.replace(" ", "-")), row.model, *variables, max_shard_bytes=20_000)
        subprocess.run([python, "-W", "ignore", __file__, home, "--rewrite"], check=True)
        for folder in sorted(Path(home).glob("torch*/*")):
            ours, theirs = zoo.load(Path(home, "mlax", folder.name)), zoo.load(folder)
            encoder = getattr(ours.model, "encoder", ours.model)  # pooling is for sentence-transformers to write
            assert theirs.model in (ours.model, encoder), (folder, theirs.model)
            wanted, found = zoo.state_dict(*ours), zoo.state_dict(*theirs)
            assert wanted.keys() == found.keys(), folder
            assert all(wanted[key].tobytes() == found[key].tobytes() for key in wanted), folder
            print(f"{folder.parent.name}/{folder.name}: {len(wanted)} arrays are bitwise the same")


def rewrite(home: Path) -> None:
    """In the process that has PyTorch: load each folder, and write it again, as safetensors and by torch.save."""
    import diffusers
    import torch
    import torch_stub  # noqa: F401
    import transformers

    for folder in sorted((home / "mlax").iterdir()):
        config = json.loads((folder / "config.json").read_text())
        if "_class_name" in config:
            model = getattr(diffusers, config["_class_name"]).from_pretrained(folder)
        else:
            kind = getattr(transformers, config["architectures"][0])
            model, loading = kind.from_pretrained(folder, output_loading_info=True)
            missing = {name for name in loading["missing_keys"] if not name.startswith("pooler.")}  # BERT's, optional
            assert not missing and not loading["unexpected_keys"], (folder.name, loading)
            target = home / "torch" / folder.name
            target.mkdir(parents=True)
            (target / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
            torch.save(model.state_dict(), target / "pytorch_model.bin")
        model.save_pretrained(home / "torch-safetensors" / folder.name)


if __name__ == "__main__":
    if "--rewrite" in sys.argv:
        rewrite(Path(sys.argv[1]))
    else:
        main(sys.argv[1])
