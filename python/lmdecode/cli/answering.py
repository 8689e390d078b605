"""An answer of an engine, as it comes: streamed, stopped by texts, ended by Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lmdecode.cli.terminal import Busy
from lmdecode.decoder.engine.engine import Engine
from lmdecode.decoder.engine.request import FinishReason, Request, RequestStats
from lmdecode.serving.text_model import TextModel
from lmdecode.serving.writing import AnswerWriter

__all__ = ["Reply", "answer"]


@dataclass(frozen=True)
class Reply:
    """A model's answer: its text, and its tokens with the end token, if there is one.

    ``finish_reason`` is "stop", "length" or "cancelled".
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: RequestStats


@contextmanager
def _cancelled_by_interrupts(requests: list[Request]) -> Iterator[None]:
    """Let Ctrl-C cancel requests, where this thread gets the signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(number: int, frame: FrameType | None) -> None:
        for request in requests:
            request.cancel()
        if not requests:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def answer(
    engine: Engine,
    model: TextModel,
    prompt: Sequence[int],
    arguments: dict[str, Any],
    on_text: Callable[[str], None],
    *,
    stops: Sequence[str] = (),
    kept_special_ids: Sequence[int] = (),
) -> Reply:
    """Generate an answer. Ctrl-C ends it, and what has come by then is kept.

    The engine's thread must run. ``arguments`` are for ``Engine.submit``, ``on_text`` is called
    with each piece of the text, ``stops`` are texts that end it, and ``kept_special_ids`` special
    tokens that are written.
    """
    requests: list[Request] = []
    writer = AnswerWriter(model.tokenizer, stops=stops, kept_special_ids=kept_special_ids)
    texts: list[str] = []

    def write(text: str) -> None:
        if text:
            line.end()
            texts.append(text)
            on_text(text)

    before = engine.stats

    def progress() -> str:
        now = engine.stats
        read = now.prompt_tokens - before.prompt_tokens + now.cached_tokens - before.cached_tokens
        return f"Reading the prompt: {min(read, len(prompt))} of {len(prompt)} tokens"

    with _cancelled_by_interrupts(requests):
        request = engine.submit(prompt, eos_token_id=model.eos_token_ids, **arguments)
        requests.append(request)
        line = Busy(progress)
        try:
            for token in request:
                if token in model.eos_token_ids:
                    break
                write(writer.push([token]).text)
                if writer.stop is not None:
                    request.cancel()
                    break
            write(writer.finish().text)
        finally:
            line.end()
        result = request.result()
    reason = "stop" if writer.stop is not None else result.finish_reason
    return Reply("".join(texts), result.tokens, reason, request.stats)
