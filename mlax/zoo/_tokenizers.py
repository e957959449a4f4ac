"""Tokenizers: texts to arrays of tokens, padded to few shapes, and back; of bytes, and of Hugging Face's tokenizers."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlax import files
from mlax.core import Documented, document_tuple, frozen
from mlax.zoo._load import check_folder

MAX_TOKENIZER_BYTES = 1 << 27  # the largest vocabularies, of 256,000 tokens, take a quarter of that
MAX_CONFIG_BYTES = 1 << 22
PadTo = int | Sequence[int] | None


@document_tuple
class EncodedPairs(NamedTuple):
    """Pairs of texts as tokens: the inputs of BERT."""

    tokens: np.ndarray  # (b, t) int32, padded on the right
    lengths: np.ndarray  # (b,) int32, the tokens of each row that are not padding
    segments: np.ndarray  # (b, t) int32: 0 for the first text of a pair and for padding, 1 for the second


@frozen
class ByteTokenizer(metaclass=Documented):
    """A byte tokenizer: each token, from 0 to 255, is a byte of UTF-8, so that any text is decoded without loss.

    `start` and `stop` are further tokens, from 256 on, that each encoded text starts and ends with.

    >>> tokens, lengths = zoo.ByteTokenizer().encode(["ab", "é!"], pad_to=4)
    >>> tokens.tolist(), lengths.tolist()
    ([[97, 98, 0, 0], [195, 169, 33, 0]], [2, 3])
    >>> zoo.ByteTokenizer().decode(tokens, lengths)
    ['ab', 'é!']
    """

    _: KW_ONLY
    start: int | None = None  # the token before each text; None: none
    stop: int | None = None  # the token after each text, which generation stops at; None: none
    padding: int = 0  # the token that fills rows

    def __post_init__(self):
        for name in ("start", "stop"):
            value = getattr(self, name)
            if value is not None and value < 256:
                raise ValueError(f"ByteTokenizer: {name} is {value}, which is a byte; pass 256 or more.")

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return 1 + max(255, self.padding, *(token for token in (self.start, self.stop) if token is not None))

    def encode(
        self,
        texts: Iterable[str],
        *,
        max_length: int | None = None,
        pad_to: PadTo = None,
        add_special_tokens: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts to tokens (b, t) int32, padded on the right, and lengths (b,) int32.

        Longer texts are truncated to `max_length` tokens, with `start` and `stop`, unless these are left out by
        `add_special_tokens=False`. A prompt has no `stop`: `dataclasses.replace(tokenizer, stop=None).encode(prompts)`.
        `pad_to` is the length t, or several of which t is the smallest that is long enough, so that a compiled function
        sees few shapes; None: that of the longest text.
        """
        special = (self.start, self.stop) if add_special_tokens else (None, None)
        before, after = ([] if token is None else [token] for token in special)
        room = None if max_length is None else _check_room(max_length, len(before) + len(after))
        rows = [[*before, *text.encode("utf-8", "surrogatepass")[:room], *after] for text in _check_texts(texts)]
        return _pad(rows, self.padding, pad_to)

    def decode(self, tokens: Any, lengths: Any = None) -> list[str]:
        """Texts from tokens (b, t), up to the lengths (b,) if given; bytes that are not UTF-8 become "\ufffd"."""
        rows = _rows(tokens, lengths)
        return [_decode_bytes(bytes(token for token in row if 0 <= token < 256)) for row in rows]


class Tokenizer(metaclass=Documented):
    """A tokenizer of Hugging Face's tokenizers, as `load_tokenizer` returns.

    `vocabulary` is the number of tokens; `start`, `stop` and `padding` are special tokens, the first two None if the
    tokenizer has none.
    """

    def __init__(self, backend: Any, special: dict[str, int]):
        self._backend = backend
        self.vocabulary: int = backend.get_vocab_size(with_added_tokens=True)
        self.start: int | None = special.get("start")
        self.stop: int | None = special.get("stop")
        self.padding: int = special.get("padding", special.get("stop", 0))

    def __repr__(self) -> str:
        return f"Tokenizer(vocabulary={self.vocabulary}, start={self.start}, stop={self.stop}, padding={self.padding})"

    def encode(
        self,
        texts: Iterable[str],
        *,
        max_length: int | None = None,
        pad_to: PadTo = None,
        add_special_tokens: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts to tokens (b, t) int32, padded on the right, and lengths (b,) int32.

        Longer texts are truncated to `max_length` tokens, with the special tokens that the tokenizer adds, such as
        [CLS] and [SEP] of BERT. `pad_to` is the length t, or several of which t is the smallest that is long enough,
        so that a compiled function sees few shapes; None: that of the longest text.
        """
        added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        room = None if max_length is None else _check_room(max_length, added)
        encodings = self._backend.encode_batch(_check_texts(texts), add_special_tokens=False)
        for encoding in encodings if room is not None else ():
            encoding.truncate(room)
        rows = [self._backend.post_process(each, None, add_special_tokens).ids for each in encodings]
        return _pad(rows, self.padding, pad_to)

    def encode_pairs(
        self,
        firsts: Iterable[str],
        seconds: Iterable[str],
        *,
        max_length: int | None = None,
        pad_to: PadTo = None,
    ) -> EncodedPairs:
        """Pairs of texts to tokens (b, t), lengths (b,) and segments (b, t) int32, for BERT.

        Of a pair that is too long, the longer text is truncated. The rest is as in `encode`.
        """
        added = self._backend.num_special_tokens_to_add(True)
        room = None if max_length is None else _check_room(max_length, added)
        encoded = [
            self._backend.encode_batch(_check_texts(texts), add_special_tokens=False) for texts in (firsts, seconds)
        ]
        if len(encoded[0]) != len(encoded[1]):
            raise ValueError(
                f"encode_pairs: there are {len(encoded[0])} first texts, but {len(encoded[1])} second ones."
            )
        joined = []
        for first, second in zip(*encoded, strict=True):
            if room is not None:
                _truncate_pair(first, second, room)
            joined.append(self._backend.post_process(first, second, True))
        tokens, lengths = _pad([each.ids for each in joined], self.padding, pad_to)
        segments, _ = _pad([each.type_ids for each in joined], 0, tokens.shape[1])
        return EncodedPairs(tokens, lengths, segments)

    def decode(self, tokens: Any, lengths: Any = None) -> list[str]:
        """Texts from tokens (b, t), up to the lengths (b,) if given, without special tokens."""
        return self._backend.decode_batch(_rows(tokens, lengths), skip_special_tokens=True)


def load_tokenizer(folder: str | os.PathLike[str], *, within: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load a tokenizer from the tokenizer.json of a folder of Hugging Face, by the package tokenizers.

    Nothing is downloaded. Special tokens are those of tokenizer_config.json, if there is one. Links may only lead to
    files inside the folder, or inside `within`, as in `zoo.load`.

    `tokens, lengths = zoo.load_tokenizer("folder").encode(["a text", "another"])`
    """
    path = Path(folder)
    check_folder("load_tokenizer", path)
    if not os.path.lexists(path / "tokenizer.json"):
        raise FileNotFoundError(
            f"load_tokenizer: {path} has no tokenizer.json; transformers write one by "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    backend = _read_backend(path, within)
    return Tokenizer(backend, _read_special(path, within, backend))


def _read_backend(folder: Path, within: Any) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ImportError("load_tokenizer needs the package tokenizers: pip install 'mlax[tokenizers]'.") from None
    data = _read_bounded(folder, "tokenizer.json", within, MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_str(data.decode())
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        message = f"{folder / 'tokenizer.json'}: it is not a tokenizer ({str(error)[:200]})."
        raise files.InvalidFile(message) from None
    backend.no_truncation()  # both are arguments of `encode`
    backend.no_padding()
    return backend


SPECIAL = {"start": ("bos_token", "cls_token"), "stop": ("eos_token",), "padding": ("pad_token",)}


def _read_special(folder: Path, within: Any, backend: Any) -> dict[str, int]:
    """The special tokens that tokenizer_config.json names: strings, or objects with a content."""
    if not os.path.lexists(folder / "tokenizer_config.json"):
        return {}
    data = _read_bounded(folder, "tokenizer_config.json", within, MAX_CONFIG_BYTES)
    config = files.parse_json(data, os.fspath(folder / "tokenizer_config.json"), depth=16, items=200_000)
    special: dict[str, int] = {}
    for name, keys in SPECIAL.items():
        for value in map(config.get, keys):
            content = value.get("content") if isinstance(value, dict) else value
            token = backend.token_to_id(content) if isinstance(content, str) else None
            if token is not None:
                special.setdefault(name, token)
    return special


def _read_bounded(folder: Path, name: str, within: Any, most: int) -> bytes:
    path = os.fspath(folder / name)
    with files.safe_open(path, within) as (file, size):
        if size > most:
            raise files.InvalidFile(f"{path}: it has {size:,} bytes, and at most {most:,} are allowed.")
        return file.read(size)


def _check_texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str | bytes):
        raise TypeError("encode: texts is a single text, but must be a list of them; pass [text].")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"encode: a text is a {type(text).__name__}, but must be a str.")
    return texts


def _check_room(max_length: int, added: int) -> int:
    """How many tokens of a text are left beside the special ones."""
    if max_length <= added:
        raise ValueError(f"encode: max_length is {max_length}, but {added} special tokens are added; pass more.")
    return max_length - added


def _truncate_pair(first: Any, second: Any, room: int) -> None:
    """Truncate the longer text, and then both, until they fit together."""
    if len(first) + len(second) <= room:
        return
    small = min(len(first), len(second), room // 2)
    if len(first) >= len(second):
        first.truncate(room - small)
        second.truncate(small)
    else:
        second.truncate(room - small)
        first.truncate(small)


def _pad(rows: list[list[int]], padding: int, pad_to: PadTo) -> tuple[np.ndarray, np.ndarray]:
    """Rows as one array, padded on the right, and their lengths."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), _choose_length(int(lengths.max(initial=0)), pad_to)), padding, np.int32)
    for row, target in zip(rows, tokens, strict=True):
        target[: len(row)] = row
    return tokens, lengths


def _choose_length(longest: int, pad_to: PadTo) -> int:
    if pad_to is None:
        return longest
    buckets = sorted([pad_to] if isinstance(pad_to, int) else pad_to)
    for bucket in buckets:
        if bucket >= longest:
            return bucket
    raise ValueError(
        f"encode: a text has {longest} tokens, but pad_to is {pad_to}; pass a larger one, or truncate by "
        f"max_length={buckets[-1] if buckets else longest}."
    )


def _rows(tokens: Any, lengths: Any) -> list[list[int]]:
    """The tokens of each row that are not padding."""
    rows = [np.asarray(row) for row in tokens]
    if any(row.ndim != 1 for row in rows):
        raise ValueError("decode: the tokens must be rows, (b, t); pass tokens[None] for a single one.")
    if lengths is not None:
        rows = [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]
    return [row.tolist() for row in rows]


def _decode_bytes(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")
