"""``Engine``: continuous batching, with results that do not depend on the batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from lmdecode._checks import check_int, check_number
from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.engine.drafts import Drafting
from lmdecode.decoder.engine.request import (
    SECONDS_AHEAD,
    DrawnSequence,
    Grammar,
    Request,
    RequestState,
    SearchedSequence,
    WrittenSequence,
)
from lmdecode.decoder.engine.rows import DrawnRows, Ended, SearchedRows
from lmdecode.decoder.engine.steps import causal_parts, encoder_decoder_parts
from lmdecode.decoder.engine.submission import Encoder, RequestParameters
from lmdecode.decoder.worker_threads import release_worker_threads, stopped_at_exit
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["Engine", "EngineStats"]


class EngineStats(NamedTuple):
    """Counts of an ``Engine``.

    Attributes
    ----------
    running, waiting, free_places : int
        Number of requests with places, of waiting requests, and of free places.
    steps, prompt_tokens, cached_tokens, new_tokens : int
        Since the engine was made: number of steps, of prompt tokens computed and shared, and of
        generated tokens.
    drafted_tokens, accepted_tokens : int
        Number of tokens of drafts, and of those that were chosen.
    cache_bytes : int
        Bytes of keys, values and states of running requests and of kept prompts.
    pauses : int
        Number of times that a running request gave its memory to an older one.
    """

    running: int
    waiting: int
    free_places: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_bytes: int = 0
    pauses: int = 0


_OP = "Engine"


class Engine:
    """Continuous batching of a model, from prompts or inputs to texts.

    Requests arrive at any time. Each step runs the model on the last token of every running
    sequence. A request's tokens are bitwise the same, whichever requests run beside it.

    With a decoder-only model, a step also processes chunks of prompts. Common prefixes of prompts
    are computed once and share keys and values. Those of finished requests stay cached until their
    memory is needed. With an encoder-decoder model, an input is encoded before the step in which
    its decoding begins.

    Parameters
    ----------
    model : PackedCausalModel or PackedDecoder
        The model of a ``Decoding``. ``Decoding.engine`` makes an engine of it.
    max_requests : int
        Number of slots. A request takes one; a search of a decoder-only model takes one for each
        beam. Further requests wait, in order.
    capacity : int
        Maximum length of a sequence in tokens, prompt included. Memory is allocated as it grows.
    max_step_tokens : int
        Maximum number of tokens in a step: running sequences first, then chunks of prompts. For an
        encoder-decoder model: the maximum number of input positions that are encoded before a step.
        One longer input is encoded alone.
    cache_dtype : str
        Format of keys and values; "float32" for an encoder-decoder model.
    dialect : str
        As of ``Sampler``.
    eos_token_id : sequence of int
        End tokens of requests that give none.
    store : KVStore, optional
        A store with a decoder-only model's fingerprint. Stored prefixes of prompts are loaded, and
        computed ones are stored. It must stay open while the engine runs.
    cache_bytes : int, optional
        For a decoder-only model: the most bytes of keys, values and states, of running requests and
        of prompts that are kept for others to share. What was used longest ago is forgotten first.
        If running requests need more, the youngest pauses, and later goes on with the tokens that
        it would have had. None: as many as all slots take, and a prompt is kept in a free slot.
    num_beams, source : int, optional
        For an encoder-decoder model: the maximum number of beams of a search, 4 by default; the
        maximum number of positions of an input, by default Whisper's. Memory for all slots is
        allocated at once.
    encoder, decoder_start_token_id, request_of_config
        For an encoder-decoder model: the encoder of inputs, the prompt of a request without one,
        and the function that makes a search of a ``generation_config``.
    drafting : Drafting, optional
        For a decoder-only model: drafts, which a step reads after texts. A text takes the tokens
        that it would have chosen without. Drafts have at most half of the room of a step while
        prompts are read. Searches have none. A failure of the drafts is a ``RuntimeWarning``.

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
        model: PackedCausalModel | PackedDecoder,
        *,
        max_requests: int,
        capacity: int,
        max_step_tokens: int = 512,
        cache_dtype: str = "float32",
        dialect: str = "transformers",
        eos_token_id: Sequence[int] = (),
        store: Any = None,
        num_beams: int | None = None,
        source: int | None = None,
        encoder: Encoder | None = None,
        decoder_start_token_id: int | None = None,
        request_of_config: Callable[[Any, Any], BeamRequest] | None = None,
        drafting: Drafting | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        if cache_bytes is not None:
            cache_bytes = check_int(_OP, "cache_bytes", cache_bytes, 1, 1 << 50)
        given: dict[str, Any] = {
            "max_requests": max_requests, "capacity": capacity, "max_step_tokens": max_step_tokens,
            "cache_dtype": cache_dtype, "dialect": dialect, "eos_token_id": tuple(eos_token_id),
            "store": store, "num_beams": num_beams, "source": source, "encoder": encoder,
            "decoder_start_token_id": decoder_start_token_id,
            "request_of_config": request_of_config, "drafting": drafting,
            "cache_bytes": cache_bytes,
        }  # fmt: skip
        if isinstance(model, PackedCausalModel):
            parts = causal_parts(model, **given)
        else:
            parts = encoder_decoder_parts(model, **given)
        self._model, self._submission, self.max_requests = parts
        self.capacity, self._vocab = self._submission.capacity, self._submission.vocab
        self.cache_bytes = cache_bytes
        self._drawn = DrawnRows(self.max_requests, self._vocab, dialect)
        self._searched = SearchedRows(self._model.caches, self._vocab)
        self._arrived: deque[WrittenSequence] = deque()  # without places
        self._steps = self._new_tokens = 0  # of searches
        self._pauses = 0
        self._lock = threading.RLock()  # held during a step
        self._stepper: int | None = None  # the thread that runs a step
        self._asking: set[int] = set()  # threads that wait for the lock to run one
        # Sequences that have slots, from before they take them until their requests have ended.
        self._seated: dict[WrittenSequence, None] = {}
        self._life = threading.Lock()  # of start and stop
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stops = self._has_cancelled = False

    def __repr__(self) -> str:
        stats, state = self.stats, "started" if self.is_started else "not started"
        return (
            f"Engine({stats.running} requests running, {stats.waiting} waiting, room for "
            f"{self.max_requests} of {self.capacity} tokens, {state})"
        )

    # ---- requests

    def submit(
        self,
        prompt_ids: Sequence[int] | Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        min_tokens: int | None = 0,
        do_sample: bool | None = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | Tensor | None = None,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        input_ids: Sequence[int] | Tensor | None = None,
        input_features: Any = None,
        memory: Tensor | None = None,
        generation_config: Any = None,
        **parameters: Unpack[RequestParameters],
    ) -> Request:
        """Submit a request. Any thread may call this at any time.

        Parameters
        ----------
        prompt_ids : sequence of int or Tensor
            [length] token ids, at least one. For an encoder-decoder model: the decoder's prompt;
            None is its start token.
        max_new_tokens : int
            Maximum number of new tokens. None: the value of ``generation_config``.
        min_tokens : int
            Number of new tokens before which end tokens are banned.
        do_sample : bool, optional
            Whether to sample. False: the largest logit wins. None: True if a seed or a parameter
            such as ``temperature`` or ``top_p`` is given.
        seed : int, optional
            Seed of the noise, at least 0. The tokens are those of ``generate(seed=)`` for this
            prompt alone. None: the seed is drawn from torch's generator.
        eos_token_id : int or sequence of int, optional
            End tokens; () is no end token. None: the model's.
        logprobs : int, optional
            0 to 64: the request returns ``TokenLogprob``, with this number of best tokens.
        grammar : Grammar, optional
            Constrains the tokens. It belongs to this request alone: see ``Grammar``.
        input_ids : sequence of int or Tensor
            [source] token ids of the encoder, without padding. An encoder-decoder model takes this,
            ``input_features`` or ``memory``.
        input_features : Tensor or array
            [channels, frames] floats, the input of Whisper's encoder.
        memory : Tensor
            [source, memory_size] floats, the encoder's output.
        generation_config : transformers.GenerationConfig, optional
            For an encoder-decoder model: the request is searched as ``generate()`` does with this
            config. A value of None in it is the model's. Only ``max_new_tokens`` and ``prompt_ids``
            may be given with it.
        **parameters
            Those of ``SamplingParameters``. If they include a ``trie`` or ``num_beams`` above 1,
            they are parameters of a ``BeamRequest``, and the request is a beam search.

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
            encoder_inputs={
                "input_ids": input_ids,
                "input_features": input_features,
                "memory": memory,
            },
            generation_config=generation_config,
            **parameters,
        )
        return self._submit(sequence)

    def submit_search(
        self,
        search: BeamRequest,
        *,
        token_rules: TokenRules | None = None,
        input_ids: Sequence[int] | Tensor | None = None,
        input_features: Any = None,
        memory: Tensor | None = None,
    ) -> Request:
        """Submit a beam search, as ``submit`` does with parameters of a search.

        Parameters
        ----------
        search : BeamRequest
            The search, without ``coverage_penalty``. Its ``request_id`` is ignored.
        token_rules : TokenRules, optional
            Rules of one slot, which replace those of the parameters of ``search``: see
            ``lmdecode.beam.token_rules``.
        input_ids, input_features, memory
            Input of an encoder-decoder model: see ``submit``.

        Returns
        -------
        Request
            Its tokens become available when the search ends.

        Raises
        ------
        ValueError, TypeError
            Names what does not fit; nothing has been submitted then.
        """
        given = {"input_ids": input_ids, "input_features": input_features, "memory": memory}
        return self._submit(self._submission.search_of(self, search, token_rules, given))

    def _submit(self, sequence: WrittenSequence) -> Request:
        self._model.check_fits(sequence)
        with self._wake:
            self._arrived.append(sequence)
            self._wake.notify_all()
        return Request(sequence.request)

    def drop_cancelled(self) -> None:
        """Have the next step drop cancelled requests: there is one while they are unfinished."""
        self._has_cancelled = True

    # ---- running

    def start(self) -> None:
        """Start a background thread that runs the steps, until ``stop``.

        The thread keeps the engine alive. A forked child has no such thread and starts its own.
        """
        self.check_outside("start")
        with self._life:
            if not self.is_started:
                self._stops = False
                release_worker_threads()  # those of loading the model would slow the engine's
                self._thread = threading.Thread(
                    target=self._run, name="lmdecode engine", daemon=True
                )
                self._thread.start()
                stopped_at_exit.add(self)

    def stop(self) -> None:
        """Stop the thread after its current step; unfinished requests are kept and can resume."""
        self.check_outside("stop")
        with self._life:
            with self._wake:
                self._stops = True
                self._wake.notify_all()
            if self._thread is not None:
                self._thread.join()
            self._thread = None
            stopped_at_exit.discard(self)
        with self._lock:  # waiting readers run the steps themselves
            self._model.flush()
            for sequence in (*self._seated, *self._arrived):
                sequence.request.tell()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_started(self) -> bool:
        """Whether the background thread runs the steps."""
        thread = self._thread
        return thread is not None and thread.is_alive()  # in a forked child it is not

    def check_outside(self, method: str) -> None:
        """Raise RuntimeError within a step, as when a grammar calls a method of the engine."""
        if self._stepper == threading.get_ident():
            raise RuntimeError(
                f"{_OP}: {method} was called from within a step, as by a grammar; expected outside"
            )

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stops or self.has_work)
                if self._stops:
                    return
            try:
                self.step()
            except BaseException:  # the requests have it
                continue

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished requests."""
        return bool(
            self._drawn.running or self._model.reading or self._searched.running or self._arrived
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scratch, used or not."""
        return self._model.nbytes

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        return EngineStats(
            running=len(self._seated),
            waiting=len(self._arrived),
            free_places=self._model.num_free,
            steps=self._steps,
            prompt_tokens=self._model.prompt_tokens,
            cached_tokens=self._model.cached_tokens,
            new_tokens=self._new_tokens + self._drawn.num_chosen,
            drafted_tokens=self._drawn.num_drafted,
            accepted_tokens=self._drawn.num_accepted,
            cache_bytes=self._model.used_bytes,
            pauses=self._pauses,
        )

    def step(self) -> bool:
        """Run a step: admit requests to slots, run the model, and choose the next tokens.

        Returns
        -------
        bool
            Whether there are unfinished requests.

        Raises
        ------
        Exception
            The error that stopped the step, such as a ``MemoryError``. It ends all requests that
            have slots.
        """
        return self._step("step", None)

    def run_ahead(self, seconds: float = SECONDS_AHEAD) -> bool:
        """Run steps for about so many seconds: fewer if a request ends, or needs Python each step.

        The tokens are those of ``step``, and come all at once. Sampled texts of a decoder-only
        model, without grammars, log-probabilities and drafts, need nothing of Python.

        Parameters
        ----------
        seconds : float
            A step that begins earlier ends later. Signals, cancelled and new requests wait so long.

        Returns
        -------
        bool
            Whether there are unfinished requests.

        Raises
        ------
        Exception
            As of ``step``.
        """
        return self._step("run_ahead", check_number(_OP, "run_ahead's seconds", seconds))

    def _step(self, method: str, seconds: float | None) -> bool:
        self.check_outside(method)
        thread = threading.get_ident()
        told: list[RequestState] = []
        self._asking.add(thread)
        try:
            with self._lock, torch.no_grad():
                if len(self._asking) > 1:
                    seconds = None  # a lock that is free more often comes to those who wait, too
                try:
                    self._stepper = thread
                    if self._has_cancelled:
                        self._has_cancelled = False
                        self._drop_cancelled(told)
                    if self._arrived:
                        self._admit()
                    self._compute(told, seconds)
                except BaseException as error:
                    self._fail_all(error, told)
                    raise
                finally:
                    self._stepper = None
                    for request in told:
                        request.tell()
                return self.has_work
        finally:
            self._asking.discard(thread)

    def _drop_cancelled(self, told: list[RequestState]) -> None:
        cancelled = [s for s in self._seated if s.request.is_cancelled]
        for sequence in cancelled:
            self._stop(sequence)
        self._leave_all([Ended(s, "cancelled") for s in cancelled], told)
        for sequence in [s for s in tuple(self._arrived) if s.request.is_cancelled]:
            sequence.request.end("cancelled")
            told.append(sequence.request)
            self._arrived.remove(sequence)

    def _stop(self, sequence: WrittenSequence) -> None:
        """Remove a sequence from those that read or write."""
        if sequence in self._model.reading:
            self._model.reading.remove(sequence)
        elif isinstance(sequence, SearchedSequence):
            self._searched.end(sequence)
        elif sequence in self._drawn.running:
            assert isinstance(sequence, DrawnSequence)
            self._drawn.end(sequence)

    def _pause(self, sequence: WrittenSequence) -> None:
        """Take the places of the youngest sequence, which waits before all others for new ones.

        What it has read of its prompt is kept while there is memory; a search begins anew.
        """
        self._stop(sequence)
        self._model.leave(sequence, is_sound=True)
        sequence.pause()
        self._arrived.appendleft(sequence)
        del self._seated[sequence]
        self._pauses += 1

    def _admit(self) -> None:
        """Give free slots to the requests that have waited longest."""
        while self._arrived and self._model.has_room(self._arrived[0]):
            sequence = self._arrived[0]
            self._seated[sequence] = None
            try:
                self._model.begin(sequence)
            finally:  # requests with places fail with the step
                if sequence.places:
                    self._arrived.popleft()
                    sequence.request.placed()
                else:
                    del self._seated[sequence]

    def _compute(self, told: list[RequestState], seconds: float | None) -> None:
        """Run the model, and choose the next tokens: with seconds, of many steps where it can."""
        drawn, searched = self._drawn, self._searched
        if seconds is not None and not searched.running and (most := drawn.steps_ahead) > 1:
            if (run := self._model.ahead(drawn)) is not None:
                told += [sequence.request for sequence in drawn.running]
                steps, ended = drawn.run_ahead(most, run, seconds)
                self._steps += steps
                self._leave_all(ended, told)
                return
        for end in self._model.encode():
            self._leave(end, told)
        while not self._model.has_memory(drawn, searched) and len(self._seated) > 1:
            self._pause(next(reversed(self._seated)))
        step = self._model.read(drawn, searched)
        if step is None:
            return
        self._steps += 1
        for sequence in step.begun:
            if isinstance(sequence, DrawnSequence):
                drawn.begin(sequence)
            else:
                assert isinstance(sequence, SearchedSequence)
                searched.begin(sequence)
        ended = list[Ended]()
        num_drawn = len(drawn.running) + sum(map(len, step.drafts))
        if drawn.running:
            told += [sequence.request for sequence in drawn.running]
            ended = drawn.step(step.logits[:num_drawn], step.drafts)
        if searched.running:
            of_searches = searched.step(step.logits[num_drawn:])
            self._new_tokens += sum(e.sequence.request.stats.new_tokens
                                              for e in of_searches)  # fmt: skip
            ended += of_searches
        if ended:
            self._leave_all(ended, told)

    def _leave_all(self, ended: Sequence[Ended], told: list[RequestState]) -> None:
        for end in ended:
            if end.sequence in self._drawn.running:
                self._stop(end.sequence)
            self._leave(end, told)

    def _leave(self, end: Ended, told: list[RequestState]) -> None:
        """Free the slots of a sequence that has no rows left, and end its request.

        Its prompt is cached only if tokens were chosen after it: a NaN would spoil the cache.
        """
        sequence = end.sequence
        is_sound = bool(sequence.request.tokens) and end.reason != "error"
        self._model.leave(sequence, is_sound=is_sound)
        sequence.request.end(end.reason, end.error)
        told.append(sequence.request)
        del self._seated[sequence]

    def _fail_all(self, error: BaseException, told: list[RequestState]) -> None:
        """End every request that has a slot, and reset the engine for the waiting ones."""
        self._model.clear()
        self._has_cancelled = True  # those that wait, too, may not have been dropped
        for sequence in self._seated:
            if sequence.places:
                self._model.leave(sequence, is_sound=False)
            if sequence in self._arrived:
                self._arrived.remove(sequence)
            if sequence.request.reason is not None:
                continue  # it had ended
            failure = RuntimeError(f"Engine: a step failed ({error})")
            failure.__cause__ = error
            sequence.request.end("error", failure)
            told.append(sequence.request)
        self._seated.clear()
        self._drawn.clear()
        self._searched = SearchedRows(self._model.caches, self._vocab)
