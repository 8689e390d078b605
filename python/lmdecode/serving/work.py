"""Requests that are being answered: their jobs, their answers, and the server's metrics."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from lmdecode.decoder.engine.request import Request, TokenLogprob
from lmdecode.serving.answers import Usage
from lmdecode.serving.grammar import CompiledGrammar
from lmdecode.serving.parameters import Parameters
from lmdecode.serving.writing import AnswerPart, AnswerWriter

__all__ = ["Answer", "Job", "Metrics", "Tally", "Work"]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Counter:
    """A number that grows, by labels."""

    def __init__(self, *labels: str) -> None:
        self._labels, self._values = labels, dict[tuple[str, ...], float]()
        if not labels:
            self._values[()] = 0

    def add(self, amount: float = 1, *labels: str) -> None:
        """Add to the number of these labels."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def lines(self, name: str) -> Iterable[str]:
        """Yield a line for each set of labels."""
        for labels, value in sorted(self._values.items()):
            given = ",".join(
                f'{label}="{_escaped(text)}"'
                for label, text in zip(self._labels, labels, strict=True)
            )
            yield f"{name}{{{given}}} {_number(value)}" if given else f"{name} {_number(value)}"


class Histogram:
    """Counts of seconds up to each of several limits."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add a duration, or several of the same length."""
        self._counts[bisect_left(_SECONDS, seconds)] += count
        self._sum += seconds * count

    def lines(self, name: str) -> Iterable[str]:
        """Yield the lines of all buckets, the sum and the count."""
        total = 0
        for limit, count in zip((*_SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class Metrics:
    """All counts and times of a server."""

    def __init__(self) -> None:
        self.requests = Counter("endpoint", "status")
        self.answers = Counter("reason")
        self.first_token, self.between_tokens = Histogram(), Histogram()
        self.queued, self.total = Histogram(), Histogram()

    def text(self, gauges: Iterable[tuple[str, str, str, float]]) -> str:
        """Return everything as text; ``gauges`` are (name, kind, help, value) that others count."""
        lines = []
        for name, kind, text, value in gauges:
            lines += [f"# HELP lmdecode_{name} {text}", f"# TYPE lmdecode_{name} {kind}",
                      f"lmdecode_{name} {_number(value)}"]  # fmt: skip
        of_requests: tuple[tuple[str, str, Counter | Histogram], ...] = (
            ("requests_total", "Requests, by endpoint and status.", self.requests),
            ("answers_total", "Answers, by the reason of their end.", self.answers),
            ("queue_seconds", "From a request to its slot.", self.queued),
            ("time_to_first_token_seconds", "From a request to its first token.", self.first_token),
            ("inter_token_seconds", "Between tokens of an answer.", self.between_tokens),
            ("request_seconds", "From a request to its last token.", self.total),
        )
        for name, text, metric in of_requests:
            kind = "counter" if isinstance(metric, Counter) else "histogram"
            lines += [f"# HELP lmdecode_{name} {text}", f"# TYPE lmdecode_{name} {kind}"]
            lines += metric.lines(f"lmdecode_{name}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Job:
    """A checked request: tokens of its prompts, and how each of their answers is written.

    ``logprobs`` is the number of best tokens beside each one, and ``max_tokens`` the most of an
    answer. ``goes_on``: an answer goes on with the text of its prompt.
    """

    prompts: list[list[int]]
    max_tokens: int
    parameters: Parameters
    logprobs: int | None = None
    grammar: CompiledGrammar | None = None
    kept_special_ids: frozenset[int] = frozenset()
    goes_on: bool = False


@dataclass
class Answer:
    """One answer of a job: choice ``index``.

    The ``request`` of a search has several answers, and ``beam`` is this one's sequence. ``ends``
    are end tokens; ``parameters`` tell whether one is part of the text, and which are named.
    ``finish_reason`` is "stop" or "length" after the end.
    """

    index: int
    request: Request
    writer: AnswerWriter
    beam: int | None
    ends: frozenset[int]
    parameters: Parameters
    max_tokens: int
    finish_reason: str | None = None
    num_end_tokens: int = 0
    _stop_token: int | None = None
    _is_cut: bool = False  # of a beam: no room was left

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with an end token."""
        return self.writer.num_tokens + self.num_end_tokens

    @property
    def stop_reason(self) -> str | int | None:
        """The text of ``stop`` or the token of ``stop_token_ids`` that ended it."""
        return self.writer.stop or self._stop_token

    async def pieces(self) -> AsyncIterator[AnswerPart]:
        """Yield its pieces, as they come. The last one has the reason of the end."""
        if self.beam is not None:
            beams = (await self.request.wait()).beams
            assert beams is not None
            if self.beam < len(beams.lengths):  # a search may find fewer
                tokens = beams.new_tokens(self.beam)
                self._is_cut = len(tokens) >= self.max_tokens and tokens[-1] not in self.ends
                yield self._push(tokens)
        else:
            async for items in self.request.parts():
                piece = self._push(items)
                if piece.text or piece.logprobs:
                    yield piece
                if self.writer.stop is not None:
                    self.request.cancel()
                    break
        yield self._last()

    async def whole(self) -> AnswerPart:
        """Return all of it, when it has ended."""
        if self.beam is None and not self.writer.has_stops:
            result = await self.request.wait()
            pieces = [self._push(result.logprobs or result.tokens), self._last()]
        else:
            pieces = [piece async for piece in self.pieces()]
        return AnswerPart(
            "".join(piece.text for piece in pieces),
            [item for piece in pieces for item in piece.logprobs],
            self.finish_reason,
            [offset for piece in pieces for offset in piece.offsets],
        )

    def _last(self) -> AnswerPart:
        """Return the piece after all tokens."""
        piece = self.writer.finish()
        is_cut = self._is_cut if self.beam is not None else self.request.finish_reason == "length"
        is_stopped = self.writer.stop is not None or not is_cut
        self.finish_reason = piece.finish_reason = "stop" if is_stopped else "length"
        return piece

    def _push(self, items: Sequence[int | TokenLogprob]) -> AnswerPart:
        """Write tokens; of one that ends the answer nothing is written, unless it is kept."""
        if items:
            last = items[-1] if isinstance(items[-1], int) else items[-1].token
            if last in self.ends:
                self._stop_token = last if last in self.parameters.stop_tokens else None
                if not self.parameters.keeps_stop:
                    items, self.num_end_tokens = items[:-1], 1
        return self.writer.push(items)


@dataclass
class Tally:
    """Counts of a server's requests: ``metrics`` of all that have ended, and those in flight.

    ``abandoned`` counts answers whose clients went away.
    """

    metrics: Metrics = field(default_factory=Metrics)
    in_flight: int = 0
    abandoned: int = 0

    def count(self, request: Request, reason: str | None) -> None:
        """Count a request, which ended for a reason; None: it was cancelled, or failed."""
        metrics, stats = self.metrics, request.stats
        failed = "error" if request.finish_reason == "error" else "cancelled"
        metrics.answers.add(1, reason or failed)
        if stats.queued is not None:
            metrics.queued.add(stats.queued)
        if stats.first_token is not None:
            metrics.first_token.add(stats.first_token)
            if stats.total is not None:
                metrics.total.add(stats.total)
                if stats.new_tokens > 1:
                    between = (stats.total - stats.first_token) / (stats.new_tokens - 1)
                    metrics.between_tokens.add(between, stats.new_tokens - 1)


class Work:
    """The answers of a job, of all prompts in order, while they are written."""

    def __init__(
        self, tally: Tally, job: Job, requests: list[Request], answers: list[Answer]
    ) -> None:
        self._tally, self._job, self._requests = tally, job, requests
        self.answers = answers
        self._is_closed = False
        tally.in_flight += len(requests)

    def close(self) -> None:
        """Cancel unfinished requests, and count all. Done again, it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        tally = self._tally
        tally.in_flight -= len(self._requests)
        tally.abandoned += any(
            answer.finish_reason is None and answer.request.finish_reason != "error"
            for answer in self.answers
        )
        reasons = {id(answer.request): answer.finish_reason for answer in self.answers}
        for request in self._requests:
            if not request.finished:
                request.cancel()
            tally.count(request, reasons[id(request)])

    async def wholes(self) -> list[AnswerPart]:
        """Return all answers, when they have ended."""
        return await asyncio.gather(*(answer.whole() for answer in self.answers))

    async def pieces(self) -> AsyncIterator[tuple[Answer, AnswerPart]]:
        """Yield pieces of all answers, as they come."""
        if len(self.answers) == 1:
            async for piece in self.answers[0].pieces():
                yield self.answers[0], piece
            return
        queue: asyncio.Queue[tuple[Answer, AnswerPart | BaseException | None]] = asyncio.Queue()

        async def read(answer: Answer) -> None:
            try:
                async for piece in answer.pieces():
                    queue.put_nowait((answer, piece))
                queue.put_nowait((answer, None))
            except Exception as error:
                queue.put_nowait((answer, error))

        tasks = [asyncio.create_task(read(answer)) for answer in self.answers]
        try:
            left = len(tasks)
            while left:
                answer, found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield answer, found
        finally:
            for task in tasks:
                task.cancel()

    @property
    def usage_of_piece(self) -> Usage | None:
        """``usage``, if each piece of a stream is to have it."""
        return self.usage if self._job.parameters.repeats_usage else None

    @property
    def usage(self) -> Usage:
        """Counts of tokens so far. A prompt counts once, whatever its number of answers."""
        per_prompt = len(self._requests) // len(self._job.prompts)
        return Usage(
            sum(map(len, self._job.prompts)),
            sum(request.stats.cached_tokens for request in self._requests[::per_prompt]),
            sum(answer.num_tokens for answer in self.answers),
        )
