"""to_orbax and from_orbax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim, train

orbax = pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore")


def state(seed):
    trainables = {"up": {"kernel": jax.random.normal(jax.random.key(seed), (3, 4), jnp.bfloat16)}, "bias": jnp.ones(4)}
    return {"w": trainables, "optimizer": optim.AdamW(1e-3).init(trainables), "rng": jax.random.key(seed)}


def test_a_state_round_trips_through_orbax(tmp_path):
    train.to_orbax(tmp_path / "there", state(1))
    restored = train.from_orbax(tmp_path / "there", state(2))
    assert jax.tree.structure(restored) == jax.tree.structure(state(1))
    assert (jax.random.key_data(restored["rng"]) == jax.random.key_data(state(1)["rng"])).all()
    for name in ("w", "optimizer"):
        for x, y in zip(jax.tree.leaves(restored[name]), jax.tree.leaves(state(1)[name]), strict=True):
            assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_tree_that_orbax_saved_is_restored_by_leaf_names(tmp_path):
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"layers": [jnp.ones(3), (jnp.zeros(2),)], "x": np.arange(3)})
    target = {"layers": {"0": jnp.zeros(3), "1": {"0": np.ones(2, np.float32)}}, "x": np.zeros(3, np.int64)}
    restored = train.from_orbax(tmp_path / "theirs", target)
    assert (np.asarray(restored["layers"]["0"]) == 1).all() and (restored["x"] == np.arange(3)).all()


def test_the_error_names_the_leaf_that_does_not_match(tmp_path):
    train.to_orbax(tmp_path / "there", {"a": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"'a' was saved as float32\[3\]"):
        train.from_orbax(tmp_path / "there", {"a": jnp.ones(4)})
    with pytest.raises(ValueError, match="'b' is only in the target"):
        train.from_orbax(tmp_path / "there", {"a": jnp.ones(3), "b": jnp.ones(3)})
