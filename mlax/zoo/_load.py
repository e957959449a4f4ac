"""load, save: a model in a folder as Hugging Face's transformers write it: config.json and safetensors files."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlax import files
from mlax.core import Layer, Tree, document_tuple, short_repr
from mlax.place import Plan
from mlax.zoo._bert import bert_from_config
from mlax.zoo._gpt2 import gpt2_from_config
from mlax.zoo._load_weights import load_weights
from mlax.zoo._state_dict import state_dict
from mlax.zoo._unet import unet_from_config
from mlax.zoo._vae import vae_from_config

MODELS: dict[str, Callable[[Mapping[str, Any]], Layer]] = {  # by model_type, or _class_name in diffusers' config.json
    "AutoencoderKL": vae_from_config,
    "UNet2DModel": unet_from_config,
    "bert": bert_from_config,
    "gpt2": gpt2_from_config,
    "roberta": bert_from_config,
    "xlm-roberta": bert_from_config,
}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "diffusion_pytorch_model.safetensors")
MAX_CONFIG_BYTES = 1 << 20


@document_tuple
class Loaded(NamedTuple):
    """A pretrained model and its variables."""

    model: Layer  # the description
    trainables: Tree  # the weights
    non_trainables: Tree  # the state, such as running statistics; None if there is none


def load(folder: str | os.PathLike[str], *, dtype: Any = None, plan: Plan | None = None) -> Loaded:
    """Load a pretrained model from a folder of Hugging Face's transformers: config.json and safetensors files.

    Variables keep the dtype of the file unless `dtype` is given, and are placed where `plan` says. The files may be
    untrusted: nothing in them is executed, and what is invalid raises `files.InvalidFile` or a ValueError.
    """
    path = Path(folder)
    model = _read_model(path)
    found = [path / name for name in WEIGHTS if (path / name).exists()]
    if not found:
        raise FileNotFoundError(f"load: {path} has none of {', '.join(WEIGHTS)}; save the weights as safetensors.")
    return Loaded(model, *load_weights(model, found[0], dtype=dtype, plan=plan))


def save(folder: str | os.PathLike[str], model: Layer, trainables: Tree, non_trainables: Tree = None) -> None:
    """Save a model as transformers does, for `zoo.load` and for transformers' `from_pretrained`."""
    path = Path(folder)
    config: Any = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"save: {short_repr(model)} has no config(); write zoo.state_dict(...) by files.save instead.")
    files.make_folder(os.fspath(path))
    state = state_dict(model, trainables, non_trainables)
    weight_map: Any = model
    for name in weight_map.weight_map().tied:  # transformers tie them again
        state.pop(name, None)
    files.save(path / "model.safetensors", state, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config(), indent=2) + "\n")


def _read_model(folder: Path) -> Layer:
    path = os.fspath(folder / "config.json")
    with files.safe_open(path, None) as (file, size):
        if size > MAX_CONFIG_BYTES:
            raise files.InvalidFile(f"{path}: it has {size:,} bytes, and at most {MAX_CONFIG_BYTES:,} are allowed.")
        config = files.parse_json(file.read(size), path, depth=16, items=100_000)
    kind = config.get("model_type", config.get("_class_name"))
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(f"{path}: model_type is {str(kind)[:80]!r}, but must be one of {', '.join(sorted(MODELS))}.")
    return MODELS[kind](config)
