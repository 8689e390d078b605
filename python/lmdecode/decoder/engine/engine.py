"""``Engine``: prompts to texts, any number at a time, each as if it were alone."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.token_rules import TokenRules
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.encoder_inputs import Encoder
from lmdecode.decoder.engine.kinds import causal_parts, encoder_decoder_parts
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
from lmdecode.decoder.engine.stats import EngineStats
from lmdecode.decoder.weights import PackedDecoder

__all__ = ["Engine"]

_OP = "Engine"


class Engine:
    """Continuous batching of a model, from prompts or inputs to texts.

    Requests come at any time, and each step reads a token of every text that is being written. A
    request's tokens are the same, bit for bit, alone and in any company.

    Of a decoder-only model a step reads parts of prompts, too. Prompts that begin alike are
    computed once: they share keys and values, and those of requests that have ended stay until
    their place is needed. Of an encoder-decoder model an input is encoded before the step in which
    its text begins.

    Parameters
    ----------
    model : PackedCausalModel or PackedDecoder
        Of a ``Decoding``, whose ``engine`` makes such an object.
    max_requests : int
        Places: a request takes one. Of a decoder-only model a search takes one for each beam.
        Further requests wait, in order.
    capacity : int
        The most tokens of a text, prompt included. Memory is taken as texts grow.
    max_step_tokens : int
        The most tokens of a step: first those of texts, then of prompts as many as there is room
        for. Of an encoder-decoder model: the most positions of inputs that are encoded before a
        step, unless it is one input.
    cache_dtype : str
        Of keys and values; "float32" for an encoder-decoder model.
    order : str
        Of ``Sampler``.
    eos_token_id : sequence of int
        What ends a text, unless the request says so.
    store : KVStore, optional
        Of a decoder-only model's fingerprint: what is stored of a prompt is loaded, and what is
        read of it stored. It must stay open while the engine runs.
    num_beams, source : int, optional
        Of an encoder-decoder model: the most beams of a search, 4 by default; the most positions of
        an input, by default those of Whisper's inputs. Memory for all places is set aside at once.
    encoder, decoder_start_token_id, request_of_config
        Of an encoder-decoder model: what reads inputs, the prompt of a request without one, and
        what makes a search of a ``generation_config``.

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
        order: str = "transformers",
        eos_token_id: Sequence[int] = (),
        store: Any = None,
        num_beams: int | None = None,
        source: int | None = None,
        encoder: Encoder | None = None,
        decoder_start_token_id: int | None = None,
        request_of_config: Callable[[Any, Any], BeamRequest] | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "max_requests": max_requests, "capacity": capacity, "max_step_tokens": max_step_tokens,
            "cache_dtype": cache_dtype, "order": order, "eos_token_id": tuple(eos_token_id),
            "store": store, "num_beams": num_beams, "source": source, "encoder": encoder,
            "decoder_start_token_id": decoder_start_token_id,
            "request_of_config": request_of_config,
        }  # fmt: skip
        if isinstance(model, PackedCausalModel):
            parts = causal_parts(model, **given)
        else:
            parts = encoder_decoder_parts(model, **given)
        self._model, self._submission, self.max_requests = parts
        self.capacity, self._vocab = self._submission.capacity, self._submission.vocab
        self._drawn = DrawnRows(self.max_requests, self._vocab, order)
        self._searched = SearchedRows(self._model.caches, self._vocab)
        self._arrived: deque[WrittenSequence] = deque()  # has no place yet
        self._steps = self._new_tokens = 0
        self._lock = threading.RLock()  # of whoever does a step
        self._stepper: int | None = None  # the thread that does
        self._life = threading.Lock()  # of start and stop
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stops = self._has_cancelled = False

    # ---- requests

    def submit(
        self,
        prompt_ids: Sequence[int] | Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        min_tokens: int = 0,
        do_sample: bool | None = None,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        input_ids: Sequence[int] | Tensor | None = None,
        input_features: Any = None,
        memory: Tensor | None = None,
        generation_config: Any = None,
        **parameters: Any,
    ) -> Request:
        """Let a text be written. Any thread may call, at any time.

        Parameters
        ----------
        prompt_ids : sequence of int or Tensor
            [length] token ids, at least one. Of an encoder-decoder model: those of the decoder,
            None being its start token.
        max_new_tokens : int
            It ends there at the latest. None: as the ``generation_config`` says.
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
        input_ids : sequence of int or Tensor
            [source] token ids of the encoder, without padding. An encoder-decoder model takes this,
            ``input_features`` or ``memory``.
        input_features : Tensor or array
            [channels, frames] floats of the encoder: of Whisper.
        memory : Tensor
            [source, memory_size] floats: what the encoder gives.
        generation_config : transformers.GenerationConfig, optional
            Of an encoder-decoder model: the request is searched as ``generate()`` does it with this
            config, and with the model's for what is None in it. Beside it only ``max_new_tokens``
            and ``prompt_ids`` may be given.
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
        """Let a search find texts, as ``submit`` does with its parameters.

        Parameters
        ----------
        search : BeamRequest
            Without ``coverage_penalty``; its ``request_id`` is not looked at.
        token_rules : TokenRules, optional
            Of one slot, in place of those that the parameters of ``search`` make: see
            ``lmdecode.beam.token_rules``.
        input_ids, input_features, memory
            Of an encoder-decoder model: see ``submit``.

        Returns
        -------
        Request
            Its tokens come when the search has ended.

        Raises
        ------
        ValueError, TypeError
            Names what does not fit; nothing has been submitted then.
        """
        given = {"input_ids": input_ids, "input_features": input_features, "memory": memory}
        return self._submit(self._submission.search_of(self, search, token_rules, given))

    def _submit(self, sequence: WrittenSequence) -> Request:
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
        """Let a thread of the engine's own do its steps, until ``stop``.

        The engine lives until then. A forked child has no such thread: it starts its own.
        """
        self.check_outside("start")
        with self._life:
            if not self.is_started:
                self._stops = False
                self._thread = threading.Thread(
                    target=self._run, name="lmdecode engine", daemon=True
                )
                self._thread.start()
                _started.add(self)

    def stop(self) -> None:
        """End the thread after its step; requests stay as they are, and can go on."""
        self.check_outside("stop")
        with self._life:
            with self._wake:
                self._stops = True
                self._wake.notify_all()
            if self._thread is not None:
                self._thread.join()
            self._thread = None
            _started.discard(self)
        self._model.flush()
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
        thread = self._thread
        return thread is not None and thread.is_alive()  # in a forked child it is not

    def check_outside(self, method: str) -> None:
        """Raise RuntimeError within a step, as where a grammar calls a method."""
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
        """Whether there are requests that have not ended."""
        return bool(
            self._drawn.running or self._model.reading or self._searched.running or self._arrived
        )

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        return EngineStats(
            running=len(self._everyone),
            waiting=len(self._arrived),
            free_places=self._model.num_free,
            steps=self._steps,
            prompt_tokens=self._model.prompt_tokens,
            cached_tokens=self._model.cached_tokens,
            new_tokens=self._new_tokens,
        )

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
        self.check_outside("step")
        with self._lock, torch.no_grad():
            self._stepper = threading.get_ident()
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
                self._stepper = None
                for request in told:
                    request._tell()
            return self.has_work

    @property
    def _everyone(self) -> list[WrittenSequence]:
        """Those who have places."""
        return [*self._model.reading, *self._drawn.running, *self._searched.running.values()]

    def _drop_cancelled(self, told: list[Request]) -> None:
        for sequence in [s for s in self._everyone if s.request._is_cancelled]:
            if sequence in self._model.reading:
                self._model.reading.remove(sequence)
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
        while self._arrived and self._model.has_room(self._arrived[0]):
            sequence = self._arrived[0]
            try:
                self._model.begin(sequence)
            finally:  # whoever has places fails with the step
                if sequence.places:
                    self._arrived.popleft()
                    sequence.request._placed()

    def _compute(self, told: list[Request]) -> None:
        """Read tokens, and choose the next ones."""
        drawn, searched = self._drawn, self._searched
        for end in self._model.encode():
            self._leave(end, told)
        step = self._model.read(drawn, searched)
        if step is None:
            return
        self._steps += 1
        for sequence in step.begun:
            self._begin(sequence)
        ended: list[Ended] = []
        num_drawn = len(drawn.running)
        if num_drawn:
            told += [sequence.request for sequence in drawn.running]
            ended = drawn.step(step.logits[:num_drawn])
            self._new_tokens += num_drawn - sum(e.reason == "error" for e in ended)
            for end in ended:
                assert isinstance(end.sequence, DrawnSequence)
                drawn.end(end.sequence)
        if searched.running:
            of_searches = searched.step(step.logits[num_drawn:])
            self._new_tokens += sum(e.sequence.request.stats.new_tokens
                                              for e in of_searches)  # fmt: skip
            ended += of_searches
        for end in ended:
            self._leave(end, told)

    def _begin(self, sequence: WrittenSequence) -> None:
        """Let a sequence write, whose prompt has been read."""
        if isinstance(sequence, DrawnSequence):
            self._drawn.begin(sequence)
        else:
            assert isinstance(sequence, SearchedSequence)
            self._searched.begin(sequence)

    def _leave(self, end: Ended, told: list[Request]) -> None:
        """Give the places of a sequence back, which is in no rows any more; end its request.

        Its prompt is kept where tokens were chosen behind it: a NaN spoils what was read with it.
        """
        sequence = end.sequence
        is_sound = bool(sequence.request._tokens) and end.reason != "error"
        self._model.leave(sequence, is_sound=is_sound)
        sequence.request._end(end.reason, end.error)
        told.append(sequence.request)

    def _fail_all(self, error: BaseException, told: list[Request]) -> None:
        """End every request that has a place, and begin anew for those that wait."""
        everyone = self._everyone
        self._model.clear()
        for sequence in everyone:
            self._model.leave(sequence, is_sound=False)
            failure = RuntimeError(f"Engine: a step failed ({error})")
            failure.__cause__ = error
            sequence.request._end("error", failure)
            told.append(sequence.request)
        self._drawn.clear()
        self._searched = SearchedRows(self._model.caches, self._vocab)


_started: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End all threads: one that computes while the interpreter ends would abort the process."""
    for engine in tuple(_started):
        engine.stop()
