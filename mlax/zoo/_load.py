"""load: a model from a folder as Hugging Face's transformers write it, config.json and safetensors files."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlax import files
from mlax.core import Layer, Tree, document_tuple, with_fields
from mlax.place import Plan
from mlax.zoo._bert import bert_from_config
from mlax.zoo._convnext import convnext_from_config
from mlax.zoo._gpt2 import gpt2_from_config
from mlax.zoo._llama import llama_from_config
from mlax.zoo._load_weights import is_equal, load_weights, read_arrays
from mlax.zoo._resnet import resnet_from_config
from mlax.zoo._sentences import with_pooling
from mlax.zoo._t5 import T5, t5_from_config
from mlax.zoo._unet import unet_from_config
from mlax.zoo._vae import vae_from_config
from mlax.zoo._vit import vit_from_config

MODELS: dict[str, Callable[[Mapping[str, Any]], Layer]] = {  # by model_type, or _class_name in diffusers' config.json
    "AutoencoderKL": vae_from_config,
    "UNet2DModel": unet_from_config,
    "bert": bert_from_config,
    "convnext": convnext_from_config,
    "deit": vit_from_config,
    "gpt2": gpt2_from_config,
    "resnet": resnet_from_config,
    "roberta": bert_from_config,
    "t5": t5_from_config,
    "vit": vit_from_config,
    "xlm-roberta": bert_from_config,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3"), llama_from_config),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), llama_from_config),
}
WEIGHTS = (  # the first that the folder has
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MAX_CONFIG_BYTES = 1 << 20


@document_tuple
class Loaded(NamedTuple):
    """A pretrained model and its variables."""

    model: Layer  # the description
    trainables: Tree  # the weights
    non_trainables: Tree  # the state, such as running statistics; None if there is none


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = None,
    plan: Plan | None = None,
    within: str | os.PathLike[str] | None = None,
) -> Loaded:
    """Load a pretrained model from a folder of Hugging Face: config.json and safetensors files, or pytorch_model.bin.

        model, trainables, non_trainables = zoo.load("gpt2", dtype="bfloat16")

    Variables keep the dtype of the file unless `dtype` is given, and are placed where `plan` says, one at a time. The
    files may be untrusted: nothing in them is executed, and what is invalid raises `files.InvalidFile` or a ValueError.
    Symbolic links may only lead to files inside the folder, or inside `within`: the cache of `huggingface_hub` is made
    of links, so that `within` must be its folder models--.... A folder of sentence-transformers is a SentenceEncoder.
    """
    path = Path(folder)
    model = with_pooling(path, _read_model(path, within), within)
    found = [path / name for name in WEIGHTS if os.path.lexists(path / name)]
    if not found:
        raise FileNotFoundError(
            f"load: {path} has none of {', '.join(WEIGHTS)}; if the weights have another name, pass their path to "
            "zoo.load_weights."
        )
    model = _untie_head(model, found[0], within)
    return Loaded(model, *load_weights(model, found[0], dtype=dtype, plan=plan, within=within))


def _untie_head(model: Layer, weights: Path, within: Any) -> Layer:
    """A T5 with the output layer that its file has: transformers 5 write tie_word_embeddings: true in any case."""
    if not isinstance(model, T5) or not model.tied:
        return model
    arrays = read_arrays(weights, within)
    names = ("lm_head.weight", "shared.weight")
    is_tied = any(name not in arrays for name in names) or is_equal(*map(arrays.get, names))
    return model if is_tied else with_fields(model, tied=False)


def _read_model(folder: Path, within: Any) -> Layer:
    config = read_config("load", folder, within)
    kind = config.get("model_type", config.get("_class_name"))
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(
            f"{folder / 'config.json'}: model_type is {str(kind)[:80]!r}, but must be one of "
            f"{', '.join(sorted(MODELS))}."
        )
    return MODELS[kind](config)


def read_config(caller: str, folder: Path, within: Any) -> dict[str, Any]:
    """The config.json of a folder; `caller` is for errors."""
    check_folder(caller, folder)
    path = os.fspath(folder / "config.json")
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{caller}: {folder} has no config.json; to load weights alone, describe the model yourself, and pass it "
            "to zoo.load_weights."
        )
    with files.safe_open(path, os.fspath(within) if within is not None else None) as (file, size):
        if size > MAX_CONFIG_BYTES:
            raise files.InvalidFile(f"{path}: it has {size:,} bytes, and at most {MAX_CONFIG_BYTES:,} are allowed.")
        return files.parse_json(file.read(size), path, depth=16, items=100_000)


def check_folder(caller: str, folder: Path) -> None:
    """Raise unless there is such a folder; `caller` is for errors."""
    if folder.is_dir():
        return
    if os.path.lexists(folder):
        raise NotADirectoryError(
            f"{caller}: {folder} is not a folder; pass the one that has config.json (zoo.load_weights takes a file "
            "of weights)."
        )
    name = os.fspath(folder)
    is_hub_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None
    hint = f"; download the model of this name: hf download {name} --local-dir {folder.name}" if is_hub_name else ""
    raise FileNotFoundError(f"{caller}: there is no folder {name}{hint}.")
