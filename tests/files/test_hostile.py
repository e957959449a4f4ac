"""Hostile files: each is rejected with a reason, before anything large is read or allocated."""

import inspect
import json
import os
import tracemalloc

import jax
import numpy as np
import pytest

from mlax import files


def file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ONE = json.dumps(entry()).encode()
LONG = {"a": entry(shape=[1] * 33)}
HOSTILE = {
    "empty": (b"", "not a safetensors file"),
    "short": (b"\1\0\0", "not a safetensors file"),
    "something else": (b"PK\3\4" + b"x" * 200, "not a safetensors file"),
    "duplicate keys": (file(b'{"a":' + ONE + b',"a":' + ONE + b"}", b"1234"), "duplicate key 'a'"),
    "duplicate field": (
        file(b'{"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}', b"1234"),
        "duplicate key",
    ),
    "parent folder": (file({"../../x": entry()}, b"1234"), "not a plain path"),
    "an absolute path": (file({"/etc/x": entry()}, b"1234"), "not a plain path"),
    "NUL": (file({"a\0b": entry()}, b"1234"), "control character"),
    "empty name": (file({"": entry()}, b"1234"), "0 characters"),
    "long name": (file({"a" * 5000: entry()}, b"1234"), "5,000 characters"),
    "a name of 65 parts": (file({"/".join("a" * 65): entry()}, b"1234"), "has 65 parts, and at most 64"),
    "lone surrogate": (file(b'{"\\ud800":' + ONE + b"}", b"1234"), "control character"),
    "leaf and branch": (file({"a": entry(), "a/b": entry(offsets=(4, 8))}, b"12345678"), "is below 'a'"),
    "overlap": (file({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"), "overlaps the array before it"),
    "the same bytes twice": (file({"a": entry(), "b": entry()}, b"1234"), "overlaps the array before it"),
    "out of range": (file({"a": entry(offsets=(0, 4)), "b": entry(offsets=(4, 8))}, b"1234"), "ends at byte"),
    "far out of range": (file({"a": entry(shape=(2**40,), offsets=(0, 2**42))}, b"1234"), "ends at byte"),
    "offsets that decrease": (file({"a": entry(offsets=(4, 0))}, b"1234"), "not a start and a stop"),
    "negative": (file({"a": entry(offsets=(-4, 0))}, b"1234"), "not a start and a stop"),
    "gap": (file({"a": entry(), "b": entry(offsets=(8, 12))}, b"123456789012"), "there is a gap before it"),
    "gap at the beginning": (file({"a": entry(offsets=(4, 8))}, b"12345678"), "there is a gap before it"),
    "more bytes than arrays": (file({"a": entry()}, b"12345678"), "but the file has"),
    "fewer bytes than arrays": (file({"a": entry()}, b"123"), "truncated"),
    "header of 200 MB": (file({}, length=200 << 20), "not a safetensors file"),
    "shape overflow": (file({"a": entry(shape=(2**62, 4), offsets=(0, 0))}), "larger than any memory"),
    "shape overflow to nothing": (file({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}), "larger than any memory"),
    "empty but huge": (file({"a": entry(shape=(0, 2**62, 8), offsets=(0, 0))}), "larger than any memory"),
    "length of 2^64": (file({"a": entry(shape=(2**64,))}, b"1234"), "lengths"),
    "negative length": (file({"a": entry(shape=(-1, -1))}, b"1234"), "lengths"),
    "a boolean length": (file({"a": entry(shape=(True,))}, b"1234"), "lengths"),
    "a length of 1.0": (file({"a": entry(shape=(1.0,))}, b"1234"), "lengths"),
    "33 axes": (file(LONG, b"1234"), "at most 32"),
    "wrong byte count": (file({"a": entry(shape=(2,))}, b"1234"), "takes 8 bytes"),
    "unknown dtype": (file({"a": entry(dtype="F33")}, b"1234"), "its dtype is 'F33'"),
    "dtype of four bits": (file({"a": entry(dtype="F4", shape=(8,))}, b"1234"), "its dtype is 'F4'"),
    "dtype that is a list": (file({"a": entry(dtype=["F32"])}, b"1234"), "its dtype is"),
    "an extra field": (file({"a": {**entry(), "pickle": "x"}}, b"1234"), "its fields are not"),
    "an entry that is a number": (file({"a": 7}), "its fields are not"),
    "a boolean of 7": (file({"a": entry("BOOL", (4,))}, b"\0\1\7\0"), "boolean but contains 7"),
    "metadata that are numbers": (file({"__metadata__": {"a": 1}}), "not a dict of strings"),
    "metadata that are a list": (file({"__metadata__": []}), "not a dict of strings"),
    "deep JSON": (file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested more than 3"),
    "deep JSON that is not closed": (file(b'{"a":' + b'[{"a":' * 100_000), "nested more than 3"),
    "JSON that is a list": (file(b"[]"), "not an object"),
    "invalid JSON": (file(b"{" + b'"' * 10_001), "cannot be parsed"),
    "not UTF-8": (file(b'{"\xff\xfe": 1}'), "cannot be parsed"),
    "NaN": (file(b'{"a": NaN}'), "NaN is not valid JSON"),
    "a number of 5,000 digits": (file(b'{"a": ' + b"9" * 5000 + b"}"), "cannot be parsed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_rejected_with_a_reason(name, tmp_path):
    content, words = HOSTILE[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(files.InvalidFile, match=words) as error:
        files.load(path)
    assert str(path) in str(error.value)


def test_a_header_of_200_mb_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((200 << 20).to_bytes(8, "little"))
    os.truncate(path, (200 << 20) + 8)  # a sparse file
    tracemalloc.start()
    with pytest.raises(files.InvalidFile, match="209,715,200 bytes"):
        files.load(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_million_arrays_are_rejected(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    one = b':{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    path.write_bytes(file(b"{" + b'"a"' + one + (b',"a"' + one) * 999_999 + b"}"))
    with pytest.raises(files.InvalidFile, match="are allowed"):
        files.load(path)
    monkeypatch.setattr(inspect.getmodule(files.read_header), "MAX_ARRAYS", 1000)
    path.write_bytes(file(b"{" + b",".join(b'"%d"' % number + one for number in range(1001)) + b"}"))
    with pytest.raises(files.InvalidFile, match="1,001 arrays"):
        files.load(path)


def peak_of_rejecting(path, words):
    """The most bytes that Python and NumPy allocated while the file was rejected."""
    tracemalloc.start()
    with pytest.raises(files.InvalidFile, match=words):
        files.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


EMPTY = b':{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    "words, header",
    [
        (r"its names have 1,524,000 parts, and at most 1,000,000 are allowed", lambda: names_of_parts(3000, 508)),
        (r"has 508 parts", lambda: names_of_parts(1000, 508)),
        (r"it has 10,001 metadata, and at most 10,000", lambda: metadata_entries(10_001)),
        (r"JSON has 5,000,001 values, and at most 1,200,000", lambda: metadata_entries(2_500_000)),
        (
            r"JSON has 3,000,000 values, and at most 1,200,000",
            lambda: b'{"a":[' + b",".join([b"1"] * 3_000_000) + b"]}",
        ),
    ],
)
def test_a_header_cannot_exhaust_memory(words, header, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file(header()))
    assert peak_of_rejecting(path, words) < 1 << 27


def names_of_parts(count, parts):
    lists = (b'"' + b"/".join([b"%d" % number] + [b"a"] * (parts - 1)) + b'"' + EMPTY for number in range(count))
    return b"{" + b",".join(lists) + b"}"


def metadata_entries(count):
    return b'{"__metadata__":{' + b",".join(b'"%x":""' % number for number in range(count)) + b"}}"


def sparse_file(path, dtype, length, offset=0):
    """A file of one array of `length` bytes that takes no space, whose data start at a multiple of 8, plus `offset`."""
    itemsize = np.dtype(dtype).itemsize
    name = {"bool": "BOOL", "float32": "F32"}[dtype]
    header = json.dumps({"a": entry(name, (length // itemsize,), (0, length))}).encode()
    header += b" " * (-len(header) % 8 + offset)
    path.write_bytes(file(header))
    os.truncate(path, len(header) + 8 + length)
    return len(header) + 8


def test_a_sparse_terabyte_of_booleans_is_not_scanned_but_what_it_stores_is(tmp_path):
    path = tmp_path / "x.safetensors"
    start = sparse_file(path, "bool", 1 << 40)
    array = files.load(path)["a"]
    assert array.nbytes == 1 << 40 and not array[-1]
    for at in (0, 1 << 39, (1 << 40) - 1):
        start = sparse_file(path, "bool", 1 << 40)
        with path.open("r+b") as written:
            written.seek(start + at)
            written.write(b"\7")
        with pytest.raises(files.InvalidFile, match="boolean but contains 7"):
            files.load(path)


def test_booleans_are_scanned_in_full_where_holes_cannot_be_found(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    start = sparse_file(path, "bool", 1 << 20)
    with path.open("r+b") as written:
        written.seek(start + 70_000)
        written.write(b"\2")
    monkeypatch.delattr(os, "SEEK_DATA")
    with pytest.raises(files.InvalidFile, match="boolean but contains 2"):
        files.load(path)


def test_unaligned_arrays_are_not_copied(tmp_path):
    path = tmp_path / "x.safetensors"
    start = sparse_file(path, "float32", 1 << 40, offset=1)
    with path.open("r+b") as written:
        written.seek(start + 4)
        written.write(np.float32(2.5).tobytes())
    array = files.load(path)["a"]
    assert not array.flags.owndata and not array.flags.aligned
    assert np.asarray(jax.device_put(array[:3])).tolist() == [0, 2.5, 0]


def test_the_headers_of_an_index_are_bounded_together(tmp_path, monkeypatch):
    files.save(tmp_path / "0.safetensors", {"a": np.ones(3)})
    weight_map = {}
    for number in range(1, 20):  # one file many times costs nothing to send
        (tmp_path / f"{number}.safetensors").symlink_to("0.safetensors")
        weight_map[f"a{number}"] = f"{number}.safetensors"
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": weight_map}))
    monkeypatch.setattr(inspect.getmodule(files.load), "MAX_INDEX_HEADER_BYTES", 500)
    with pytest.raises(files.InvalidFile, match="the headers of its files have more than 500 bytes"):
        files.load(tmp_path / "index.json")


def test_every_truncated_file_is_rejected(tmp_path):
    path = tmp_path / "x.safetensors"
    files.save(path, {"a": np.ones(3), "b": {"c": np.ones((2, 2), np.float32)}})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(files.InvalidFile):
            files.load(path)


def test_anything_but_a_regular_file_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/hostname")
    (tmp_path / "folder").mkdir()
    for name, words in (("fifo", "it is a FIFO"), ("link", "leads out of"), ("folder", "it is a folder")):
        with pytest.raises(files.InvalidFile, match=words):
            files.load(tmp_path / name)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "x.pt", "..", "", 7, None])
def test_an_index_may_only_name_files_beside_it(name, tmp_path):
    files.save(tmp_path / "x.safetensors", {"a": np.ones(3)})
    (tmp_path / "below").mkdir()
    index = tmp_path / "below" / "index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(files.InvalidFile, match="must be in a file beside the index"):
        files.load(index)


def test_a_wrong_index_is_rejected(tmp_path):
    files.save(tmp_path / "x.safetensors", {"a": np.ones(3)})
    index = tmp_path / "index.json"
    for words, text in (
        ("lists 'b' in x.safetensors, which does not contain it", '{"weight_map": {"b": "x.safetensors"}}'),
        ("no weight_map", '{"weight_map": []}'),
        ("duplicate key", '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}'),
        ("nested more than 8", '{"weight_map": ' + "[" * 50),
    ):
        index.write_text(text)
        with pytest.raises(files.InvalidFile, match=words):
            files.load(index)
    (tmp_path / "y.safetensors").symlink_to("/etc/hostname")
    index.write_text('{"weight_map": {"b": "y.safetensors"}}')
    with pytest.raises(files.InvalidFile, match="leads out of"):
        files.load(index)
