import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import zoo
from tests.zoo.reference import FOLDER

NUMBER = 20_000
CHI_SQUARE = 26.1  # exceeded by chance once in 1,000 with 8 degrees of freedom

with np.load(FOLDER / "sampling.npz") as file:
    ARRAYS = dict(file)
SAMPLERS = json.loads(str(ARRAYS["samplers"]))


def counts_of(sampler):
    logits = jnp.asarray(ARRAYS["logits"]).repeat(NUMBER, axis=0)
    seen = jnp.zeros(logits.shape, bool).at[:, ARRAYS["seen"][0]].set(True)
    tokens = jax.jit(sampler.choose)(jax.random.key(0), logits, seen)
    return np.bincount(tokens, minlength=logits.shape[1])


def is_sample_of(counts, odds):
    """Pearson's chi-square test, and that the tokens which occur are those that can."""
    wanted = odds * NUMBER
    possible = odds > 0
    statistic = ((counts - wanted)[possible] ** 2 / wanted[possible]).sum()
    return bool((counts[~possible] == 0).all()) and statistic < CHI_SQUARE


@pytest.mark.parametrize("index", range(len(SAMPLERS)), ids=[", ".join(each) for each in SAMPLERS])
def test_samples_have_the_probabilities_of_transformers(index):
    counts = counts_of(zoo.Sample(**SAMPLERS[index]))
    agreeing = [other for other in range(len(SAMPLERS)) if is_sample_of(counts, ARRAYS[f"sample {other}"][0])]
    assert agreeing == [index]


def test_one_token_more_or_fewer_is_another_distribution():
    odds = np.sort(jax.nn.softmax(ARRAYS["logits"][0]))[::-1]
    thresholds = np.cumsum(odds)
    for number in (1, 4):
        for sampler in (
            zoo.Sample(top_k=number),
            zoo.Sample(top_p=float(thresholds[number - 1]) - 1e-4),
            zoo.Sample(top_p=float(thresholds[number - 1]) - 1e-4, top_k=8),
            zoo.Sample(min_p=float(odds[number - 1] / odds[0]) - 1e-4),
        ):
            values, _ = sampler.filter(jnp.asarray(ARRAYS["logits"]))
            assert np.isfinite(values).sum() == number, sampler


@pytest.mark.parametrize("sampler", [zoo.Greedy(), zoo.Sample(top_k=2, top_p=0.9), zoo.Sample(top_p=0.9, min_p=0.1)])
def test_logits_that_are_nan_give_no_token(sampler):
    logits = jnp.array([[0.1, jnp.nan, 0.3], [jnp.nan] * 3, [-jnp.inf] * 3, [-jnp.inf, 1.0, -jnp.inf]])
    assert sampler.choose(jax.random.key(0), logits).tolist() == [-1, -1, -1, 1]
