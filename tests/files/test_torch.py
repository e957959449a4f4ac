"""load_torch: what torch.save writes is read as it is; anything that is not a state dict is rejected with a reason."""

import inspect
import io
import time
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mlax import files
from tests.files.torch_archive import archive, by_name, integer, name, state, storage, tensor, text, tuple_of

REFERENCE = Path(__file__).parents[1] / "references" / "torch_files.npz"


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as found:
        return dict(found)


@pytest.fixture
def load(tmp_path):
    def load(content, **options):
        path = tmp_path / "x.pt"
        path.write_bytes(bytes(content))
        return files.load_torch(path, **options)

    return load


def arrays_of(reference):
    return {key.removeprefix("state "): array for key, array in reference.items() if key.startswith("state ")}


@pytest.mark.parametrize("file", ["state", "protocol4"])
def test_a_state_dict_is_read_bitwise_in_its_order(reference, load, file):
    found, wanted = load(reference[f"file {file}"]), arrays_of(reference)
    assert list(found) == list(wanted)
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype and found[key].tobytes() == array.tobytes()
    assert np.shares_memory(found["0.weight"], found["2.weight"])
    assert not any(array.flags.owndata or array.flags.writeable for array in found.values())


def test_nested_dicts_are_joined_by_dots_and_other_values_left_out(reference, load):
    found, wanted = load(reference["file nested"]), arrays_of(reference)
    assert list(found) == [*(f"state_dict.{key}" for key in wanted), "history.0", "history.1.a"]
    assert list(load(reference["file nested"], key="state_dict")) == list(wanted)
    with pytest.raises(ValueError, match="has no dict 'model'; its dicts are 'state_dict', 'optimizer'"):
        load(reference["file nested"], key="model")


def test_views_are_read_with_their_strides(reference, load):
    found, numbers = load(reference["file strided"]), reference["numbers"]
    wanted = {"transposed": numbers.T, "sliced": numbers[1:3, ::2], "scalar": numbers[1, 2], "empty": numbers[:0]}
    for key, array in {**wanted, "parameter": numbers, "frozen": numbers, "one": numbers[:1]}.items():
        np.testing.assert_array_equal(found[key], array)
        assert found[key].shape == array.shape


def test_every_dtype_of_numpy_and_ml_dtypes_is_read(reference, load):
    found, numbers = load(reference["file dtypes"]), reference["numbers"] + 1
    for key, array in found.items():
        dtype = np.dtype(getattr(ml_dtypes, key, key))
        assert array.dtype == dtype
        if dtype != ml_dtypes.float8_e8m0fnu:  # which PyTorch rounds otherwise than ml_dtypes
            np.testing.assert_array_equal(array, numbers.astype(dtype))


FOREIGN = {
    "legacy": "format of PyTorch before 1.6",
    "module": "names 'torch.nn.modules.linear.Linear'",
    "tensor": "holds a tensor, not a dict",
    "expanded": "expanded view",
    "conjugate": "resolve_conj",
    "sparse": "_rebuild_sparse_tensor",
    "script": "TorchScript",
}


@pytest.mark.parametrize("file", FOREIGN)
def test_what_is_not_a_state_dict_is_rejected_with_advice(reference, load, file):
    with pytest.raises(files.InvalidFile, match=FOREIGN[file]):
        load(reference[f"file {file}"])


EMPTY = archive(state())
ONE = {"m/data/0": b"1234"}
DEEP = b"]" * 50 + b"a" * 49
LAUGHS = b"]" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(30))
LOOP = b"]q\0(h\0h\0h\0h\0e"
HOSTILE = {
    "a call of the system": (archive(name("posix", "system") + tuple_of(text("true")) + b"R"), "names 'posix.system'"),
    "a call of eval": (archive(name("builtins", "eval") + tuple_of(text("1")) + b"R"), "names 'builtins.eval'"),
    "a name by the stack": (archive(text("os") + text("system") + b"\x93"), "names 'os.system'"),
    "a dotted name": (archive(name("torch._utils", "_rebuild_tensor_v2.__globals__")), "names 'torch._utils"),
    "an import by inst": (archive(b"(ios\nsystem\n"), "uses the instruction INST"),
    "an object": (archive(b"(cos\nsystem\no"), "names 'os.system'"),
    "a new object": (archive(name("collections", "OrderedDict") + b")\x81"), "uses the instruction NEWOBJ"),
    "an extension": (archive(b"\x82\1"), "uses the instruction EXT1"),
    "a persistent id as text": (archive(b"Pabc\n"), "uses the instruction PERSID"),
    "not an instruction": (archive(b"\xff"), "0xff, which is not an instruction"),
    "a call of a storage": (archive(name("torch", "FloatStorage") + b")R"), "calls torch.FloatStorage"),
    "a call of a string": (archive(text("a") + b")R"), "damaged at byte"),
    "a call of a dict": (archive(name("collections", "OrderedDict") + tuple_of(b"]") + b"R"), "damaged at byte"),
    "attributes of a tensor": (archive(by_name("a", tensor()) + b"h\0}b", ONE), "damaged at byte"),
    "an empty stack": (archive(b""), "damaged at byte"),
    "a pop below the mark": (archive(b"](a"), "damaged at byte"),
    "a mark that is missing": (archive(b"t"), "damaged at byte"),
    "an unknown memo": (archive(b"h\7"), "damaged at byte"),
    "a string past the end": (archive(b"X\xff\0\0\0abc"), "damaged at byte"),
    "a string of 2 GB": (archive(b"X\xff\xff\xff\x7fabc"), "string of 2,147,483,647 bytes"),
    "a string that is not UTF-8": (archive(b"X\1\0\0\0\xff"), "damaged at byte"),
    "no end": (archive(b"}", end=b""), "damaged at byte"),
    "an odd number of items": (archive(b"}(" + text("a") + b"u"), "damaged at byte"),
    "a key that is a tuple": (archive(b"}()Nu"), "keys that are neither strings nor small integers"),
    "a key of 2,000 bits": (archive(b"}(\x8a\xff" + b"\1" * 255 + b"Nu"), "neither strings nor small integers"),
    "a list": (archive(b"]"), "holds a list"),
    "deep lists": (archive(by_name("a", DEEP)), "nested more than 32"),
    "a billion paths": (archive(by_name("a", LAUGHS)), "more than 200,000 values"),
    "a list in itself": (archive(by_name("a", LOOP)), "nested more than 32"),
    "a million instructions": (archive(b"N" * 1_000_000), "more than 500,000 instructions"),
    "a pickle of 9 MB": (archive(b"N" * 9_000_000), "at most 8,388,608 are allowed"),
    "a missing record": (archive(state(a=tensor()), {}), "record data/0 of a tensor is missing"),
    "a record elsewhere": (archive(state(a=tensor(record="../../x")), ONE), "data/../../x of a tensor is missing"),
    "a short record": (archive(state(a=tensor(count=2)), ONE), "should have 2 elements of float32, but it has 4 bytes"),
    "a long record": (archive(state(a=tensor(count=2)), {"m/data/0": b"1" * 12}), "it has 12 bytes"),
    "an unknown storage": (archive(state(a=tensor(kind="QInt8Storage")), ONE), "names 'torch.QInt8Storage'"),
    "a huge view": (archive(state(a=tensor(shape=(10**6, 10**6), strides=(0, 0))), ONE), "expanded view"),
    "a shape of 2^64": (archive(state(a=tensor(shape=(2**64,))), ONE), "damaged at byte"),
    "an empty but huge shape": (archive(state(a=tensor(shape=(0, 2**60), strides=(1, 1))), ONE), "damaged at byte"),
    "a negative shape": (archive(state(a=tensor(shape=(-1,))), ONE), "damaged at byte"),
    "a negative stride": (archive(state(a=tensor(strides=(-1,))), ONE), "damaged at byte"),
    "a negative offset": (archive(state(a=tensor(offset=-1)), ONE), "damaged at byte"),
    "an offset past the end": (archive(state(a=tensor(offset=1)), ONE), "does not fit into its storage of 1"),
    "a stride past the end": (
        archive(state(a=tensor(count=2, shape=(2,), strides=(2,))), {"m/data/0": b"1" * 8}),
        "does not fit into its storage of 2",
    ),
    "33 axes": (archive(state(a=tensor(shape=(1,) * 33, strides=(1,) * 33)), ONE), "damaged at byte"),
    "fewer strides than axes": (archive(state(a=tensor(shape=(1, 1))), ONE), "damaged at byte"),
    "a shape that is a string": (archive(state(a=tensor(shape=text("a" * 1000))), ONE), "damaged at byte"),
    "a boolean of 7": (archive(state(a=tensor(kind="BoolStorage")), {"m/data/0": b"\7"}), "boolean but contains 7"),
    "a name with NUL": (archive(by_name("a\0b", tensor()), ONE), "control character"),
    "a name of 5,000 characters": (archive(by_name("a" * 5000, tensor()), ONE), "5,000 characters"),
    "the same name twice": (
        archive(b"}(" + text("a.b") + tensor() + text("a") + by_name("b", tensor()) + b"u", ONE),
        "two tensors are named 'a.b'",
    ),
    "shared 40 times": (archive(state(**{f"a{i}": tensor(count=4096, shape=(4096,)) for i in range(40)}),
                                {"m/data/0": b"1" * 16384}), "bytes, which"),
    "big-endian": (archive(state(a=tensor()), {**ONE, "m/byteorder": b"big"}), "not little-endian"),
    "two pickles": (archive(state(), {"n/data.pkl": b"}."}), "2 data.pkl"),
    "no pickle": (archive(None, {"m/x": b""}), "0 data.pkl"),
    "compressed": (archive(state(a=tensor()), ONE, compression=zipfile.ZIP_DEFLATED), "compressed or encrypted"),
    "a comment at the end": (EMPTY[:-2] + b"\1\0x", "truncated or damaged"),
    "bytes in front": (b"PK\3\4" + EMPTY, "not at its end"),
    "a million members": (EMPTY[:-14] + b"\xff" * 4 + EMPTY[-10:], "truncated or damaged"),
    "safetensors": (b"\x08\0\0\0\0\0\0\0{}      ", "mlax.files.load"),
    "empty": (b"", "does not start like a zip archive"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_rejected_with_a_reason(case, load):
    content, words = HOSTILE[case]
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(files.InvalidFile, match=words):
        load(content)
    assert time.perf_counter() - started < 4  # under tracemalloc, which makes it three times as slow
    assert tracemalloc.get_traced_memory()[1] < 1.2 * len(content) + (64 << 20)
    tracemalloc.stop()


def test_every_truncated_file_and_every_doubled_member_is_rejected(reference, load):
    content = bytes(reference["file state"])
    for length in range(0, len(content), 31):
        with pytest.raises(files.InvalidFile):
            load(content[:length])
    with pytest.warns(UserWarning, match="Duplicate name"):
        doubled = archive_of_pairs([("m/data.pkl", b"}."), ("m/data/0", b"a"), ("m/data/0", b"b")])
    with pytest.raises(files.InvalidFile, match="twice"):
        load(doubled)


def archive_of_pairs(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for member in members:
            target.writestr(*member)
    return file.getvalue()


def test_members_that_overlap_are_rejected(load):
    content = bytearray(archive(state(a=tensor()), {**ONE, "m/data/1": b"5678"}))
    entry = content.rindex(b"m/data/0") - 46  # of the central directory
    for sizes in ((100).to_bytes(4, "little") * 2, (2**32 - 1).to_bytes(4, "little") * 2):
        content[entry + 20 : entry + 28] = sizes
        with pytest.raises(files.InvalidFile, match="overlap, or one is longer than the file"):
            load(content)


def test_archives_in_the_zip64_format_are_read(load, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 0)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 0)
    content = archive(state(a=tensor()), ONE)
    assert b"PK\6\6" in content and load(content)["a"].tobytes() == b"1234"
    at = content.rindex(b"PK\6\6")
    with pytest.raises(files.InvalidFile, match="truncated or damaged"):
        load(content[:at] + b"PK\6\5" + content[at + 4 :])


def test_more_members_than_allowed_are_not_read(load, monkeypatch):
    module = inspect.getmodule(files.load_torch).read_members.__globals__
    monkeypatch.setitem(module, "MAX_MEMBERS", 1)
    with pytest.raises(files.InvalidFile, match="2 members, and at most 1 are allowed"):
        load(archive(state(a=tensor()), ONE))


def test_anything_but_a_regular_file_in_its_folder_is_rejected(tmp_path):
    (tmp_path / "link.pt").symlink_to("/etc/hostname")
    with pytest.raises(files.InvalidFile, match="leads out of"):
        files.load_torch(tmp_path / "link.pt")
    with pytest.raises(files.InvalidFile, match="it is a folder"):
        files.load_torch(tmp_path)


def test_untyped_storages_take_the_dtype_of_the_tensor(load):
    rebuild = name("torch._utils", "_rebuild_tensor_v3")
    bytes_of = storage("UntypedStorage", "0", 4, module="torch.storage")
    rest = (
        integer(0) + tuple_of(integer(2)) + tuple_of(integer(1)) + b"\x89" + name("collections", "OrderedDict") + b")R"
    )
    found = load(archive(by_name("a", rebuild + tuple_of(bytes_of, rest, name("torch", "uint16")) + b"R"), ONE))
    assert found["a"].dtype == np.uint16 and found["a"].tobytes() == b"1234"
