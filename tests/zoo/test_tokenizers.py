import json
import os
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from mlax import files, zoo

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with seven words and the special tokens of BERT."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "red", "fox", "runs", "##ning", "."]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.add_special_tokens(words[:4])
    special = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    backend.enable_padding(length=99)
    backend.enable_truncation(3)
    path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(path / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "cls_token": {"content": "[CLS]"}, "eos_token": "[SEP]", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return zoo.load_tokenizer(folder)


@hypothesis.given(strategies.lists(strategies.text(strategies.characters(), max_size=20), max_size=4))
def test_any_text_is_encoded_as_bytes_and_decoded_without_loss(texts):
    for tokenizer in (zoo.ByteTokenizer(), zoo.ByteTokenizer(start=256, stop=257, padding=258)):
        tokens, lengths = tokenizer.encode(texts)
        assert tokens.dtype == lengths.dtype == np.int32 and tokens.max(initial=0) < tokenizer.vocabulary
        assert tokenizer.decode(tokens, lengths) == texts
    assert tokenizer.decode(tokens) == texts  # without lengths, since this padding is not a byte


def test_bytes_start_and_stop_with_the_special_tokens_that_are_given_also_if_truncated():
    tokenizer = zoo.ByteTokenizer(start=256, stop=300)
    assert zoo.ByteTokenizer().vocabulary == 256 and tokenizer.vocabulary == 301
    tokens, lengths = tokenizer.encode(["abc", ""], max_length=4)
    assert tokens.tolist() == [[256, 97, 98, 300], [256, 300, 0, 0]] and lengths.tolist() == [4, 2]
    assert tokenizer.encode(["abc"], max_length=2, add_special_tokens=False)[0].tolist() == [[97, 98]]
    assert zoo.ByteTokenizer().decode([[0xE9, 65]]) == ["\ufffdA"]
    with pytest.raises(ValueError, match="stop is 10, which is a byte; pass 256 or more"):
        zoo.ByteTokenizer(stop=10)


def test_texts_are_padded_and_truncated_as_asked_and_not_as_the_file_says(tokenizer):
    assert (tokenizer.vocabulary, tokenizer.start, tokenizer.stop, tokenizer.padding) == (10, 2, 3, 0)
    tokens, lengths = tokenizer.encode(["the red fox runs.", "fox"])
    assert tokens.tolist() == [[2, 4, 5, 6, 7, 9, 3], [2, 6, 3, 0, 0, 0, 0]] and lengths.tolist() == [7, 3]
    assert tokenizer.decode(tokens, lengths) == tokenizer.decode(tokens) == ["the red fox runs.", "fox"]
    tokens, lengths = tokenizer.encode(["the red fox runs.", "fox"], max_length=5, pad_to=(4, 16, 8))
    assert tokens.shape == (2, 8) and tokens[0].tolist() == [2, 4, 5, 6, 3, 0, 0, 0] and lengths.tolist() == [5, 3]
    tokens, _ = tokenizer.encode(["the fox"], add_special_tokens=False)
    assert tokens.tolist() == [[4, 6]]
    assert tokenizer.encode([])[0].shape == (0, 0)


def test_pairs_of_texts_have_segments_and_the_longer_text_is_truncated(tokenizer):
    tokens, lengths, segments = tokenizer.encode_pairs(["fox", "the"], ["the red fox runs", "red"], pad_to=8)
    assert tokens.tolist() == [[2, 6, 3, 4, 5, 6, 7, 3], [2, 4, 3, 5, 3, 0, 0, 0]]
    assert segments.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0]] and lengths.tolist() == [8, 5]
    for first, second, wanted in (
        ("fox", "the red fox runs", [2, 6, 3, 4, 5, 6, 3]),
        ("the red fox runs", "fox", [2, 4, 5, 6, 3, 6, 3]),
        ("the red fox runs", "the red fox runs", [2, 4, 5, 3, 4, 5, 3]),
    ):
        assert tokenizer.encode_pairs([first], [second], max_length=7).tokens.tolist() == [wanted]
    with pytest.raises(ValueError, match="there are 1 first texts, but 2 second ones"):
        tokenizer.encode_pairs(["fox"], ["the", "red"])


def test_mistakes_are_answered_with_what_to_do(tokenizer):
    with pytest.raises(TypeError, match=r"texts is a single text, but must be a list of them; pass \[text\]"):
        tokenizer.encode("fox")
    with pytest.raises(TypeError, match="a text is a bytes, but must be a str"):
        tokenizer.encode([b"fox"])
    with pytest.raises(ValueError, match=r"a text has 7 tokens, but pad_to is 4; .* max_length=4"):
        tokenizer.encode(["the red fox runs."], pad_to=4)
    with pytest.raises(ValueError, match="max_length is 2, but 2 special tokens are added"):
        tokenizer.encode(["fox"], max_length=2)
    with pytest.raises(ValueError, match=r"must be rows, \(b, t\)"):
        tokenizer.decode(np.array([2, 6, 3]))


def test_a_missing_package_is_answered_with_the_command_that_installs_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'mlax\[tokenizers\]'"):
        zoo.load_tokenizer(folder)


def test_files_that_are_missing_too_large_invalid_or_outside_of_the_folder_are_refused(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json; .*save_pretrained"):
        zoo.load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for text in ("{", "[]", '{"model": {"type": "BPE"}}', "[" * 100_000, "\0", '{"version": "1.0"}'):
        path.write_text(text)
        with pytest.raises(files.InvalidFile, match="it is not a tokenizer"):
            zoo.load_tokenizer(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(files.InvalidFile, match="it is not a tokenizer"):
        zoo.load_tokenizer(tmp_path)
    with path.open("wb") as file:
        file.truncate(1 << 28)  # a hole: it takes no space
    with pytest.raises(files.InvalidFile, match="134,217,728 are allowed"):
        zoo.load_tokenizer(tmp_path)
    path.unlink()
    os.symlink(folder / "tokenizer.json", path)
    with pytest.raises(files.InvalidFile, match="a link that leads out of"):
        zoo.load_tokenizer(tmp_path)
