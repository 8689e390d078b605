"""A request of an ``Engine``: the user's handle, the state both share, and its sequence."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.token_rules import TokenRules
from lmdecode.sampling.sampler_rows import RowRules

__all__ = [
    "SECONDS_AHEAD",
    "DrawnSequence",
    "Driver",
    "EncoderInput",
    "FinishReason",
    "Grammar",
    "ReadSequence",
    "Request",
    "RequestResult",
    "RequestState",
    "RequestStats",
    "SearchedSequence",
    "TokenLogprob",
    "WrittenSequence",
]

SECONDS_AHEAD = 0.02  # of steps in one op, for which signals and new requests wait
FinishReason = Literal["stop", "length", "cancelled", "error"]


class TokenLogprob(NamedTuple):
    """A token of a request that asked for log-probabilities.

    Attributes
    ----------
    token : int
        The chosen token.
    logprob : float
        Log-probability of the token by the model's logits, before penalties, filters and
        temperature.
    top : tuple of (int, float)
        The requested number of most probable tokens, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestStats(NamedTuple):
    """Counts and times of one request.

    Attributes
    ----------
    prompt_tokens, cached_tokens, new_tokens : int
        Tokens of the prompt; tokens of it that were not computed, as another request's keys and
        values were reused; generated tokens.
    queued, first_token, total : float or None
        Seconds from ``submit`` until the request had a slot, until its first token, and until it
        ended. None: not yet.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    queued: float | None
    first_token: float | None
    total: float | None


class RequestResult(NamedTuple):
    """Result of a request.

    Attributes
    ----------
    tokens : list of int
        The new tokens, including the end token if there is one. Of a search, the new tokens of the
        best sequence.
    finish_reason : {"stop", "length", "cancelled"}
        "stop": an end token, or the search ended. "length": ``max_new_tokens``. "cancelled":
        ``cancel()``.
    logprobs : list of TokenLogprob or None
        One for each token, if requested.
    beams : BeamResult or None
        All sequences of a search.
    """

    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    beams: BeamResult | None


class _Watcher(NamedTuple):
    """A reader that waits in an event loop."""

    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event
    until_end: bool  # not for tokens


class Driver(Protocol):
    """The engine of a request, which runs its steps."""

    @property
    def is_started(self) -> bool:
        """Whether a thread runs the steps."""

    def step(self) -> object:
        """Run a step."""

    def run_ahead(self, seconds: float) -> object:
        """Run a step, or some at once, for about so many seconds."""

    def drop_cancelled(self) -> None:
        """Make the next step look for cancelled requests. Takes no lock."""

    def check_outside(self, method: str) -> None:
        """Raise RuntimeError within a step."""


class RequestState:
    """The state that an engine and the handles of a request share.

    ``logprobs`` replace ``tokens`` for the reader, if requested; ``beams`` is the result of a
    search. ``reason`` is None until the request has ended; ``error`` is raised after the last
    token. ``status`` tells why a step could not choose a token, as in ``SamplerOutput``. With
    ``is_cancelled`` the next step ends the request.
    """

    def __init__(self, prompt_ids: tuple[int, ...], driver: Driver) -> None:
        self.prompt_ids = prompt_ids
        self._driver = driver
        self._changed = threading.Condition()
        self._watchers: set[_Watcher] = set()
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.beams: BeamResult | None = None
        self.reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.status = 0
        self.is_cancelled = False
        self._is_heard = False  # whether a reader has ever waited for a thread's steps
        self.cached_tokens = 0
        self._begun = time.perf_counter()
        self._times: dict[str, float] = {}

    # ---- the reader's side

    def cancel(self) -> None:
        """Have the next step end the request. Takes no lock: a finalizer may call it."""
        self.is_cancelled = True
        self._driver.drop_cancelled()

    @property
    def stats(self) -> RequestStats:
        """Counts and times so far."""
        return RequestStats(
            len(self.prompt_ids),
            self.cached_tokens,
            len(self.tokens),
            *(self._times.get(name) for name in ("queued", "first_token", "total")),
        )

    def item(self, i: int) -> int | TokenLogprob:
        """Return a token, as its reader gets it."""
        return self.tokens[i] if self.logprobs is None else self.logprobs[i]

    def wait(self, seen: int, end: float | None, *, until_end: bool = False) -> bool:
        """Wait for more tokens than were seen, or for the end; return whether the end has come."""
        if self.reason is not None:
            return True
        self._driver.check_outside("Request.result")
        left = None if end is None else end - time.perf_counter()
        if left is not None and left <= 0:
            raise TimeoutError(f"Request.result: {len(self.tokens)} tokens, and it goes on")
        if not self._driver.is_started:
            if until_end:
                self._driver.run_ahead(SECONDS_AHEAD if left is None else min(SECONDS_AHEAD, left))
            else:
                self._driver.step()
            return False

        def is_due() -> bool:
            has_more = not until_end and len(self.tokens) > seen
            return has_more or self.reason is not None or not self._driver.is_started

        with self._changed:
            self._is_heard = True
            self._changed.wait_for(is_due, timeout=left)
        return self.reason is not None

    @contextlib.asynccontextmanager
    async def watched(self, *, until_end: bool) -> AsyncIterator[asyncio.Event]:
        """Return an event that is set by new tokens and the end, or by the end alone."""
        changed = asyncio.Event()
        watcher = _Watcher(asyncio.get_running_loop(), changed, until_end)
        with self._changed:
            self._watchers.add(watcher)
            self._is_heard = True
        try:
            yield changed
        finally:
            with self._changed:
                self._watchers.discard(watcher)

    async def next_step(self, changed: asyncio.Event) -> None:
        """Wait for the event; without the engine's thread run a step.

        If the task is cancelled meanwhile and no other one reads, the request is cancelled.
        """
        try:
            if self._driver.is_started:
                await changed.wait()
            else:
                await asyncio.to_thread(self._driver.step)
        except asyncio.CancelledError:
            if all(watcher.changed is changed for watcher in tuple(self._watchers)):
                self.cancel()
            raise

    # ---- the engine's side

    def placed(self) -> None:
        """Record the time of the slot."""
        self._times.setdefault("queued", time.perf_counter() - self._begun)

    def put_first(self) -> None:
        """Record the time of the first token."""
        self._times["first_token"] = time.perf_counter() - self._begun

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Record the end."""
        self._times["total"] = time.perf_counter() - self._begun
        self.error, self.reason = error, reason

    def tell(self) -> None:
        """Notify all readers that wait for tokens or for the end."""
        if not self._is_heard:
            return
        with self._changed:
            self._changed.notify_all()
            watchers = tuple(self._watchers)
        has_work = self.reason is None and self._driver.is_started
        for watcher in watchers:
            if watcher.until_end and has_work:
                continue
            try:
                watcher.loop.call_soon_threadsafe(watcher.changed.set)
            except RuntimeError:  # the loop is closed: no reader waits
                self._watchers.discard(watcher)


class Request:
    """Handle of a running request, which iterates over its tokens.

    ``for token in request`` yields each token as soon as it is chosen: an int, or a
    ``TokenLogprob`` if ``logprobs`` were requested. ``async for`` works, too. If no thread of the
    engine runs, the iterator runs the engine's steps itself. A search's tokens come when it ends.
    If a request fails, its error is raised after its last token.

    A request that nobody can read any more is cancelled: when its last reference is dropped, or
    when the last asyncio task that reads it is cancelled while it waits, as by
    ``asyncio.wait_for`` (``asyncio.shield`` keeps it).
    """

    def __init__(self, state: RequestState) -> None:
        self._state = state

    def __repr__(self) -> str:
        state = self._state
        progress = state.reason or ("waiting" if state.stats.queued is None else "running")
        return (
            f"Request(prompt of {len(state.prompt_ids)} tokens, {len(state.tokens)} new tokens, "
            f"{progress})"
        )

    def __del__(self) -> None:
        if not self.finished:
            self._state.cancel()

    def __copy__(self) -> Request:
        return self

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The submitted prompt."""
        return self._state.prompt_ids

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self._state.reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended: see ``RequestResult``, or "error". None: it has not ended."""
        return self._state.reason

    @property
    def stats(self) -> RequestStats:
        """Counts and times so far."""
        return self._state.stats

    def cancel(self) -> None:
        """End the request before the next step; its tokens are kept. Any thread may call this."""
        self._state.cancel()

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end.

        Parameters
        ----------
        timeout : float, optional
            Maximum number of seconds to wait; up to one step longer without the engine's thread.

        Raises
        ------
        TimeoutError
            The request has not ended by then. It continues.
        RuntimeError
            No token could be chosen, for example due to NaN in the logits, or the engine failed.
        """
        end = None if timeout is None else time.perf_counter() + timeout
        state = self._state
        while not state.wait(len(state.tokens), end, until_end=True):
            pass
        if state.error is not None:
            raise state.error
        assert state.reason is not None
        logprobs = None if state.logprobs is None else list(state.logprobs)
        return RequestResult(list(state.tokens), state.reason, logprobs, state.beams)

    def __iter__(self) -> Iterator[int | TokenLogprob]:
        done = 0
        while True:
            has_ended = self._state.reason is not None  # before its tokens are counted
            while done < len(self._state.tokens):
                yield self._state.item(done)
                done += 1
            if has_ended:
                break
            self._state.wait(done, None)
        if self._state.error is not None:
            raise self._state.error

    async def __aiter__(self) -> AsyncIterator[int | TokenLogprob]:
        async for part in self.parts():
            for item in part:
                yield item

    async def parts(self) -> AsyncIterator[list[int | TokenLogprob]]:
        """Yield the tokens that have been chosen since the last part, as soon as there are any.

        A reader that is slower than the engine gets several at once.
        """
        done = 0
        async with self._state.watched(until_end=False) as changed:
            while True:
                changed.clear()
                has_ended = self._state.reason is not None  # before its tokens are counted
                count = len(self._state.tokens)
                if count > done:
                    yield [self._state.item(i) for i in range(done, count)]
                    done = count
                    continue
                if has_ended:
                    break
                await self._state.next_step(changed)
        if self._state.error is not None:
            raise self._state.error

    async def wait(self) -> RequestResult:
        """Wait for the end, as ``result`` does, in an event loop."""
        async with self._state.watched(until_end=True) as changed:
            while self._state.reason is None:
                changed.clear()
                if self._state.reason is None:
                    await self._state.next_step(changed)
        return self.result()


# --- Sequences: prompts, and how their tokens are chosen ------------------------------------------


class EncoderInput(NamedTuple):
    """A checked input; ``encode`` returns its memory, [positions, memory_size] float32."""

    positions: int
    encode: Callable[[], Tensor]


class Grammar(Protocol):
    """Constrains the tokens of one request, such as a matcher of xgrammar or llguidance.

    An error that it raises ends its request and becomes the request's error.
    """

    def fill_bitmask(self, bitmask: Tensor) -> None:
        """Write the allowed next tokens to [ceil(V / 32)] int32; see ``Sampler.sample``."""

    def accept_token(self, token: int) -> object:
        """Advance by a token."""


class ReadSequence:
    """A sequence that reads its prompt, and has places or waits for them.

    The first of its ``places`` reads the prompt; ``read`` is the number of tokens read. ``follows``
    is another sequence and the number of first tokens to share with it once that one has read them.
    ``stops`` are lengths at which parts of the prompt must end, for other sequences or the store;
    ``keep_at`` are the lengths at which it is written to the store, ascending. ``written`` are
    tokens that were chosen after the prompt, which it reads again after a pause.
    """

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        self.places: list[int] = []
        self.read = 0
        self.follows: tuple[ReadSequence, int] | None = None
        self.stops: set[int] = set()
        self.keep_at: list[int] = []
        self.written: tuple[int, ...] = ()

    @property
    def num_beams(self) -> int:
        """Rows that it needs at most."""
        return 1

    @property
    def unread(self) -> int:
        """Number of tokens to read before the next one is chosen."""
        return len(self.prompt_ids) + len(self.written) - self.read

    @property
    def reads_prompt(self) -> bool:
        """Whether the next tokens to read are of the prompt."""
        return self.read < len(self.prompt_ids)

    def begin_with(self, length: int) -> None:
        """Begin with the first tokens of the prompt, which were read elsewhere."""
        self.read = length

    def next_part(self, room: int) -> int:
        """Return the number of tokens to read next, at most ``room``."""
        all_ = len(self.prompt_ids) + (0 if self.reads_prompt else len(self.written))
        end = min(all_, self.read + room)
        return min((stop for stop in self.stops if self.read < stop < end), default=end) - self.read

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """Return the next tokens to read, of one part."""
        begin, tokens = self.read, self.prompt_ids
        if not self.reads_prompt:
            begin, tokens = begin - len(tokens), self.written
        return tokens[begin : begin + count]


class WrittenSequence(ReadSequence):
    """The sequence of a request.

    ``input`` is the input of an encoder-decoder model until it is encoded.
    """

    def __init__(
        self, request: RequestState, max_new_tokens: int, end_tokens: tuple[int, ...]
    ) -> None:
        super().__init__(request.prompt_ids)
        self.request, self.max_new_tokens, self.end_tokens = request, max_new_tokens, end_tokens
        self.input: EncoderInput | None = None
        self._has_computed = False  # some of its prompt, before a pause

    def with_input(self, input: EncoderInput | None) -> WrittenSequence:
        """Set the input; return the sequence."""
        self.input = input
        return self

    def begin_with(self, length: int) -> None:
        """See ``ReadSequence``."""
        super().begin_with(length)
        if not self._has_computed:
            self.request.cached_tokens = length

    def pause(self) -> None:
        """Be as before it began, but for the tokens that it has chosen; it has no places."""
        self._has_computed |= self.read > self.request.cached_tokens
        self.read, self.follows, self.keep_at = 0, None, []
        self.stops.clear()
        self.written = tuple(self.request.tokens)


class DrawnSequence(WrittenSequence):
    """A sequence that samples its tokens, or takes the largest logit.

    ``num_logprobs`` is -1 for none; ``last`` is the next token to read.
    """

    def __init__(
        self,
        request: RequestState,
        max_new_tokens: int,
        end_tokens: tuple[int, ...],
        rules: RowRules,
        num_logprobs: int,
        grammar: Grammar | None,
    ) -> None:
        super().__init__(request, max_new_tokens, end_tokens)
        self.rules, self.num_logprobs, self.grammar = rules, num_logprobs, grammar
        self.last = -1
        if num_logprobs >= 0:
            request.logprobs = []


class SearchedSequence(WrittenSequence):
    """A sequence with a beam search: ``search`` and ``token_rules`` for ``BeamSearch``."""

    def __init__(
        self, request: RequestState, search: BeamRequest, token_rules: TokenRules | None = None
    ) -> None:
        super().__init__(request, search.max_new_tokens, tuple(search.eos_token_id))
        self.search, self.token_rules = search, token_rules
        self.id: Hashable = None

    @property
    def num_beams(self) -> int:
        """Rows that it needs at most."""
        return self.search.num_beams
