"""Continuous batching: each request gets the tokens that it would get alone, and nothing is recompiled for it."""

import jax
import numpy as np
import pytest

from mlax import nn, zoo
from tests.asserts import compilations
from tests.zoo.decoders import Windowed, prompts, tiny_gpt2, with_nan

REQUESTS = ((0, 20), (1, 3), (2, 11), (0, 1), (1, 20))  # (prompt, max_new_tokens)


@pytest.fixture(scope="module")
def gpt2():
    return tiny_gpt2()


@pytest.fixture(scope="module")
def texts():
    tokens, lengths = prompts(50, 7, 2, 18)
    return [np.asarray(row[:length]) for row, length in zip(tokens, lengths, strict=True)]


def generate_alone(gpt2, text, **options):
    prompt = np.pad(text, (0, 18 - text.size))[None]  # of one shape, to compile once
    return zoo.generate(*gpt2, prompt, np.array([text.size]), **options).tokens[0].tolist()


@pytest.fixture(scope="module")
def alone(gpt2, texts):
    """The tokens that each prompt is continued by."""
    return [generate_alone(gpt2, text, max_new_tokens=20) for text in texts]


def cut(tokens, stop):
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def test_each_request_gets_the_tokens_of_generating_it_alone_and_nothing_is_recompiled(gpt2, texts, alone):
    stop = alone[0][12]
    batcher = zoo.Batcher(*gpt2, rows=2, capacity=48, chunk=4, stop=stop)
    ids = [batcher.submit(texts[prompt], size) for prompt, size in REQUESTS]
    found = {id: [] for id in ids}
    late = None
    with compilations() as programs:
        for id, tokens in batcher:
            found.setdefault(id, []).extend(tokens)
            if late is None and batcher.is_done(ids[1]):
                assert not batcher.is_done(ids[0])
                late = batcher.submit(texts[2], 5)  # while the others run
    assert late is not None and batcher.is_done(late)
    for id, (prompt, size) in zip((*ids, late), (*REQUESTS, (2, 5)), strict=True):
        assert found[id] == cut(alone[prompt][:size], stop)
    assert len(found[ids[0]]) < 20  # which the stop token ended
    assert len(programs) == 3  # prompts of up to 16 and of up to 32 tokens, and decoding


def test_a_canceled_request_frees_its_row(gpt2, texts, alone):
    stop = alone[0][12]
    batcher = zoo.Batcher(*gpt2, rows=2, capacity=48, chunk=4, stop=stop)
    ids = [batcher.submit(texts[prompt], 20) for prompt in (0, 0, 1, 2)]
    stream = iter(batcher)
    before = batcher._slots
    assert next(stream) == (ids[0], alone[0][:1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))  # donated, to be updated in place
    for id in ids[:3]:
        batcher.cancel(id)
    assert [batcher.is_done(id) for id in ids] == [True, True, True, False]
    assert batcher.run() == {ids[3]: cut(alone[2], stop)}


def test_a_request_whose_logits_are_nan_ends_with_minus_one(gpt2, texts):
    model, trainables = gpt2
    batcher = zoo.Batcher(model, with_nan(trainables), rows=2, capacity=48, chunk=4, stop=1)
    assert {batcher.submit(texts[0], 20): [-1]} == batcher.run()


def test_a_sampled_request_does_not_depend_on_the_other_rows(texts):
    sampler, rng, gpt2 = (
        zoo.Sample(temperature=0.7, top_k=9, repetition_penalty=1.3),
        jax.random.key(3),
        tiny_gpt2(depth=1),
    )
    batcher = zoo.Batcher(*gpt2, rows=2, capacity=48, sampler=sampler, rng=rng, buckets=(20,))
    ids = [batcher.submit(text, 9) for text in texts]
    found = batcher.run()
    for id, text in zip(ids, texts, strict=True):
        key = jax.random.fold_in(rng, id)
        assert found[id] == generate_alone(gpt2, text, max_new_tokens=9, sampler=sampler, rng=key)


def test_a_quantized_model_with_a_sliding_window_and_an_int8_cache_is_batched_too():
    model = Windowed()
    tokens, lengths = prompts(23, 9, 2, 4)
    trainables, _ = model.init(jax.random.key(0), tokens)
    model, trainables = nn.quantize(model, trainables, "int8")
    batcher = zoo.Batcher(model, trainables, rows=2, capacity=32)
    ids = [batcher.submit(np.asarray(row[:length]), 12) for row, length in zip(tokens, lengths, strict=True)]
    found = batcher.run()
    alone = zoo.generate(model, trainables, tokens, lengths, max_new_tokens=12).tokens
    assert [found[id] for id in ids] == alone.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda batcher: batcher.submit([1] * 30, 4),
            "30 tokens and 4 new ones need a capacity of 33, but there are 32",
        ),
        (lambda batcher: batcher.submit([], 4), "must be integers"),
        (lambda batcher: batcher.submit([[1, 2]], 4), "must be integers"),
        (lambda batcher: batcher.submit([1], 0), "max_new_tokens is 0"),
        (lambda batcher: batcher.submit([1, 50], 4), "the tokens of the prompts are 1 to 50, but the model has 50"),
        (lambda batcher: batcher.is_done(7), "there is no request 7"),
        (lambda batcher: zoo.Batcher(*tiny_gpt2(), capacity=100), "positions has 64 positions"),
        (lambda batcher: zoo.Batcher(*tiny_gpt2(), capacity=32, rows=0), "rows is 0"),
        (lambda batcher: zoo.Batcher(*tiny_gpt2(), capacity=32, buckets=(64,)), "buckets are"),
        (lambda batcher: zoo.Batcher(*tiny_gpt2(), capacity=32, sampler=zoo.Sample()), "needs a key"),
    ],
)
def test_requests_that_cannot_be_served_are_errors(gpt2, call, message):
    with pytest.raises(ValueError, match=message):
        call(zoo.Batcher(*gpt2, rows=1, capacity=32))
