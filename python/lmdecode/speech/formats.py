"""Transcripts as text, JSON, SRT and WebVTT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from lmdecode.speech.languages import LANGUAGES
from lmdecode.speech.segments import Segment, TranscriptionInfo

__all__ = ["FORMATS", "to_json", "to_srt", "to_text", "to_verbose_json", "to_vtt"]


def _text(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def to_text(segments: Iterable[Segment], info: TranscriptionInfo) -> str:
    """Return a transcript's text, a line for each segment."""
    return "".join(f"{segment.text.strip()}\n" for segment in segments)


def to_json(segments: Iterable[Segment], info: TranscriptionInfo) -> str:
    """Return a transcript as OpenAI's ``json``: an object with its text."""
    return json.dumps({"text": _text(segments)}, ensure_ascii=False)


def to_verbose_json(segments: Iterable[Segment], info: TranscriptionInfo) -> str:
    """Return a transcript as OpenAI's ``verbose_json``: language, duration, segments and words.

    Segments are numbered from 0. ``words`` are there if the segments have any.
    """
    kept = list(segments)
    found: dict[str, Any] = {
        "task": info.transcription_options.task,
        "language": LANGUAGES.get(info.language, info.language),
        "duration": info.duration,
        "text": _text(kept),
        "segments": [],
    }
    for number, segment in enumerate(kept):
        fields = asdict(segment) | {"id": number}
        del fields["words"]
        found["segments"].append(fields)
    if any(segment.words is not None for segment in kept):
        found["words"] = [
            {
                "word": word.word.strip(),
                "start": word.start,
                "end": word.end,
                "probability": word.probability,
            }
            for segment in kept
            for word in segment.words or ()
        ]
    return json.dumps(found, ensure_ascii=False)


def _time(seconds: float, mark: str) -> str:
    """Return hours, minutes, seconds and thousandths, 00:00:00,000."""
    total = max(0, round(1000 * seconds))
    minutes, rest = divmod(total, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


def _cue(segment: Segment, mark: str) -> str:
    """Return the times and the text of a segment; no line of a cue may look like its times."""
    text = segment.text.strip().replace("-->", "->")
    return f"{_time(segment.start, mark)} --> {_time(segment.end, mark)}\n{text}\n"


def to_srt(segments: Iterable[Segment], info: TranscriptionInfo) -> str:
    """Return a transcript as SubRip subtitles."""
    return "\n".join(
        f"{number}\n{_cue(segment, ',')}" for number, segment in enumerate(segments, start=1)
    )


def to_vtt(segments: Iterable[Segment], info: TranscriptionInfo) -> str:
    """Return a transcript as WebVTT subtitles."""
    return "WEBVTT\n" + "".join(f"\n{_cue(segment, '.')}" for segment in segments)


#: The function of each format, by the names of OpenAI's ``response_format``; "txt" is "text".
FORMATS: dict[str, Callable[[Iterable[Segment], TranscriptionInfo], str]] = {
    "txt": to_text,
    "text": to_text,
    "json": to_json,
    "verbose_json": to_verbose_json,
    "srt": to_srt,
    "vtt": to_vtt,
}
