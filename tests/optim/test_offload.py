"""Leaves in host memory are updated like resident ones, piece by piece, and stay where they are."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim
from mlax._jax import plan_chunks, to_host
from tests.asserts import assert_close, compilations

STACKED = ("blocks/**",)
OPTIMIZERS = {
    "SGD": optim.SGD(0.1, momentum=0.9),
    "AdamW": optim.AdamW(1e-2),
    "Lion": optim.Lion(1e-2),
    "Adafactor": optim.Adafactor(1e-2, stacked=STACKED),
    "Muon": optim.Muon(1e-2, stacked=STACKED),
    "LAMB, fetched as a whole": optim.LAMB(1e-2),
    "ClipGlobalNorm": optim.ClipGlobalNorm(optim.ClipValue(optim.Adam(1e-2), 0.5), 0.1),
    "twice clipped": optim.ClipGlobalNorm(optim.ClipGlobalNorm(optim.SGD(0.1), 0.5), 0.1),
    "Groups": optim.Groups(("blocks/**", optim.ClipGlobalNorm(optim.Adam(1e-2), 0.1)), ("**", optim.SGD(0.1))),
    "Freeze": optim.Freeze(optim.Adam(1e-2), ("blocks/kernel",)),
    "Average": optim.Average(optim.Adam(1e-2)),
    "SkipNonFinite": optim.SkipNonFinite(optim.Adam(1e-2)),
    "Accumulate": optim.Accumulate(optim.Adam(1e-2), 2),
    "Master": optim.AdamW(1e-2, rounding=optim.MasterWeights()),
    "Stochastic": optim.AdamW(1e-2, rounding=optim.StochasticRounding()),
    "Kahan": optim.AdamW(1e-2, rounding=optim.KahanSummation()),
}
ALIKE = ("SGD", "Lion", "twice clipped", "Average", "SkipNonFinite")  # have slots and steps as the others have


def dtype_of(optimizer):
    """bfloat16 where the rounding matters, else float32."""
    nearest = optim.RoundToNearest()
    return "float32" if getattr(optimizer, "rounding", nearest) == nearest else "bfloat16"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(inspect.getmodule(plan_chunks), "MIN_CHUNK_BYTES", 1)


def trees(dtype, seed=0):
    draws = np.random.default_rng(seed)

    def draw(*shape):
        return jax.device_put(jnp.asarray(draws.normal(size=shape), dtype), jax.devices()[0])

    return {"blocks": {"kernel": draw(6, 4, 3), "bias": draw(6, 3)}, "head": {"kernel": draw(4, 2)}}


def hosted(tree):
    return {**tree, "blocks": to_host(tree["blocks"])}


def kinds(tree):
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in found}


def assert_agree(found, wanted):
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, wanted)
    assert_close(found, wanted, 2e-6, 1e-7)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in OPTIMIZERS],
)
def test_an_update_of_leaves_in_host_memory_equals_that_on_the_device(name):
    optimizer = OPTIMIZERS[name]
    dtype = dtype_of(optimizer)
    weights, held = trees(dtype), hosted(trees(dtype))
    state, kept = optimizer.init(weights), optimizer.init(held)
    assert_agree(kept, state)
    assert all((kind == "pinned_host") == ("blocks" in path) for path, kind in kinds(kept).items())
    before, update = kinds((held, kept)), jax.jit(optimizer.update, donate_argnums=(1, 2))
    for seed in (1, 2):
        grads = trees(dtype, seed)
        weights, state = jax.jit(optimizer.update)(grads, state, weights)
        moved = hosted(grads)
        with compilations() as found:
            held, kept = update(moved, kept, held)
    assert_agree((held, kept), (weights, state))
    assert kinds((held, kept)) == before
    assert not found  # in the second update


@pytest.mark.parametrize("name", ["AdamW", "Master", "Kahan", "ClipGlobalNorm"])
def test_an_update_that_is_not_taken_changes_nothing(name):
    optimizer = OPTIMIZERS[name]
    dtype = dtype_of(optimizer)
    held = hosted(trees(dtype))
    update = jax.jit(optimizer.update)
    held, kept = update(hosted(trees(dtype, 1)), optimizer.init(held), held)
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, trees(dtype, 2))
    after = update(hosted(bad), kept, held, apply_if=jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, after, (held, kept))


def test_slots_alone_can_be_in_host_memory():
    optimizer = optim.ClipGlobalNorm(optim.AdamW(1e-2), 0.1)
    weights = trees("float32")
    state = optimizer.init(weights)
    kept = state._replace(mean=to_host(state.mean), square=to_host(state.square))
    new, after = jax.jit(optimizer.update)(trees("float32", 1), kept, weights)
    assert_agree((new, after), jax.jit(optimizer.update)(trees("float32", 1), state, weights))
    assert kinds(after) == kinds(kept) and set(kinds(new).values()) == {"device"}


def test_optax_with_weights_in_host_memory_is_an_error():
    import optax

    with pytest.raises(ValueError, match=r"'blocks/bias' is in host memory, but Optax updates all leaves at once"):
        optim.from_optax(optax.adam(1e-3)).init(hosted(trees("float32")))


def test_a_global_norm_inside_accumulate_is_an_error_in_host_memory():
    optimizer = optim.Accumulate(optim.ClipGlobalNorm(optim.SGD(0.1), 1.0), 2)
    held = hosted(trees("float32"))
    with pytest.raises(ValueError, match="wrap Accumulate in it"):
        optimizer.update(hosted(trees("float32", 1)), optimizer.init(held), held)


def test_small_leaves_are_fetched_whole(monkeypatch):
    monkeypatch.setattr(inspect.getmodule(plan_chunks), "MIN_CHUNK_BYTES", 2**22)
    leaf = to_host(jnp.ones((4096, 1024)))
    assert plan_chunks({"small": [leaf[:8]], "device": [jnp.ones((4096, 1024))]}) == []
    assert plan_chunks({"large": [leaf]}) == [(["large"], 4)]
