"""Memory that a process keeps when it frees it, counted by page faults."""

import ctypes
import os
import subprocess
import sys

import pytest

from mlax import train

PROGRAM = """
import resource
import sys

from mlax import train

if sys.argv[1] == "keep":
    assert train.keep_freed_memory()

import jax
import jax.numpy as jnp

@jax.jit
def function(x):
    y = jnp.sin(x @ x.T)  # of 64 MiB
    return (y @ x).sum() + (y.T @ x).sum()  # both products read it from memory

x = jnp.ones((4096, 8))
faults = []
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # XLA may free the memory of a call after the next one has started
"""
has_glibc = hasattr(ctypes.CDLL(None), "mallopt") if sys.platform == "linux" else False
VARIABLES = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}


def page_faults(mode):
    command = [sys.executable, "-c", PROGRAM, mode]
    return int(subprocess.run(command, env=VARIABLES, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not has_glibc, reason="needs glibc")
def test_a_process_that_keeps_freed_memory_does_not_fault_it_in_again():
    pages = 4096 * 4096 * 4 // os.sysconf("SC_PAGE_SIZE")
    assert page_faults("keep") < pages / 10
    assert page_faults("return") > pages / 2


def test_a_setting_of_the_users_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not train.keep_freed_memory()


def test_without_mallopt_nothing_changes(monkeypatch):
    for name in os.environ.keys() - VARIABLES.keys():
        monkeypatch.delenv(name)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not train.keep_freed_memory()
