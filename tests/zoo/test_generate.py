import dataclasses

import jax
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn, zoo
from mlax.inspect import parse_hlo
from tests.asserts import compilations
from tests.zoo.decoders import with_nan

MODEL = zoo.GPT2(vocabulary=23, positions=256, width=16, depth=2, heads=2)
LENGTHS = np.array([7, 4, 1])
PROMPTS = np.random.default_rng(0).integers(0, 23, (3, 7)) * (np.arange(7) < LENGTHS[:, None])


@pytest.fixture(scope="module")
def trainables():
    trainables, _ = MODEL.init(jax.random.key(0), MODEL.example_input())
    return jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 2 else leaf, trainables)


def continue_without_cache(model, trainables, number):
    """Greedy decoding with the whole text at each token: the tokens and their log-probabilities, (b, number) each."""
    fwd = jax.jit(lambda tokens: jax.nn.log_softmax(model.fwd(tokens, trainables, inference_mode=True)[0]))
    text, rows = np.pad(PROMPTS, ((0, 0), (0, number))).astype("int32"), np.arange(3)
    for place in range(number):
        text[rows, LENGTHS + place] = np.asarray(fwd(text))[rows, LENGTHS + place - 1].argmax(-1)
    places = LENGTHS[:, None] + np.arange(number)
    tokens = text[rows[:, None], places]
    return tokens, np.asarray(fwd(text))[rows[:, None], places - 1, tokens]


def instructions_in_loops(program):
    """The instructions of the bodies of loops, and of what they call."""
    loops = [
        each for part in program.computations.values() for each in part.instructions.values() if each.opcode == "while"
    ]
    queue, found = [name for loop in loops for name in loop.called], set()
    while queue:
        name = queue.pop()
        if name not in found and name in program.computations:
            found.add(name)
            queue += [below for each in program.computations[name].instructions.values() for below in each.called]
    return [each for name in found for each in program.computations[name].instructions.values()]


def test_nothing_of_the_size_of_a_cache_is_copied_at_a_token(trainables):
    def generate(trainables, prompts, lengths):
        return zoo.generate(MODEL, trainables, prompts, lengths, max_new_tokens=40, stop=(3, 5))

    program = parse_hlo(jax.jit(generate).lower(trainables, PROMPTS, LENGTHS).compile().as_text())
    instructions = instructions_in_loops(program)
    shape = (3, 2, 64, 8)  # of the keys, and of the values, of each of two layers
    writes = {"scatter", "dynamic-update-slice"}  # the same, depending on the version and the flags of XLA
    caches = [each for each in instructions if each.shapes[0].dims == shape]
    assert len([each for each in caches if each.opcode in writes]) >= 4
    large = {each.opcode for each in instructions if any(other.bytes >= caches[0].bytes for other in each.shapes)}
    assert large <= writes | {"parameter", "get-tuple-element", "tuple", "while", "call", "fusion", "bitcast"}


@pytest.fixture(scope="module")
def text(trainables):
    return continue_without_cache(MODEL, trainables, 40)


def test_greedy_text_is_that_of_a_model_without_a_cache(trainables, text):
    result = zoo.generate(MODEL, trainables, PROMPTS, LENGTHS, max_new_tokens=40, log_probs=True)
    np.testing.assert_array_equal(result.tokens, text[0])
    np.testing.assert_allclose(result.log_probs, text[1], atol=1e-5)
    assert result.lengths.tolist() == [40, 40, 40]


def test_prompts_of_one_length_need_no_lengths(trainables):
    prompts, options = PROMPTS[:2, :3], {"max_new_tokens": 6}
    whole = zoo.generate(MODEL, trainables, prompts, **options)
    counted = zoo.generate(MODEL, trainables, prompts, np.array([3, 3]), **options)
    np.testing.assert_array_equal(whole.tokens, counted.tokens)


def test_rows_end_at_their_first_stop_token_generated_or_streamed(trainables, text):
    stop = (int(text[0][0, 3]), int(text[0][1, 20]))
    options = {"lengths": LENGTHS, "max_new_tokens": 40, "pad": -7}
    rng, broken = jax.random.key(0), with_nan(trainables)
    with compilations() as compiled:
        result = zoo.generate(MODEL, trainables, PROMPTS, **options, stop=stop)
        zoo.generate(MODEL, trainables, PROMPTS, **options, stop=(1, 2), rng=rng)  # a key that Greedy ignores
        invalid = zoo.generate(MODEL, broken, PROMPTS, **options, stop=stop)
    assert len(compiled) == 1
    assert invalid.tokens.tolist() == [[-1] + 39 * [-7]] * 3 and invalid.lengths.tolist() == [1, 1, 1]
    for row, tokens, length in zip(result.tokens, text[0], result.lengths.tolist(), strict=True):
        ends = np.flatnonzero(np.isin(tokens, stop))
        assert length == (ends[0] + 1 if len(ends) else 40)
        np.testing.assert_array_equal(row, [*tokens[:length], *[-7] * (40 - length)])
    assert len(set(result.lengths.tolist())) > 1

    streamed = np.array(list(zoo.stream(MODEL, trainables, PROMPTS, **options, stop=stop, chunk=4))).T
    longest = int(result.lengths.max())
    np.testing.assert_array_equal(streamed, result.tokens[:, :longest])
    streamed = zoo.stream(MODEL, broken, PROMPTS, **options, stop=stop, chunk=4)
    assert [token.tolist() for token in streamed] == [[-1, -1, -1]]


def test_other_numbers_of_a_sampler_and_other_seeds_do_not_recompile_and_samples_are_streamed(trainables):
    def run(seed, temperature, top_p, min_p, penalty):
        sampler = zoo.Sample(temperature=temperature, top_k=20, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
        rng = jax.random.key(seed)
        return zoo.generate(MODEL, trainables, PROMPTS, max_new_tokens=12, sampler=sampler, rng=rng).tokens.tolist()

    first = run(0, 1.0, 0.9, 0.1, 1.2)
    with compilations() as compiled:
        assert run(0, 1.0, 0.9, 0.1, 1.2) == first
        assert run(1, 1.0, 0.9, 0.1, 1.2) != first
        sampled = run(2, 0.5, 0.8, 0.2, 1.5)
    assert not compiled
    sampler = zoo.Sample(temperature=0.5, top_k=20, top_p=0.8, min_p=0.2, repetition_penalty=1.5)
    rng = jax.random.key(2)
    streamed = zoo.stream(MODEL, trainables, PROMPTS, max_new_tokens=12, sampler=sampler, rng=rng, chunk=5)
    assert np.array(list(streamed)).T.tolist() == sampled


@mlax.frozen
class Tiny(mlax.Composite):
    """A language model as a user writes it: rotary embeddings, logits of all tokens, layers in a Series."""

    def parts(self):
        attend = nn.MultiHeadAttention(4, kv_heads=2, causal=True, rotary=nn.Rotary(), qk_norm=nn.RMSNorm())
        return {"embed": nn.Embed(23, 16), "attend": attend, "head": nn.Linear(23)}

    def wire(self, sub, tokens, lengths=None):
        x = sub.embed(tokens)
        return sub.head(x + sub.attend({"x": x, "lengths": lengths}))


def test_models_of_users_are_continued_too_with_any_mixed_precision():
    trainables, _ = Tiny().init(jax.random.key(0), PROMPTS)
    tokens, _ = continue_without_cache(Tiny(), trainables, 9)
    mixed = dtypes.Mixed(Tiny(), compute="float32", output="float32")
    np.testing.assert_array_equal(zoo.generate(mixed, trainables, PROMPTS, LENGTHS, max_new_tokens=9).tokens, tokens)


def test_a_model_with_another_state_is_continued_without_lengths():
    model = mlax.Series(nn.Embed(23, 16), mlax.Residual(nn.Mamba(16)), nn.Linear(23))
    trainables, _ = model.init(jax.random.key(0), PROMPTS)
    result = zoo.generate(model, trainables, PROMPTS, max_new_tokens=5)
    text = np.concatenate([PROMPTS, result.tokens], axis=1)
    wanted = jax.jit(model.fwd)(text, trainables)[0][:, 6:-1].argmax(-1)
    np.testing.assert_array_equal(result.tokens, wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, but must be an integer of at least 1"),
        ({"max_new_tokens": 300}, "need 306 positions, but positions has 256"),
        ({"padding": "middle"}, "padding is 'middle', but must be 'right' or 'left'"),
        ({"lengths": [1, 2, 9]}, "lengths are 1 to 9, but must be between 1 and 7"),
        ({"lengths": [1, 2]}, r"lengths are int32\[2\], but must be integers \(3,\)"),
        ({"prompts": np.zeros(3)}, r"prompts are float32\[3\], but must be integers \(b, t\)"),
        ({"sampler": zoo.Sample()}, "Sample needs a key; pass rng="),
        ({"sampler": zoo.Sample(), "rng": 0}, r"rng is 0, but must be a key: jax\.random\.key\(0\)"),
        ({"sampler": "greedy"}, r"sampler is 'greedy', but must be zoo\.Greedy\(\)"),
        ({"stop": "."}, r"stop is '\.', but must be a token or a sequence of them"),
        ({"inputs": PROMPTS}, r"inputs is a ndarray, but must be a tuple: inputs=\(source, source_lengths\)"),
        ({"prompts": [[1, 2], [3]]}, r"rows of different lengths; pad them, .* tokenizer\.encode\(texts\)"),
        ({"prompts": ["a text"]}, r"prompts are texts, but must be tokens \(b, t\): .* tokenizer\.encode"),
        ({"prompts": PROMPTS + 17}, "the tokens of the prompts are 17 to 39, but the model has 23"),
        ({"prompts": PROMPTS - 1, "lengths": LENGTHS}, "the tokens of the prompts are -1 to"),
    ],
)
def test_wrong_arguments_are_refused(trainables, options, message):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        zoo.generate(MODEL, trainables, **arguments)


def shapes_of(model):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), model.example_input())[0])


def trace(model, prompts, lengths, **options):
    """The shape of the tokens, without a compilation."""
    return jax.eval_shape(
        lambda trainables: zoo.generate(model, trainables, prompts, lengths, **options), shapes_of(model)
    ).tokens.shape


@pytest.mark.parametrize(("padding", "prompts"), [("right", [[5, -100], [5, 6]]), ("left", [[-100, 5], [5, 6]])])
def test_padding_may_be_any_number(padding, prompts):
    assert trace(MODEL, prompts, [1, 2], max_new_tokens=4, padding=padding) == (2, 4)
    with pytest.raises(ValueError, match="are -100 to 6, but the model has 23"):
        trace(MODEL, prompts, None, max_new_tokens=4, padding=padding)


def test_a_model_that_cannot_take_such_inputs_is_refused_with_what_it_needs(trainables):
    def refuse(message, model, weights, lengths=None, **options):
        with pytest.raises(ValueError, match=message):
            zoo.generate(model, weights, PROMPTS, lengths, **{"max_new_tokens": 4, **options})

    bert = zoo.BERTMaskedLM(zoo.BERT(vocabulary=50, positions=16, width=8, depth=2, heads=2))
    refuse("a language model attends with causal=True", bert, {}, LENGTHS)
    llama = zoo.Llama(vocabulary=23, positions=64, width=16, hidden=32, depth=1, heads=2)
    refuse(r"106 positions, but Llama has 64 .*replace\(model, positions=106\)", llama, {}, max_new_tokens=100)
    t5 = zoo.T5(vocabulary=50, width=8, hidden=16, depth=1, heads=2)
    refuse(r"needs a source; pass inputs=\(source, source_lengths\)", t5, shapes_of(t5))
    series = mlax.Series(nn.Embed(23, 16), nn.MultiHeadAttention(2, causal=True), nn.Linear(23))
    refuse(r"Series takes tokens, but no lengths: write wire\(self, sub, tokens, lengths=None\)", series, {}, LENGTHS)
    deeper = zoo.GPT2(vocabulary=23, positions=256, width=16, depth=3, heads=2)
    refuse(r"the shape \(2, .* but the Repeat has 3 layers; pass the variables of this model", deeper, trainables)


def test_rotary_embeddings_with_a_scaling_go_beyond_the_positions_of_training():
    llama = zoo.Llama(vocabulary=23, positions=8, width=16, hidden=32, depth=1, heads=2)
    scaled = dataclasses.replace(llama, rotary=nn.Rotary(scaling=nn.LinearScaling(4.0)))
    assert trace(scaled, PROMPTS, LENGTHS, max_new_tokens=20) == (3, 20)
