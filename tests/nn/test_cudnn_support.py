"""What cuDNN accepts is remembered beside the compilation cache, and loaded in the background."""

import inspect
import os
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mlax import ops
from tests.gpu import compilation_cache

backend = inspect.getmodule(ops.attention_backend)
support = inspect.getmodule(backend.find_refusal)
records = inspect.getmodule(support.find_record)
Q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
SPEC = ops.ScoreSpec(scale=0.125, causal=True)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A GPU with a compilation cache; the thread of each question that it was asked, and the answer that it gives."""
    found = SimpleNamespace(threads=[], answer=None, versions=(91002, 12090, "0.11.2"))

    def compile(*arguments):
        found.threads.append(threading.current_thread().name)
        return found.answer

    device = SimpleNamespace(
        device_kind="NVIDIA H200", compute_capability="9.0", client=SimpleNamespace(platform_version="cuda 12090")
    )
    monkeypatch.setattr(support, "_compile_both_passes", compile)
    monkeypatch.setattr(records, "cuda_versions", lambda: found.versions)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with compilation_cache(tmp_path):
        yield found
    support._find_refusal.cache_clear()


def ask(q=Q, lengths=None, spec=SPEC):
    """The answer of a new process."""
    support._find_refusal.cache_clear()
    answer = support.find_refusal(q, q, q, None, lengths, spec)
    for thread in threading.enumerate():
        if thread.name == "load cuDNN":
            thread.join(60)
    return answer


def test_what_cudnn_accepted_is_not_waited_for_in_the_next_process(asked, tmp_path):
    assert ask() is None and ask() is None
    assert asked.threads == ["MainThread", "load cuDNN"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_refusal_is_asked_again(asked, tmp_path):
    asked.answer = "RESOURCE_EXHAUSTED"
    assert ask() == ask() == "RESOURCE_EXHAUSTED"
    assert asked.threads == ["MainThread"] * 2 and not list(tmp_path.iterdir())
    asked.answer = None
    assert ask() is None


def test_another_attention_version_device_or_option_is_another_question(asked, monkeypatch):
    def is_asked(**arguments):
        asked.threads.clear()
        assert ask(**arguments) is None
        return asked.threads == ["MainThread"]

    assert is_asked() and not is_asked()
    assert is_asked(q=jax.ShapeDtypeStruct((4, 128, 4, 64), jnp.bfloat16))
    assert is_asked(q=jax.ShapeDtypeStruct(Q.shape, jnp.float16))
    assert is_asked(lengths=jax.ShapeDtypeStruct((2,), jnp.int32))
    assert is_asked(spec=ops.ScoreSpec(scale=0.125))
    asked.versions = (92700, 12090, "0.11.2")
    assert is_asked() and not is_asked()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert is_asked() and not is_asked()
    monkeypatch.setattr(jax, "__version__", "0.99")
    assert is_asked() and not is_asked()
    jax.devices()[0].device_kind = "NVIDIA B200"
    assert is_asked() and not is_asked()


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04." * 9, b"x" * 10_000, "folder", "pipe", "cut", "longer"])
def test_a_file_with_anything_else_in_it_is_ignored_and_replaced(content, asked, tmp_path):
    ask()
    (file,) = tmp_path.iterdir()
    written = file.read_bytes()
    file.unlink()
    if content == "folder":
        file.mkdir()
    elif content == "pipe":
        os.mkfifo(file)
    else:
        file.write_bytes({"cut": written[:-1], "longer": written + b" "}.get(content, content))
    asked.threads.clear()
    assert ask() is None
    assert asked.threads == ["MainThread"]
    assert list(tmp_path.iterdir()) == [file]
    assert content == "folder" or file.read_bytes() == written


def test_a_record_that_is_wrong_is_deleted(asked, tmp_path):
    ask()
    asked.answer = "no engine"
    assert ask() is None
    assert not list(tmp_path.iterdir())
    assert ask() == "no engine"


@pytest.mark.parametrize("reason", ["no folder", "disabled", "remote", "missing", "version", "processes"])
def test_nothing_is_remembered_without_a_cache_or_for_what_is_unknown(reason, asked, monkeypatch, tmp_path):
    old = jax.config.jax_enable_compilation_cache
    if reason == "version":
        asked.versions = None
    elif reason == "processes":
        monkeypatch.setattr(jax, "process_count", lambda: 2)
    elif reason == "disabled":
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        folders = {"no folder": None, "remote": "gs://bucket/folder", "missing": str(tmp_path / "missing")}
        jax.config.update("jax_compilation_cache_dir", folders[reason])
    try:
        assert ask() is None and ask() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", old)
    assert asked.threads == ["MainThread"] * 2
    assert not list(tmp_path.iterdir())


def test_the_versions_of_cuda_are_unknown_without_a_plugin(monkeypatch):
    monkeypatch.setattr(inspect.getmodule(records.cuda_versions).lib, "cuda_versions", None)
    assert records.cuda_versions() is None
