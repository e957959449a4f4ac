"""Keys derive from names: those of parts, and those that `wire` asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn
from tests.asserts import unequal_leaves

X = jnp.ones((2, 6))


def test_adding_a_part_does_not_reseed_the_others():
    before, _ = mlax.Series(a=nn.Linear(6), c=nn.Linear(6)).init(jax.random.key(0), X)
    after, _ = mlax.Series(a=nn.Linear(6), b=nn.Linear(6), c=nn.Linear(6)).init(jax.random.key(0), X)
    assert not unequal_leaves(before, {"a": after["a"], "c": after["c"]})


def test_renaming_a_part_does_not_reseed_the_others():
    before, _ = mlax.Series(a=nn.Linear(6), b=nn.Linear(6)).init(jax.random.key(0), X)
    after, _ = mlax.Series(a=nn.Linear(6), other=nn.Linear(6)).init(jax.random.key(0), X)
    assert not unequal_leaves(before["a"], after["a"])
    assert not jnp.array_equal(before["b"]["kernel"], after["other"]["kernel"])


def test_dropping_the_bias_keeps_the_kernel():
    with_bias, _ = nn.Linear(4).init(jax.random.key(0), X)
    without, _ = nn.Linear(4, bias=False).init(jax.random.key(0), X)
    assert not unequal_leaves(with_bias["kernel"], without["kernel"])


def test_two_calls_of_one_part_drop_different_elements():
    @mlax.frozen
    class Twice(mlax.Composite):
        drop: nn.Dropout = nn.Dropout(0.5)

        def wire(self, sub, x):
            return sub.drop(x), sub.drop(x)

    (first, second), _ = Twice().fwd(jnp.ones(64), None, rng=jax.random.key(0))
    assert not jnp.array_equal(first, second)


def test_each_repetition_drops_different_elements():
    @mlax.frozen
    class Trace(mlax.Composite):
        drop: nn.Dropout = nn.Dropout(0.5)

        def wire(self, sub, x):
            return sub.drop(x)

    y, _ = mlax.Repeat(Trace(), 3).fwd(jnp.ones(4096), None, rng=jax.random.key(0))
    assert 0.08 < float((y != 0).mean()) < 0.17  # 1/8 survive three independent halvings, 1/2 would survive one mask


def test_legacy_uint32_keys_work():
    trainables, _ = nn.Linear(4).init(jax.random.PRNGKey(0), X)
    assert not unequal_leaves(trainables, nn.Linear(4).init(jax.random.key(0), X)[0])


@mlax.frozen
class Draws(mlax.Composite):
    """The data of the keys by these names, with a part that returns that of its own key."""

    names: tuple[str, ...] = ("noise",)

    def parts(self):
        return {"noise": mlax.F(key_data), "other": mlax.F(key_data)}

    def wire(self, sub, x):
        drawn = [jax.random.key_data(sub.rng(name)) for name in self.names]
        return jnp.stack([*drawn, sub.noise(x), sub.noise(x), sub.other(x)])


def key_data(x, rng):
    return jax.random.key_data(rng)


def draw(*names):
    return np.asarray(Draws(names).fwd(X, None, rng=jax.random.key(0))[0])


def test_a_key_by_name_differs_from_that_of_every_part_and_other_name():
    assert len(np.unique(draw("noise", "other", "mask"), axis=0)) == 6


def test_a_name_asked_for_again_gives_another_key():
    assert len(np.unique(draw("noise", "noise", "noise"), axis=0)) == 6


def test_asking_for_a_key_reseeds_neither_parts_nor_other_names():
    np.testing.assert_array_equal(draw("noise", "mask")[[0, 2, 3, 4]], draw("noise")[[0, 1, 2, 3]])
    np.testing.assert_array_equal(draw("mask", "noise")[1], draw("noise")[0])
    np.testing.assert_array_equal(draw("noise"), jax.jit(Draws().fwd)(X, None, rng=jax.random.key(0))[0])


def test_the_error_of_a_key_without_a_name_says_how_to_ask_for_it():
    @mlax.frozen
    class Noise(mlax.Composite):
        called: bool

        def wire(self, sub, x):
            return jax.random.normal(sub.rng() if self.called else sub.rng, x.shape, x.dtype)

    with pytest.raises(TypeError, match=r"sub.rng\(\) needs a name, .* such as sub.rng\('noise'\)"):
        Noise(True).fwd(X, None, rng=jax.random.key(0))
    with pytest.raises(TypeError) as caught:
        Noise(False).fwd(X, None, rng=jax.random.key(0))
    assert "sub.rng is a method: write sub.rng('noise') for a key." in caught.value.__notes__


def test_each_repetition_slice_and_time_step_has_its_own_key_by_name():
    @mlax.frozen
    class Noise(mlax.Composite):
        def wire(self, sub, x):
            return x + jax.random.normal(sub.rng("noise"), x.shape, x.dtype)

    @mlax.frozen
    class NoisyCell(mlax.CompositeCell):
        """A cell with the noise of every phase."""

        def initial_carry(self, x):
            return jnp.zeros_like(x)

        def ahead(self, sub, x):
            return x + jax.random.normal(sub.rng("noise"), x.shape, x.dtype)

        def feedback(self, sub, carry):
            return jax.random.normal(sub.rng("noise"), carry.shape, carry.dtype)

        def step(self, sub, carry, ahead):
            return ahead, jnp.stack([ahead, jax.random.normal(sub.rng("noise"), carry.shape, carry.dtype)])

    rng, x = jax.random.key(0), jnp.zeros((2, 3, 4))
    one, _ = Noise().fwd(x, None, rng=rng)
    for mode in ("scan", "unroll"):
        three, _ = mlax.Repeat(Noise(), 3, mode=mode).fwd(x, None, rng=rng)
        assert not jnp.allclose(three, 3 * one, atol=0.1) and jnp.std(three) > 1.2
    for y in (mlax.Map(Noise()).fwd(x, None, rng=rng)[0], mlax.Recurrent(NoisyCell()).fwd(x, None, rng=rng)[0]):
        assert len(np.unique(y)) == y.size


def test_a_key_by_name_without_rng_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"Draws.*: wire asks for the key sub.rng\('noise'\), but rng is None"):
        Draws().fwd(X, None)
    for name in ("no identifier", 3, None):
        with pytest.raises(TypeError, match="the name of a key must be an identifier"):
            Draws((name,)).fwd(X, None, rng=jax.random.key(0))  # pyright: ignore[reportArgumentType]


def test_a_part_cannot_have_a_name_that_sub_itself_has():
    names = [name for name in dir(mlax.Sub) if not name.startswith("_")]
    assert {"rng", "take_bias", "call_in_turn"} <= set(names)
    for name in (*names, "inference_mode"):
        with pytest.raises(
            ValueError, match=f"'{name}' cannot name a part; .* other than call_in_turn, inference_mode"
        ):
            mlax.Series(**{name: nn.Linear(3)}).init(jax.random.key(0), X)
