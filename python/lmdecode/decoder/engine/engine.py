"""``Engine``: prompts to texts, any number at a time, each as if it were alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_int
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.places import Places
from lmdecode.decoder.engine.request import Request
from lmdecode.decoder.engine.rows import (
    DrawnRows,
    DrawnSequence,
    Ended,
    Grammar,
    SearchedRows,
    SearchedSequence,
    WrittenSequence,
)
from lmdecode.decoder.engine.stored_prompts import StoredPrompts
from lmdecode.decoder.engine.submission import Submission
from lmdecode.sampling.sampler_rows import ORDERS

__all__ = ["Engine", "EngineStats"]

_OP = "Engine"
_Part = tuple[WrittenSequence, int]  # of whose prompt, and how many tokens


class EngineStats(NamedTuple):
    """Counts of an ``Engine``.

    Attributes
    ----------
    running, waiting, free_places : int
        Requests that have places, those that wait for some, and places.
    steps, prompt_tokens, cached_tokens, new_tokens : int
        Since the engine was made: steps, tokens of prompts that were computed and that were shared,
        and tokens that were written.
    """

    running: int
    waiting: int
    free_places: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int


class Engine:
    """Continuous batching of a decoder-only model, from prompts to texts.

    Requests come at any time. Each step reads a token of every text that is being written, and
    parts of prompts beside them. Prompts that begin alike are computed once: they share keys and
    values, and those of requests that have ended stay until their place is needed. A request's
    tokens are the same, bit for bit, alone and in any company.

    Parameters
    ----------
    model : PackedCausalModel
        Of a ``Decoding``, whose ``engine`` makes such an object.
    max_requests : int
        Places: a request takes one, a search one for each beam. Further requests wait, in order.
    capacity : int
        The most tokens of a text, prompt included. Memory is taken as texts grow.
    max_step_tokens : int
        The most tokens of a step: first those of texts, then of prompts as many as there is room
        for.
    cache_dtype : str
        Of keys and values.
    order : str
        Of ``Sampler``.
    eos_token_id : sequence of int
        What ends a text, unless the request says so.
    store : KVStore, optional
        Of the model's fingerprint: what is stored of a prompt is loaded, and what is read of it
        stored. It must stay open while the engine runs.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.

    Examples
    --------
    ::

        engine = decoding.engine(max_requests=8, capacity=4096)
        for token in engine.submit(prompt_ids, max_new_tokens=100, temperature=0.8, seed=1):
            print(tokenizer.decode(token), end="", flush=True)
    """

    def __init__(
        self,
        model: PackedCausalModel,
        *,
        max_requests: int,
        capacity: int,
        max_step_tokens: int = 512,
        cache_dtype: str = "float32",
        order: str = "transformers",
        eos_token_id: Sequence[int] = (),
        store: Any = None,
    ) -> None:
        max_requests = check_int(_OP, "max_requests", max_requests, 1, 1 << 16, limits="1 to 65536")
        most = model.max_positions or (1 << 30)
        self.capacity = check_int(_OP, "capacity", capacity, 1, most, limits=f"1 to {most}")
        max_step_tokens = check_int(
            _OP, "max_step_tokens", max_step_tokens, 1, 1 << 20, limits="1 to 2^20"
        )
        if max_step_tokens < max_requests:
            raise ValueError(
                f"{_OP}: max_step_tokens is {max_step_tokens}; expected at least {max_requests}, "
                "max_requests: a step reads a token of each"
            )
        if order not in ORDERS:
            raise ValueError(f"{_OP}: order is {order!r}; expected one of {', '.join(ORDERS)}")
        self.max_requests, self._max_step_tokens, self._order = max_requests, max_step_tokens, order
        self._vocab = model.config.vocab_size
        self._submission = Submission(
            self._vocab, self.capacity, max_requests, order, tuple(eos_token_id)
        )
        self._caches = CausalCaches(
            model, max_requests, self.capacity, dtype=cache_dtype, max_rows=max_step_tokens
        )
        self._places = Places(self._caches)
        self._stored = None if store is None else StoredPrompts(store, self._caches)
        self._drawn = DrawnRows(max_requests, self._vocab, order)
        self._searched = SearchedRows(self._caches, self._vocab)
        self._arrived: deque[WrittenSequence] = deque()  # has no place yet
        self._reading: list[WrittenSequence] = []  # a prompt that has not been read to its end
        # The entries of a step like the one before: no prompts, and the same rows.
        self._entries: Tensor | None = None
        self._counts = dict.fromkeys(("steps", "prompt_tokens", "cached_tokens", "new_tokens"), 0)
        self._lock = threading.RLock()  # of whoever does a step
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stops = self._has_cancelled = False

    # ---- requests

    def submit(
        self,
        prompt_ids: Sequence[int] | Tensor,
        *,
        max_new_tokens: int,
        min_tokens: int = 0,
        do_sample: bool | None = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        **parameters: Any,
    ) -> Request:
        """Let a text be written. Any thread may call, at any time.

        Parameters
        ----------
        prompt_ids : sequence of int or Tensor
            [length] token ids, at least one.
        max_new_tokens : int
            It ends there at the latest.
        min_tokens : int
            No end token before so many new tokens.
        do_sample : bool, optional
            Whether tokens are drawn; False: the largest logit is taken. None: whether a seed or a
            parameter such as ``temperature`` or ``top_p`` is given.
        seed : int, optional
            At least 0: of the noise; the text is that of ``generate(seed=)`` for this prompt alone.
            None: it is drawn from torch's generator.
        eos_token_id : int or sequence of int, optional
            What ends the text; () is nothing. None: the model's.
        logprobs : int, optional
            0 to 64: the request gives ``TokenLogprob``, with so many of the best tokens.
        grammar : Grammar, optional
            What limits the tokens, of this request alone: see ``Grammar``.
        **parameters
            Of a ``Sampler``; or of a ``BeamRequest``, where ``num_beams`` of more than 1 or a
            ``trie`` is among them: then it searches.

        Returns
        -------
        Request
            An iterator of its tokens.

        Raises
        ------
        ValueError, TypeError
            Names what does not fit; nothing has been submitted then.
        """
        sequence = self._submission.sequence_of(
            self,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            min_tokens=min_tokens,
            do_sample=do_sample,
            seed=seed,
            eos_token_id=eos_token_id,
            logprobs=logprobs,
            grammar=grammar,
            **parameters,
        )
        with self._wake:
            self._arrived.append(sequence)
            self._wake.notify_all()
        return sequence.request

    def drop_cancelled(self) -> None:
        """Let the next step look for requests that were cancelled, and the thread do it."""
        with self._wake:
            self._has_cancelled = True
            self._wake.notify_all()

    # ---- running

    def start(self) -> None:
        """Let a thread of the engine's own do its steps, until ``stop``."""
        with self._wake:
            if self._thread is None:
                self._stops = False
                self._thread = threading.Thread(
                    target=self._run, name="lmdecode engine", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread after its step; requests stay as they are, and can go on."""
        with self._wake:
            thread, self._stops = self._thread, True
            self._wake.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._wake:
            self._thread = None
        if self._stored is not None:
            self._stored.flush()
        with self._lock:  # those who wait do the steps themselves
            for sequence in (*self._everyone, *self._arrived):
                sequence.request._tell()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_started(self) -> bool:
        """Whether the engine's own thread does the steps."""
        return self._thread is not None

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stops or self.has_work)
                if self._stops:
                    return
            try:
                self.step()
            except Exception:  # the requests have it
                continue

    @property
    def has_work(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._drawn.running or self._reading or self._searched.running or self._arrived)

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        waiting, free = len(self._arrived), self._places.num_free
        return EngineStats(len(self._everyone), waiting, free, **self._counts)

    def step(self) -> bool:
        """Do a step: give places to requests, read their tokens, and choose the next ones.

        Returns
        -------
        bool
            Whether there are requests that have not ended.

        Raises
        ------
        Exception
            What stopped the step, such as a ``MemoryError``: all requests with places end by it.
        """
        with self._lock, torch.no_grad():
            told: list[Request] = []
            try:
                if self._has_cancelled:
                    self._has_cancelled = False
                    self._drop_cancelled(told)
                if self._arrived:
                    self._admit()
                self._compute(told)
            except BaseException as error:
                self._fail_all(error, told)
                raise
            finally:
                for request in told:
                    request._tell()
            return self.has_work

    @property
    def _everyone(self) -> list[WrittenSequence]:
        """Those who have places."""
        return [*self._reading, *self._drawn.running, *self._searched.running.values()]

    def _drop_cancelled(self, told: list[Request]) -> None:
        for sequence in [s for s in self._everyone if s.request._is_cancelled]:
            if sequence in self._reading:
                self._reading.remove(sequence)
            elif isinstance(sequence, DrawnSequence):
                self._drawn.end(sequence)
            elif isinstance(sequence, SearchedSequence):
                self._searched.end(sequence)
            self._leave(Ended(sequence, "cancelled"), told)
        for sequence in [s for s in tuple(self._arrived) if s.request._is_cancelled]:
            self._arrived.remove(sequence)
            sequence.request._end("cancelled")
            told.append(sequence.request)

    def _admit(self) -> None:
        """Give places to those who have waited for longest, as far as there are some."""
        while self._arrived and self._arrived[0].num_places <= self._places.num_free:
            sequence = self._arrived.popleft()
            prompt = sequence.request.prompt_ids
            of, length = self._places.longest_common(prompt)
            leader = next((s for s in self._reading if s.places[0] == of), None)
            sequence.places = self._places.take(prompt, sequence.num_places, of)
            sequence.request._placed()
            self._reading.append(sequence)
            if leader is not None and leader.read < length:
                leader.stops.add(length)
                sequence.follows = leader, length
            else:
                self._begin_with(sequence, of, length)

    def _begin_with(self, sequence: WrittenSequence, of: int, length: int) -> None:
        """Let a sequence begin with what a place, or the store, has of its prompt."""
        place, prompt, stored = sequence.places[0], sequence.request.prompt_ids, self._stored
        if stored is not None:
            sequence.keep_at = stored.keep_at(prompt)
            sequence.stops.add(sequence.keep_at)
            if place != of:
                sequence.read = stored.load(place, prompt, length)
        if sequence.read:
            sequence.request._cached_tokens = sequence.read
            self._counts["cached_tokens"] += sequence.read
        elif length:
            self._share(sequence, of, length)
        if sequence.read >= sequence.keep_at:
            sequence.keep_at = 0

    def _share(self, sequence: WrittenSequence, of: int, length: int) -> None:
        if self._places.share(sequence.places[0], of, length):
            sequence.read = sequence.request._cached_tokens = length
            self._counts["cached_tokens"] += length

    def _follow(self) -> None:
        """Let sequences take what others have read of the same prompt."""
        for sequence in self._reading:
            if sequence.follows is None:
                continue
            leader, length = sequence.follows
            if leader.request.finished:
                sequence.follows = None  # and reads by itself
            elif leader.read >= length:
                sequence.follows = None
                self._share(sequence, leader.places[0], length)

    def _compute(self, told: list[Request]) -> None:
        """Read tokens, and choose the next ones."""
        drawn, searched = self._drawn, self._searched
        parts: tuple[list[_Part], list[_Part]] = ([], [])
        if self._reading or self._entries is None or drawn.tokens is None:
            if self._reading:
                parts = self._parts()
            ids, entries = self._inputs(*parts)
            is_like = not (parts[0] or parts[1] or searched.running)
            self._entries = entries if is_like else None
        else:
            ids, entries = drawn.tokens, self._entries
        if not len(entries):
            return
        logits = self._caches.forward(ids, entries, self._num_logits(parts))
        self._counts["steps"] += 1
        for sequence, count in (*parts[0], *parts[1]):
            sequence.read += count
            self._counts["prompt_tokens"] += count
            if self._stored is not None and sequence.read == sequence.keep_at:
                self._stored.keep(sequence.places[0], sequence.request.prompt_ids, sequence.read)
            if sequence.read == len(sequence.prompt):
                self._begin(sequence)
        ended: list[Ended] = []
        num_drawn = len(drawn.running)
        if num_drawn:
            told += [sequence.request for sequence in drawn.running]
            ended = drawn.step(logits[:num_drawn])
            self._counts["new_tokens"] += num_drawn - sum(e.reason == "error" for e in ended)
            for end in ended:
                assert isinstance(end.sequence, DrawnSequence)
                drawn.end(end.sequence)
        if searched.running:
            of_searches = searched.step(logits[num_drawn:])
            self._counts["new_tokens"] += sum(e.sequence.request.stats.new_tokens
                                              for e in of_searches)  # fmt: skip
            ended += of_searches
        for end in ended:
            self._leave(end, told)

    def _parts(self) -> tuple[list[_Part], list[_Part]]:
        """Return of which prompts a step reads how much: those that draw, and that search."""
        self._follow()
        room = self._max_step_tokens - len(self._drawn.running) - len(self._searched.tokens)
        drawn, searched = list[_Part](), list[_Part]()
        for sequence in self._reading:
            if room and sequence.follows is None:
                count = sequence.next_part(room)
                room -= count
                is_search = isinstance(sequence, SearchedSequence)
                (searched if is_search else drawn).append((sequence, count))
        return drawn, searched

    def _num_logits(self, parts: tuple[list[_Part], list[_Part]]) -> int:
        ends = sum(s.read + count == len(s.prompt) for part in parts for s, count in part)
        return len(self._drawn.running) + len(self._searched.places) + ends

    def _inputs(self, drawn: list[_Part], searched: list[_Part]) -> tuple[Tensor, Tensor]:
        """Return a step's tokens and entries: the logits of those who draw come first."""
        ids = [sequence.last for sequence in self._drawn.running]
        entries = [(sequence.places[0], 1, 0, 1) for sequence in self._drawn.running]
        _add_parts(drawn, ids, entries)
        ids += self._searched.tokens.tolist()
        entries += [(place, 1, 0, 1) for place in self._searched.places]
        _add_parts(searched, ids, entries)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(entries, dtype=torch.int64)

    def _begin(self, sequence: WrittenSequence) -> None:
        """Let a sequence write, whose prompt has been read."""
        self._reading.remove(sequence)
        if isinstance(sequence, DrawnSequence):
            self._drawn.begin(sequence)
        else:
            assert isinstance(sequence, SearchedSequence)
            self._searched.begin(sequence)

    def _leave(self, end: Ended, told: list[Request]) -> None:
        """Give the places of a sequence back, which is in no rows any more; end its request."""
        sequence = end.sequence
        first, *others = sequence.places
        self._places.give_back(first, keep=sequence.read)
        for place in others:
            self._places.give_back(place)
        sequence.places = []
        sequence.request._end(end.reason, end.error)
        told.append(sequence.request)

    def _fail_all(self, error: BaseException, told: list[Request]) -> None:
        """End every request that has a place, and begin anew for those that wait."""
        everyone, self._reading = self._everyone, []
        self._drawn = DrawnRows(self.max_requests, self._vocab, self._order)
        self._searched = SearchedRows(self._caches, self._vocab)
        self._entries = None
        for sequence in everyone:
            for place in sequence.places:
                self._places.give_back(place)
            sequence.places = []
            failure = RuntimeError(f"Engine: a step failed ({error})")
            failure.__cause__ = error
            sequence.request._end("error", failure)
            told.append(sequence.request)


def _add_parts(
    parts: list[_Part], ids: list[int], entries: list[tuple[int, int, int, int]]
) -> None:
    for sequence, count in parts:
        end = sequence.read + count
        ids += sequence.prompt[sequence.read : end]
        entries.append((sequence.places[0], count, 1, int(end == len(sequence.prompt))))
