"""Continuous batching: requests of different lengths decoded in one batch of a fixed shape."""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax.core import Documented, Layer, Tree, check_layer, check_not_donated
from mlax.zoo._arguments import (
    check_max_new_tokens,
    check_positions,
    check_sampler,
    check_stop,
    check_vocabulary,
    explain_errors,
)
from mlax.zoo._decoder import Counters, choose_fusion, init_state, prepare_decoder
from mlax.zoo._generate import Settings, Source, ends_row, share_counters, start
from mlax.zoo._sampling import Greedy, Sample

NONE = np.int32(-2)  # in place of a token of a row that is idle; -1 stands for NaN
SMALLEST_BUCKET = 16


class Batcher(metaclass=Documented):
    """Continuous batching for serving: requests enter and leave a batch of `rows` while it is decoded.

        batcher = zoo.Batcher(model, trainables, rows=8, capacity=1024, stop=50256)
        first = batcher.submit(prompt, max_new_tokens=64)  # a list or an array of tokens
        for id, tokens in batcher:  # as they come, until all requests are done
            ...  # more may be submitted here

    Each row has a KV cache of `capacity` tokens, for a prompt and the text that follows it. Nothing is recompiled when
    requests come and go: there is one program that decodes `chunk` tokens of all rows, and one for each bucket of
    prompt lengths, to which prompts are padded. The cache is donated to each of them and updated in place. Between two
    chunks, rows that have ended are handed to requests that wait. A request gets the tokens of `zoo.generate` with its
    prompt alone and the key `jax.random.fold_in(rng, id)`.

    >>> model = zoo.GPT2(vocabulary=50, positions=32, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> batcher = zoo.Batcher(model, trainables, rows=2, capacity=32)
    >>> ids = [batcher.submit(prompt, max_new_tokens=5) for prompt in ([1, 2, 3], [4], [5, 6])]
    >>> {id: len(tokens) for id, tokens in batcher.run().items()}
    {0: 5, 1: 5, 2: 5}
    """

    _listed = ("submit", "run", "cancel", "is_done")  # by `help`

    def __init__(
        self,
        model: Layer,
        trainables: Tree,
        *,
        rows: int = 8,
        capacity: int = 1024,
        sampler: Greedy | Sample = Greedy(),  # noqa: B008 - a frozen description
        stop: int | Sequence[int] = (),
        rng: jax.Array | None = None,
        buckets: Sequence[int] | None = None,
        chunk: int = 8,
    ):
        check_layer("Batcher", "the model", model)
        check_not_donated("Batcher", trainables=trainables)
        for name, size in (("rows", rows), ("capacity", capacity), ("chunk", chunk)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"Batcher: {name} is {size!r}, but must be an integer of at least 1.")
        check_positions("Batcher", model, capacity, f"the capacity is {capacity}", "pass at most that")
        self.capacity, self.chunk = capacity, chunk
        self.buckets = _check_buckets(buckets, capacity)
        self._rng, stop = check_sampler("Batcher", sampler, rng), check_stop("Batcher", stop)
        fuse = choose_fusion(trainables)
        decoder, weights = prepare_decoder(model, capacity, trainables, rows=rows, fuse=fuse)
        settings = Settings(model, capacity, sampler.structure(), "right", 0, False)
        self._program = Program(decoder, settings)
        self._source = Source(weights, sampler.numbers(), stop, None)
        tokens, lengths = jnp.zeros((rows, 1), np.int32), jnp.ones(rows, np.int32)
        with explain_errors("Batcher", model, tokens, lengths, ()):
            self._slots = _empty_slots(self._program, self._source, (tokens, lengths), self._rng)
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: dict[int, int] = {}  # the request of each row
        self._ready: collections.deque[tuple[int, list[int]]] = collections.deque()  # tokens to yield
        self._submitted = 0

    def submit(self, prompt: Any, max_new_tokens: int) -> int:
        """Queue a prompt, a sequence of tokens; returns its id, by which iteration names its tokens."""
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or not prompt.size or prompt.dtype.kind not in "iu":
            raise ValueError(
                f"Batcher: the prompt is {prompt.dtype}{list(prompt.shape)}, but must be integers (t,), the tokens of "
                "one text, at least one; a tokenizer makes them: tokenizer.encode([text])[0][0]."
            )
        check_max_new_tokens("Batcher", max_new_tokens)
        check_vocabulary("Batcher", self._program.settings.model, prompt)
        needed = prompt.size + max_new_tokens - 1  # the last token is not stored
        if needed > self.capacity or prompt.size > self.buckets[-1]:
            raise ValueError(
                f"Batcher: a prompt of {prompt.size} tokens and {max_new_tokens} new ones need a capacity of {needed}, "
                f"but there are {self.capacity} slots in each row, and prompts may have {self.buckets[-1]} tokens; "
                "pass a larger capacity, or a shorter prompt."
            )
        self._submitted += 1
        id = self._submitted - 1
        self._waiting.append(Request(id, prompt.astype(np.int32), max_new_tokens))
        return id

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """(id, tokens) as they come, until no request is left; a stop token is the last one of its request, or -1.

        -1 stands for logits that are NaN.
        """
        while self._ready or self._waiting or self._running:
            if not self._ready:
                self._enter_requests()
                self._decode_chunk()
            yield self._ready.popleft()

    def run(self) -> dict[int, list[int]]:
        """The tokens of all requests by id, when all of them are done."""
        results: dict[int, list[int]] = collections.defaultdict(list)
        for id, tokens in self:
            results[id] += tokens
        return dict(results)

    def is_done(self, id: int) -> bool:
        """Whether all tokens of a request came."""
        if not 0 <= id < self._submitted:
            raise ValueError(f"Batcher: there is no request {id!r}; {self._submitted} were submitted, from 0.")
        left = {*self._running.values(), *(each.id for each in self._waiting), *(other for other, _ in self._ready)}
        return id not in left

    def cancel(self, id: int) -> None:
        """Forget a request, of which no further tokens come; its row is free."""
        if self.is_done(id):
            return
        self._waiting = collections.deque(each for each in self._waiting if each.id != id)
        self._ready = collections.deque(each for each in self._ready if each[0] != id)
        for row in [row for row, other in self._running.items() if other == id]:
            del self._running[row]
            self._slots = _stop_row(self._slots, np.int32(row))

    def _enter_requests(self) -> None:
        """Hand free rows to waiting requests, and compute the first token of each."""
        free = [row for row in range(self._slots.token.shape[0]) if row not in self._running]
        for row in free:
            if not self._waiting:
                return
            request = self._waiting.popleft()
            self._running[row] = request.id
            length = request.prompt.size
            bucket = next(size for size in self.buckets if size >= length)
            prompt = np.pad(request.prompt, (0, bucket - length))[None]
            source = self._source._replace(rng=_request_key(self._rng, request.id))
            self._slots = _enter(
                self._program, self._slots, source, prompt, np.array([length], np.int32), row, request.max_new_tokens
            )
            token, remaining = jax.device_get((self._slots.token, self._slots.remaining))
            if not remaining[row]:
                del self._running[row]
            self._ready.append((request.id, [int(token[row])]))

    def _decode_chunk(self) -> None:
        if not self._running:
            return
        self._slots, tokens = _decode(self._program, self.chunk, self._slots, self._source)
        tokens, remaining = jax.device_get((tokens, self._slots.remaining))
        running = dict(self._running)
        self._running = {row: id for row, id in running.items() if remaining[row]}
        for row, id in running.items():
            if new := [int(token) for token in tokens[:, row] if token != NONE]:
                self._ready.append((id, new))


class Request(NamedTuple):
    """A prompt that waits for a row."""

    id: int
    prompt: np.ndarray  # (t,) int32
    max_new_tokens: int


class Slots(NamedTuple):
    """What the rows of a batch hold; donated to every program."""

    token: Any  # (rows,) int32, the last one
    index: Any  # (rows,) int32, the tokens of each request so far
    remaining: Any  # (rows,) int32, the tokens still to come; 0: idle
    keys: Any  # (rows,) of each request; None: the sampler needs none
    seen: Any  # (rows, v) bool, the tokens that a row has, if the sampler needs that
    state: Tree  # of the decoder


class Program(NamedTuple):
    """What the compiled programs depend on, besides shapes."""

    decoder: Any
    settings: Settings


def _empty_slots(program: Program, source: Source, inputs: tuple[Any, Any], rng: Any) -> Slots:
    rows = inputs[1].size
    state = init_state(program.decoder, inputs)
    seen = None
    if program.settings.sampler.needs_seen:
        logits, _ = jax.eval_shape(
            functools.partial(program.decoder.fwd, inference_mode=True), inputs, source.trainables, state
        )
        seen = jnp.zeros((rows, logits.shape[-1]), bool)
    keys = None if rng is None else jax.random.split(rng, rows)
    token, index, remaining = (jnp.zeros(rows, np.int32) for _ in range(3))
    return Slots(token, index, remaining, keys, seen, Counters(program.decoder).drop(state))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _enter(
    program: Program, slots: Slots, source: Source, prompt: Any, lengths: Any, row: Any, max_new_tokens: Any
) -> Slots:
    """The rows after a prompt (1, t) and its first token in one of them, whose earlier request is overwritten."""
    carry, _ = start(program.settings, program.decoder, source, None, prompt, lengths, ())
    carry = share_counters(program.decoder, carry)
    remaining = jnp.where(carry.has_stopped, np.int32(0), jnp.asarray(max_new_tokens, np.int32)[None] - 1)
    keys = None if source.rng is None else source.rng[None]
    new = Slots(carry.token, jnp.ones(1, np.int32), remaining, keys, carry.seen, carry.state)
    return jax.tree.map(lambda whole, one: lax.dynamic_update_index_in_dim(whole, one[0], row, 0), slots, new)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _decode(program: Program, chunk: int, slots: Slots, source: Source) -> tuple[Slots, Any]:
    """The rows after `chunk` more tokens of each, and the tokens (chunk, rows)."""
    sampler, counters = program.settings.sampler, Counters(program.decoder)

    def step(slots: Slots, _: Any) -> tuple[Slots, Any]:
        is_running = slots.remaining > 0
        inputs = slots.token[:, None], is_running.astype(np.int32)  # idle rows store nothing
        state = counters.restore(slots.state)
        logits, state = program.decoder.fwd(inputs, source.trainables, state, inference_mode=True)
        token = _choose_rows(sampler, slots, logits[:, -1], source.numbers)
        remaining = jnp.where(ends_row(token, source.stop), np.int32(0), slots.remaining - 1)
        token = jnp.where(is_running, token, slots.token)
        seen = None if slots.seen is None else slots.seen.at[jnp.arange(token.shape[0]), token].set(True)
        remaining = jnp.where(is_running, remaining, np.int32(0))
        new = Slots(token, slots.index + 1, remaining, slots.keys, seen, counters.drop(state))
        return new, jnp.where(is_running, token, NONE)

    return lax.scan(step, slots, None, length=chunk)


def _choose_rows(sampler: Greedy | Sample, slots: Slots, logits: Any, numbers: Any) -> Any:
    """The next token of each row, by the key of its request, so that it does not depend on the other rows."""
    if slots.keys is None:
        return sampler.choose(None, logits, slots.seen, numbers)

    def choose(key: Any, index: Any, logits: Any, seen: Any) -> Any:
        seen = None if seen is None else seen[None]
        return sampler.choose(jax.random.fold_in(key, index), logits[None], seen, numbers)[0]

    return jax.vmap(choose)(slots.keys, slots.index, logits, slots.seen)


@functools.partial(jax.jit, donate_argnums=0)
def _stop_row(slots: Slots, row: Any) -> Slots:
    return slots._replace(remaining=slots.remaining.at[row].set(0))


def _request_key(rng: Any, id: int) -> Any:
    return None if rng is None else jax.random.fold_in(rng, id)


def _check_buckets(buckets: Sequence[int] | None, capacity: int) -> tuple[int, ...]:
    """The lengths that prompts are padded to, ascending; by default powers of two, and the capacity."""
    if buckets is None:
        powers = [2**n for n in range(SMALLEST_BUCKET.bit_length() - 1, capacity.bit_length())]
        return tuple(sorted({*(size for size in powers if size < capacity), capacity}))
    if not buckets or any(not isinstance(size, int) or not 1 <= size <= capacity for size in buckets):
        raise ValueError(f"Batcher: buckets are {buckets!r}, but must be lengths from 1 to the capacity, {capacity}.")
    return tuple(sorted(set(buckets)))
