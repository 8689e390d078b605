"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: sound to text by a Transcriber."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmdecode.serving.errors import BadRequest, RequestError, error_of_engine
from lmdecode.serving.fields import Fields, shown
from lmdecode.serving.parameters import check_model
from lmdecode.speech.formats import FORMATS
from lmdecode.speech.segments import Segment, TranscriptionInfo
from lmdecode.speech.transcriber import Segments, Transcriber

__all__ = ["Speech", "SpeechService"]

_FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_MEDIA_TYPES = {"json": "application/json", "verbose_json": "application/json",
                "vtt": "text/vtt; charset=utf-8"}  # fmt: skip
_TEXTS = ("language", "prompt", "hotwords", "response_format")
_NUMBERS = ("temperature",)
_INTEGERS = ("beam_size", "seed")
_BOOLEANS = ("stream", "vad")
_GRANULARITIES = "timestamp_granularities[]"
_FIELDS = {"file", "model", _GRANULARITIES, "timestamp_granularities", *_TEXTS, *_NUMBERS,
           *_INTEGERS, *_BOOLEANS}  # fmt: skip
_REFUSED = ("include", "chunking_strategy", "keywords", "known_speaker_names",
            "known_speaker_references", "languages")  # fmt: skip
_MOST_TEXT = 10_000


def _value(name: str, text: str) -> Any:
    """Return a field of a form as JSON would have it."""
    if name in _NUMBERS or name in _INTEGERS:
        try:
            return float(text) if name in _NUMBERS else int(text[:20])
        except ValueError:
            return text
    if name in _BOOLEANS:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return text


@dataclass(frozen=True)
class Speech:
    """A checked request of a transcription: the file, and options of ``Transcriber.transcribe``."""

    data: bytes
    options: dict[str, Any]
    response_format: str
    streams: bool

    @classmethod
    def of(cls, form: Sequence[tuple[str, Any]], task: str, name: str) -> Speech:
        """Check a form's (name, text or bytes); raise ``RequestError``, which names the field.

        ``task`` is "transcribe" or "translate", and ``name`` the model's.
        """
        given: dict[str, Any] = {}
        granularities: list[str] = []
        for field_name, value in form:
            if field_name.removesuffix("[]") in _REFUSED:
                raise BadRequest(field_name, f"{field_name} is not supported")
            if field_name not in _FIELDS:
                raise BadRequest(field_name[:80], f"{field_name[:80]} is no field of this request")
            if isinstance(value, bytes) != (field_name == "file"):
                expected = "a file" if field_name == "file" else "a text"
                raise BadRequest(field_name, f"{field_name} is no such part; expected {expected}")
            if field_name.startswith("timestamp_granularities"):
                granularities.append(value)
            elif field_name in given:
                raise BadRequest(field_name, f"{field_name} is given twice; expected once")
            elif value != "":
                given[field_name] = value if field_name == "file" else _value(field_name, value)
        data = given.pop("file", b"")
        if not data:
            raise BadRequest("file", "file is missing or empty; expected a file of sound")
        fields = Fields(given)
        check_model(fields, name)
        response_format = fields.choice("response_format", *_FORMATS) or "json"
        for value in granularities:
            if value not in ("word", "segment"):
                message = f"{_GRANULARITIES} is {shown(value)}; expected 'word' or 'segment'"
                raise BadRequest(_GRANULARITIES, message)
        if granularities and response_format != "verbose_json":
            message = f"{_GRANULARITIES} is given; expected response_format 'verbose_json' with it"
            raise BadRequest(_GRANULARITIES, message)
        options: dict[str, Any] = {"task": task, "word_timestamps": "word" in granularities}
        for field_name, argument in (("language", "language"), ("prompt", "initial_prompt"),
                                     ("hotwords", "hotwords")):  # fmt: skip
            if (text := fields.text(field_name, _MOST_TEXT)) is not None:
                options[argument] = text
        temperature = fields.number("temperature", 0.0, 1.0)
        if temperature:  # 0 is OpenAI's default, and tries higher ones where it must
            options["temperature"] = temperature
        if (beam_size := fields.integer("beam_size", 1, 64)) is not None:
            options["beam_size"] = beam_size
        if (seed := fields.integer("seed", 0, (1 << 62) - 1)) is not None:
            options["seed"] = seed
        options["vad"] = fields.boolean("vad")
        streams = fields.boolean("stream")
        if streams and response_format not in ("json", "text"):
            raise BadRequest("stream", "stream is true; expected response_format 'json' or 'text'")
        return cls(data, options, response_format, streams)


_ARGUMENTS: Mapping[str, str] = {"initial_prompt": "prompt", "audio": "file"}


@dataclass
class SpeechService:
    """A Transcriber that is served: one request after the other, as each uses all threads.

    Of requests that wait, those above ``max_waiting`` are refused.
    """

    transcriber: Transcriber
    max_waiting: int = 64
    in_flight: int = 0

    def __post_init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "lmdecode speech")

    async def segments(self, asked: Speech) -> AsyncIterator[Segment | TranscriptionInfo]:
        """Yield facts about the sound, and then its segments, as they come.

        The thread does not wait for the reader. Raises ``RequestError`` if the sound cannot be
        read, an option does not fit, or too many requests wait.
        """
        if self.in_flight > self.max_waiting:
            raise RequestError(
                429, f"{self.in_flight} requests wait; expected at most {self.max_waiting}",
                code="rate_limit_exceeded", headers={"Retry-After": "5"},
            )  # fmt: skip
        self.in_flight += 1
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Segment | TranscriptionInfo | BaseException | None] = asyncio.Queue()
        opened: list[Segments] = []
        is_gone = threading.Event()

        def put(item: Segment | TranscriptionInfo | BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def write() -> None:
            try:
                if is_gone.is_set():
                    return
                segments, info = self.transcriber.transcribe(
                    io.BytesIO(asked.data), **asked.options
                )
                opened.append(segments)
                put(info)
                for segment in segments:
                    put(segment)
                    if is_gone.is_set():
                        break
                segments.close()
                put(None)
            except BaseException as error:
                put(error)

        work = self._worker.submit(write)
        try:
            is_open = False
            while (part := await queue.get()) is not None:
                if isinstance(part, BaseException):
                    refusals = (ImportError, OSError, TypeError, ValueError)
                    if not is_open and isinstance(part, refusals):
                        raise _refused(part) from part
                    raise part
                is_open = True
                yield part
        finally:
            self.in_flight -= 1
            is_gone.set()
            if not work.cancel() and opened and not work.done():
                # It waits for a step of the model.
                loop.run_in_executor(None, opened[0].close)

    async def whole(self, asked: Speech) -> tuple[str, str]:
        """Return the text in the request's format, and its media type."""
        info, *segments = [part async for part in self.segments(asked)]
        text = FORMATS[asked.response_format](segments, info)  # type: ignore[arg-type]
        media_type = _MEDIA_TYPES.get(asked.response_format, "text/plain; charset=utf-8")
        return text, media_type

    async def stream(self, asked: Speech) -> AsyncIterator[dict[str, Any]]:
        """Return the text as it comes, in OpenAI's events; raises as ``segments``, but at once."""
        parts = self.segments(asked)
        info = await anext(parts)
        assert isinstance(info, TranscriptionInfo)
        return self._events(info, parts)

    @staticmethod
    async def _events(
        info: TranscriptionInfo, parts: AsyncIterator[Segment | TranscriptionInfo]
    ) -> AsyncIterator[dict[str, Any]]:
        kept: list[Segment] = []
        async for part in parts:
            assert isinstance(part, Segment)
            kept.append(part)
            delta = part.text if len(kept) > 1 else part.text.lstrip()
            yield {"type": "transcript.text.delta", "delta": delta}
        yield {"type": "transcript.text.done", **json.loads(FORMATS["json"](kept, info))}

    def close(self) -> None:
        """Wait for the request that is being answered, and end the thread."""
        self._worker.shutdown(cancel_futures=True)


def _refused(error: Exception) -> BadRequest:
    found = error_of_engine(error, _ARGUMENTS)
    return found if found.param in _FIELDS else BadRequest("file", f"file cannot be read: {error}")
