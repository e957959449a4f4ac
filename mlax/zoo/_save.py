"""save: a model in a folder as Hugging Face's transformers write it, config.json and safetensors files."""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlax import files
from mlax.core import Layer, Tree, check_not_donated, flatten_paths, short_repr, variable_shapes
from mlax.zoo._load import MODELS, read_config
from mlax.zoo._sentences import SentenceEncoder, write_pooling
from mlax.zoo._state_dict import StateEntry, choose_weight_map, state_entries
from mlax.zoo._weights import find_described

OURS = {"architectures", "dtype", "torch_dtype", "quantization_config"}  # entries that say what the weights are
COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
MAX_COPIED_BYTES = 1 << 27  # of each
MAX_ENTRIES = 1000  # of a config.json
_WEIGHTS = re.compile(r"(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save(
    folder: str | os.PathLike[str],
    model: Layer,
    trainables: Tree,
    non_trainables: Tree = None,
    *,
    max_shard_bytes: int = 5 << 30,
    like: str | os.PathLike[str] | None = None,
    within: str | os.PathLike[str] | None = None,
) -> None:
    """Save a model as transformers and diffusers do, for `zoo.load` and for their `from_pretrained`.

    The folder gets config.json and model.safetensors; a model of more than `max_shard_bytes` gets several files, each
    of at most that size unless it is one array, and their index. Arrays are written one at a time. A model that is in
    the folder already is replaced when all files of the new one are complete; other files are kept.

    `like` is the folder that the model was loaded from: its tokenizer files and generation_config.json are copied, and
    so are entries of its config.json that a description does not have, such as eos_token_id. `within`: as in `load`.
    """
    described: Any = find_described(model)
    if not hasattr(described, "config"):
        raise TypeError(f"save: {short_repr(model)} has no config(); write zoo.state_dict(...) by files.save instead.")
    check_not_donated("save", trainables=trainables, non_trainables=non_trainables)
    leaves = {**flatten_paths(trainables), **flatten_paths(non_trainables)}
    weight_map = choose_weight_map(model, None)
    _check_complete(model, described.example_input(), leaves)
    config = described.config()
    copies = {}
    if like is not None:
        config = _add_entries(config, read_config("save", Path(like), within), like)
        copies = _read_copies(Path(like), within)
    stem = "diffusion_pytorch_model" if "_class_name" in config else "model"  # of diffusers and of transformers
    shards = _shard_names(stem, _group(list(state_entries(weight_map, leaves)), leaves, max_shard_bytes))
    folder = os.fspath(folder)
    files.make_folder(folder)
    with _temporary_folder(folder) as temporary:
        for name, shard in shards.items():
            arrays = {entry.name: _lazy(entry, leaves) for entry in shard}
            files.save_lazily(os.path.join(temporary, name), arrays, {"format": "pt"})
        if len(shards) > 1:
            _write_json(os.path.join(temporary, f"{stem}.safetensors.index.json"), _index(shards, leaves))
        _write_json(os.path.join(temporary, "config.json"), config)
        for name, data in copies.items():
            files.write_synced(os.path.join(temporary, name), [data])
        _replace_files(temporary, folder)
    if isinstance(described, SentenceEncoder):
        write_pooling(folder, described)


def _add_entries(config: dict[str, Any], original: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """The configuration with all entries of another one that do not make it that of another model."""
    kind = "_class_name" if "_class_name" in config else "model_type"
    name, wanted = original.get(kind), config.get(kind)
    if name != wanted:
        raise ValueError(
            f"save: like={os.fspath(like)!r} has a {kind} of {str(name)[:80]!r}, but the model is {wanted!r}; pass the "
            "folder that it was loaded from."
        )
    if len(original) > MAX_ENTRIES:
        raise files.InvalidFile(
            f"{like}: config.json has {len(original):,} entries, and at most {MAX_ENTRIES:,} are allowed."
        )
    read = MODELS.get(str(wanted), lambda config: None)
    model = read(config)
    for entry, value in original.items():
        added = config if entry in OURS else {**config, entry: value}
        with contextlib.suppress(ValueError, TypeError):  # of an entry that this model does not support
            config = added if read(added) == model else config
    return config


def _read_copies(folder: Path, within: Any) -> dict[str, bytes]:
    copies = {}
    for name in COPIED:
        path = os.fspath(folder / name)
        if os.path.lexists(path):
            with files.safe_open(path, within) as (file, size):
                if size > MAX_COPIED_BYTES:
                    raise files.InvalidFile(
                        f"{path}: it has {size:,} bytes, and at most {MAX_COPIED_BYTES:,} are allowed."
                    )
                copies[name] = file.read(size)
    return copies


def _check_complete(model: Layer, x: Any, leaves: Mapping[str, Any]) -> None:
    wanted = {path: leaf.shape for tree in variable_shapes(model, x) for path, leaf in flatten_paths(tree).items()}
    found = {path: leaf.shape for path, leaf in leaves.items()}
    if others := sorted(dict(wanted.items() ^ found.items())):
        raise ValueError(
            f"save: {short_repr(model)} and the variables differ in {', '.join(others[:5])}; pass those that its init "
            "or zoo.load returns, both trainables and non_trainables, with adapters merged."
        )


def _group(entries: list[StateEntry], leaves: Mapping[str, Any], most: int) -> list[list[StateEntry]]:
    """Consecutive entries of at most this many bytes, or one."""
    shards: list[list[StateEntry]] = [[]]
    size = 0
    for entry in entries:
        nbytes = entry.nbytes(leaves)
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += nbytes
    return shards


def _shard_names(stem: str, shards: list[list[StateEntry]]) -> dict[str, list[StateEntry]]:
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{at:05}-of-{len(shards):05}.safetensors": shard for at, shard in enumerate(shards, 1)}


def _lazy(entry: StateEntry, leaves: Mapping[str, Any]) -> files.LazyArray:
    return files.LazyArray(entry.dtype(leaves), entry.shape(leaves), lambda: entry.read(leaves))


def _index(shards: Mapping[str, list[StateEntry]], leaves: Mapping[str, Any]) -> dict[str, Any]:
    total = sum(entry.nbytes(leaves) for shard in shards.values() for entry in shard)
    names = {entry.name: file for file, shard in shards.items() for entry in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}


def _write_json(path: str, value: Any) -> None:
    files.write_synced(path, [json.dumps(value, indent=2).encode() + b"\n"])


@contextlib.contextmanager
def _temporary_folder(folder: str) -> Iterator[str]:
    temporary = os.path.join(folder, f".save-{secrets.token_hex(8)}")
    os.mkdir(temporary)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_files(temporary: str, folder: str) -> None:
    """Move the files into the folder, without a config.json meanwhile: new weights never meet an old configuration."""
    new = os.listdir(temporary)
    old = [name for name in os.listdir(folder) if _WEIGHTS.fullmatch(name) and name not in new]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "config.json"))
    for name in old:
        os.unlink(os.path.join(folder, name))
    for name in sorted(new, key=lambda name: name == "config.json"):
        os.replace(os.path.join(temporary, name), os.path.join(folder, name))
    files.fsync_folder(folder)
