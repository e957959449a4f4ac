"""Speculative decoding: the text of the large model, in fewer calls of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import mlax
from mlax import nn, zoo
from tests.zoo.decoders import Windowed, prompts, tiny_gpt2, with_nan


def perturb(trainables, size):
    leaves, tree = jax.tree.flatten(trainables)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return tree.unflatten(
        [leaf + size * leaf.std() * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def test_greedy_tokens_are_those_of_the_large_model_alone_in_each_row():
    model, trainables = tiny_gpt2()
    tokens, lengths = prompts(50, 7, 2, 4)

    def run(draft_trainables, stop):
        options = {"max_new_tokens": 20, "stop": stop, "pad": -1}
        return zoo.speculative_generate(model, trainables, model, draft_trainables, tokens, lengths, **options)

    whole = run(trainables, -1)
    text = np.asarray(whole.tokens)
    np.testing.assert_array_equal(text, likeliest(model, trainables, tokens, lengths, text))
    np.testing.assert_array_equal(whole.acceptance, 1.0)
    stop = int(text[0, 12])
    ends = [list(row).index(stop) + 1 if stop in row else 20 for row in text]
    want = np.where(np.arange(20) < np.array(ends)[:, None], text, -1)
    rates = []
    for size in (0.1, 3.0):
        found = run(perturb(trainables, size), stop)
        np.testing.assert_array_equal(found.tokens, want)
        np.testing.assert_array_equal(found.lengths, ends)
        rates.append(float(found.acceptance.mean()))
    assert 1.0 > rates[0] > 0.1 and rates[1] < rates[0]
    invalid = with_nan(trainables)
    np.testing.assert_array_equal(run(invalid, stop).tokens, want)  # whatever the draft model computes
    trainables = invalid
    assert run(invalid, stop).lengths.tolist() == [1, 1, 1]


def likeliest(model, trainables, tokens, lengths, text):
    """The likeliest token after each prompt and each prefix of the text, without a cache: greedy decoding."""
    rows = [np.concatenate([row[:length], new]) for row, length, new in zip(tokens, lengths, text, strict=True)]
    inputs = np.stack([np.pad(row, (0, 27 - row.size)) for row in rows]).astype(np.int32)
    best = np.asarray(jax.jit(model.fwd)((inputs, lengths + 20), trainables)[0].argmax(-1))
    return np.stack([row[length - 1 : length + 19] for row, length in zip(best, np.asarray(lengths), strict=True)])


def test_ring_buffers_and_int8_caches_are_rewound_too():
    model = Windowed()
    tokens, lengths = prompts(23, 9, 2, 4)
    trainables, _ = model.init(jax.random.key(0), tokens)
    want = zoo.generate(model, trainables, tokens, lengths, max_new_tokens=12)
    found = zoo.speculative_generate(
        *(model, trainables, model, perturb(trainables, 0.2), tokens, lengths), max_new_tokens=12, draft_tokens=3
    )
    np.testing.assert_array_equal(found.tokens, want.tokens)
    assert 0.1 < float(found.acceptance.mean()) < 1.0


def test_sampled_tokens_have_the_distribution_of_the_large_model():
    vocabulary, rows, sampler = 5, 4096, zoo.Sample(temperature=0.9, top_k=4)
    model, trainables = tiny_gpt2(vocabulary=vocabulary, width=8, depth=1, factor=8.0)
    draft, draft_trainables = tiny_gpt2(seed=5, vocabulary=vocabulary, width=4, depth=1, factor=8.0)
    prompt = [1, 3]

    def odds(model, trainables):
        """The probability of each text of three tokens."""
        texts = np.array(list(itertools.product(range(vocabulary), repeat=3)))
        inputs = np.concatenate([np.tile(prompt, (len(texts), 1)), texts[:, :2]], axis=1).astype(np.int32)
        logits = np.asarray(jax.jit(model.fwd)(inputs, trainables)[0][:, 1:], np.float64) / 0.9
        cut = np.sort(logits, axis=-1)[..., -4:-3]
        each = np.where(logits >= cut, np.exp(logits), 0.0)
        each = np.take_along_axis(each / each.sum(-1, keepdims=True), texts[..., None], axis=-1)
        return each.prod(axis=(1, 2))

    def p_value(counts, odds):
        expected = rows * odds
        assert not counts[expected == 0].any()
        is_rare = expected < 5
        merged = [np.append(each[~is_rare], each[is_rare].sum()) for each in (counts, expected)]
        return stats.chisquare(*(each[merged[1] > 0] for each in merged)).pvalue

    found = zoo.speculative_generate(
        *(model, trainables, draft, draft_trainables, np.tile(np.int32(prompt), (rows, 1))),
        max_new_tokens=3,
        draft_tokens=2,
        sampler=sampler,
        rng=jax.random.key(0),
    )
    counts = np.bincount(np.asarray(found.tokens) @ [vocabulary**2, vocabulary, 1], minlength=vocabulary**3)
    assert 0.05 < float(found.acceptance.mean()) < 0.95
    wanted, drafted = odds(model, trainables), odds(draft, draft_trainables)
    assert p_value(counts, wanted) > 0.01
    mixed = 0.9 * wanted + 0.1 * drafted * (wanted > 0) / drafted[wanted > 0].sum()  # a tenth of the drafts would show
    assert p_value(counts, mixed) < 1e-6


class Recurrent(mlax.Composite):
    """A model whose past is not in a KV cache."""

    def parts(self):
        return {"embed": nn.Embed(9, 8), "mamba": nn.Mamba(8, states=2)}

    def wire(self, sub, tokens, lengths=None):
        return sub.embed(sub.mamba(sub.embed(tokens)))


def test_what_cannot_be_speculated_is_an_error():
    model, trainables = tiny_gpt2(width=8, depth=1)
    other, other_trainables = tiny_gpt2(vocabulary=9, width=8, depth=1)
    mamba = mlax.frozen(Recurrent)()
    tokens = jnp.ones((1, 3), "int32")
    state = mamba.init(jax.random.key(0), tokens)[0]

    def run(*models, **options):
        zoo.speculative_generate(*models, tokens, **{"max_new_tokens": 4, **options})

    with pytest.raises(ValueError, match="the model has 50 tokens, but the draft model 9"):
        run(model, trainables, other, other_trainables)
    with pytest.raises(ValueError, match="draft_tokens is 0"):
        run(model, trainables, model, trainables, draft_tokens=0)
    with pytest.raises(ValueError, match="the sampler has a repetition_penalty"):
        run(model, trainables, model, trainables, sampler=zoo.Sample(repetition_penalty=1.2), rng=jax.random.key(0))
    with pytest.raises(ValueError, match="needs a key"):
        run(model, trainables, model, trainables, sampler=zoo.Sample())
    with pytest.raises(ValueError, match=r"the state mamba/.* cannot be rewound"):
        run(other, other_trainables, mamba, state)
