"""The programs of kernels are kept beside the compilation cache, and the next process reads them."""

import collections
import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import _gpu
from tests.arrays import normal
from tests.gpu import ROWS, compilation_cache, lower_for_cuda, needs_mosaic

exports = inspect.getmodule(inspect.unwrap(vars(ROWS)["exported"]))
records = inspect.getmodule(exports.find_record)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A compilation cache beside which the programs of kernels are kept, here for the CPU."""
    monkeypatch.setattr(records, "cuda_versions", lambda: (91002, 12090, "0.11.2"))
    monkeypatch.setattr(exports, "PLATFORM", "cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with compilation_cache(tmp_path):
        yield tmp_path
    exports.read_or_export.cache_clear()


traced = []


@exports.exported
def scaled_sum(x, others, shift=None, *, factor):
    traced.append(factor)
    return factor * x + sum(others), shift


FACTOR = (2.0,)


def scaled_by_constant(x):
    return FACTOR[0] * x


def call(*arrays, **options):
    """The results in a new process, and whether it traced the kernel."""
    exports.read_or_export.cache_clear()
    jax.clear_caches()
    traced.clear()
    return jax.jit(functools.partial(scaled_sum, **options))(*arrays), bool(traced)


def kept(folder):
    return sorted(folder.glob("kernel-*"))


def test_the_next_process_reads_the_program_and_computes_the_same(folder):
    x, y, z = normal(3, 4), normal(3, 4), normal(3, 4)
    (first, shift), was_traced = call(x, (y, z), factor=2.0)
    assert was_traced and len(kept(folder)) == 1
    (again, same), was_traced = call(x, (y, z), factor=2.0)
    assert not was_traced and shift is None and same is None
    np.testing.assert_array_equal(again, first)
    np.testing.assert_allclose(first, 2 * np.asarray(x) + y + z, rtol=1e-6)


def test_other_shapes_dtypes_trees_options_and_sources_are_other_programs(folder, monkeypatch):
    x = normal(3, 4)
    calls = [
        ((x, (x, x)), {"factor": 2.0}),
        ((x, (x, x)), {"factor": 3.0}),
        ((x, (x,)), {"factor": 2.0}),
        ((x, (x,), x), {"factor": 2.0}),
        ((x[:2], (x[:2],)), {"factor": 2.0}),
        ((x.astype(jnp.float16), (x.astype(jnp.float16),)), {"factor": 2.0}),
    ]
    for number, (arrays, options) in enumerate(calls, start=1):
        (y, _), was_traced = call(*arrays, **options)
        assert was_traced and len(kept(folder)) == number
        np.testing.assert_allclose(y, options["factor"] * arrays[0] + sum(arrays[1]), rtol=1e-2)
    monkeypatch.setattr(exports, "SOURCES", "edited")
    assert call(x, (x, x), factor=2.0)[1]
    assert len(kept(folder)) == len(calls) + 1


def test_a_constant_of_a_module_with_kernels_is_part_of_the_key(folder, monkeypatch):
    x = normal(3, 4)
    np.testing.assert_allclose(exports.exported(scaled_by_constant)(x), 2 * x)
    monkeypatch.setitem(globals(), "FACTOR", (3.0,))
    np.testing.assert_allclose(exports.exported(scaled_by_constant)(x), 3 * x)  # in the same process, too
    monkeypatch.setattr(ROWS, "FORWARD_BLOCKS", 8)
    exports.exported(scaled_by_constant)(x)
    assert len(kept(folder)) == 3


def test_a_program_is_kept_by_the_sources_as_they_were_imported(folder, monkeypatch):
    x = normal(3, 4)
    monkeypatch.setattr(exports, "hash_files", lambda *files: "edited since")
    call(x, (x,), factor=2.0)
    (file,) = kept(folder)
    assert b"edited since" not in file.read_bytes()


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "text"])
def test_a_damaged_program_is_exported_again_and_replaced(damage, folder):
    x = normal(3, 4)
    call(x, (x,), factor=2.0)
    (file,) = kept(folder)
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[-100] ^= 1
    file.write_bytes({"bit": bytes(changed), "cut": whole[:-1], "empty": b"", "text": b"{}" + whole}[damage])
    (y, _), was_traced = call(x, (x,), factor=2.0)
    assert was_traced
    np.testing.assert_allclose(y, 3 * x, rtol=1e-6)
    assert file.read_bytes().startswith(whole[:64]) and not call(x, (x,), factor=2.0)[1]


@pytest.mark.parametrize("reason", ["no folder", "no GPU", "version", "serialize", "full"])
def test_what_cannot_be_kept_is_computed_all_the_same(reason, folder, monkeypatch):
    x = normal(3, 4)
    if reason == "no folder":
        jax.config.update("jax_compilation_cache_dir", None)
    elif reason == "no GPU":
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    elif reason == "version":
        monkeypatch.setattr(records, "cuda_versions", lambda: None)
    elif reason == "serialize":  # as where flatbuffers is missing
        monkeypatch.setattr(jax.export.Exported, "serialize", lambda self: 1 / 0)
    else:
        monkeypatch.setattr(records.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    for _ in range(2):
        (y, _), was_traced = call(x, (x,), factor=2.0)
        assert was_traced and not kept(folder)
        np.testing.assert_allclose(y, 3 * x, rtol=1e-6)


def test_the_precision_of_products_and_the_module_are_part_of_the_key(folder):
    x, precisions = normal(4, 4), ("default", "highest")

    @exports.exported
    def product(x):
        return x @ x

    keys = {exports.KernelCall.describe(scaled_sum, (x,), {}).key, exports.KernelCall.describe(product, (x,), {}).key}
    assert len(keys) == 2 and all(key[0].startswith(f"{__name__}.") for key in keys)
    for number, precision in enumerate(precisions, start=1):
        with jax.default_matmul_precision(precision):
            product(x)
        assert len(kept(folder)) == number


def test_over_a_mesh_nothing_is_kept(folder):
    x = normal(3, 4)
    with jax.set_mesh(jax.make_mesh((1,), ("i",))):
        (y, _), was_traced = call(x, (x,), factor=2.0)
    assert was_traced and not kept(folder)
    (again, _), _ = call(x, (x,), factor=2.0)
    assert jax.typeof(again).sharding.mesh.empty and len(kept(folder)) == 1
    np.testing.assert_array_equal(y, again)


def test_what_cannot_be_exported_or_has_no_key_is_traced_where_it_is_called(folder, monkeypatch):
    x = normal(3, 4)
    (y, _), was_traced = call(x, (x,), factor=np.float64(2))  # an option whose text might not tell all of it
    assert was_traced and not kept(folder)
    np.testing.assert_allclose(y, 3 * x, rtol=1e-6)

    def refuse(*arguments, **options):
        raise NotImplementedError("custom calls")

    monkeypatch.setattr(jax.export, "export", refuse)
    (y, _), was_traced = call(x, (x,), factor=5.0)
    assert was_traced and not kept(folder)
    np.testing.assert_allclose(y, 6 * x, rtol=1e-6)


def test_an_error_of_a_kernel_is_its_own(folder):
    with pytest.raises(TypeError, match="add got incompatible shapes"):
        scaled_sum(normal(3, 4), (normal(2, 5),), factor=2.0)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


ATTENTION = inspect.getmodule(inspect.unwrap(_gpu.attention_kernel))
PRODUCTS, MLP = inspect.getmodule(_gpu.prefers_product_kernels), inspect.getmodule(_gpu.prefers_mlp_kernels)
X, ROW, STATISTIC = shape(1024, 256), shape(256), shape(1024, 1, dtype=jnp.float32)
UP, HIDDEN, TERM, HEADS = shape(256, 512), shape(512), shape(1024, dtype=jnp.float32), shape(2, 256, 2, 64)
LOGITS, LABELS = shape(1024, 2048), shape(1024, dtype=jnp.int32)
KERNELS = {  # their modules, arrays and options
    "_normalize": (ROWS, [X, ROW, None, ROW], {"eps": 1e-5, "centered": True}),
    "norm_gradient_kernel": (ROWS, [X, STATISTIC, STATISTIC, ROW, X], {"has_shift": True}),
    "gelu_kernel": (ROWS, [X, ROW], {"approximate": True}),
    "gelu_gradient_kernel": (ROWS, [X, ROW, X], {"approximate": False}),
    "softmax_statistics_kernel": (ROWS, [LOGITS, LABELS], {"classes": 2000}),
    "softmax_gradient_kernel": (ROWS, [LOGITS, LABELS, None, TERM, TERM, (TERM, TERM, TERM)], {"classes": 2048}),
    "gelu_product_kernel": (MLP, [X, UP, HIDDEN], {"approximate": True}),
    "biased_product_kernel": (MLP, [X, UP, HIDDEN], {}),
    "gelu_product_gradient_kernel": (MLP, [X, shape(512, 256), shape(1024, 512)], {"approximate": True}),
    "sum_of_products": (PRODUCTS, [[X, X], [shape(256, 256)] * 2], {}),
    "kernel_gradients": (PRODUCTS, [X, [X, X]], {}),
    "attention_kernel": (ATTENTION, [HEADS, HEADS, HEADS], {"scale": 0.125, "causal": True}),
}


def test_every_exported_kernel_is_tested():
    sources = "".join(path.read_text() for path in Path(exports.__file__).parent.glob("*.py"))
    assert set(re.findall(r"@exported\ndef (\w+)", sources)) == set(KERNELS)


@needs_mosaic
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_the_same_program_whoever_traced_it(name, folder, monkeypatch):
    """In the first process, the next one, and without a place to keep it, but for the call around it."""
    monkeypatch.setattr(exports, "PLATFORM", "cuda")
    module, arrays, options = KERNELS[name]
    texts = []
    for _ in range(2):
        exports.read_or_export.cache_clear()
        jax.clear_caches()
        texts.append(lower_for_cuda(functools.partial(vars(module)[name], **options), *arrays))
        assert len(kept(folder)) == 1
    assert texts[0] == texts[1] and "call_exported" in texts[0]
    jax.config.update("jax_compilation_cache_dir", None)
    jax.clear_caches()
    plain = lower_for_cuda(functools.partial(vars(module)[name], **options), *arrays)
    assert operations(plain) == operations(texts[0])
    assert plain.count("stablehlo.custom_call @mosaic_gpu") == 1


def operations(text):
    """How often each operation occurs in a program of StableHLO; constants may be shared."""
    return collections.Counter(re.findall(r"stablehlo\.(?!constant)\w+", text))
