"""Transcripts as text, JSON and subtitles."""

import json

import pytest

from lmdecode.speech import Segment, TranscriptionInfo, TranscriptionOptions, Word
from lmdecode.speech.formats import FORMATS


def segment(number: int, start: float, end: float, text: str, words: list[Word] | None) -> Segment:
    return Segment(number, 0, start, end, text, [1, 2], -0.25, 1.5, 0.01, words, 0.0)


INFO = TranscriptionInfo("de", 0.9, 3725.5, 3725.5, None, TranscriptionOptions(), None)
SEGMENTS = [
    segment(1, 0.0, 1.5, " Hallo Welt.", None),
    segment(2, 3723.0456, 3725.5, " A --> B \N{GREEK SMALL LETTER ALPHA}", None),
]
WORDS = [segment(1, 0.0, 1.5, " Hallo Welt.", [Word(0.0, 0.5, " Hallo", 0.5)])]


def test_text() -> None:
    expected = "Hallo Welt.\nA --> B \N{GREEK SMALL LETTER ALPHA}\n"
    assert FORMATS["txt"](SEGMENTS, INFO) == FORMATS["text"](iter(SEGMENTS), INFO) == expected


def test_srt() -> None:
    assert FORMATS["srt"](SEGMENTS, INFO) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHallo Welt.\n\n"
        "2\n01:02:03,046 --> 01:02:05,500\nA -> B \N{GREEK SMALL LETTER ALPHA}\n"
    )


def test_vtt() -> None:
    assert FORMATS["vtt"](SEGMENTS, INFO) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHallo Welt.\n\n"
        "01:02:03.046 --> 01:02:05.500\nA -> B \N{GREEK SMALL LETTER ALPHA}\n"
    )


def test_json() -> None:
    text = "Hallo Welt. A --> B \N{GREEK SMALL LETTER ALPHA}"
    assert json.loads(FORMATS["json"](SEGMENTS, INFO)) == {"text": text}
    found = json.loads(FORMATS["verbose_json"](SEGMENTS, INFO))
    segments = found.pop("segments")
    assert found == {"task": "transcribe", "language": "german", "duration": 3725.5, "text": text}
    assert [one["id"] for one in segments] == [0, 1]
    assert segments[0] == {
        "id": 0, "seek": 0, "start": 0.0, "end": 1.5, "text": " Hallo Welt.", "tokens": [1, 2],
        "temperature": 0.0, "avg_logprob": -0.25, "compression_ratio": 1.5, "no_speech_prob": 0.01,
    }  # fmt: skip
    words = json.loads(FORMATS["verbose_json"](WORDS, INFO))["words"]
    assert words == [{"word": "Hallo", "start": 0.0, "end": 0.5, "probability": 0.5}]


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_was_said(name: str) -> None:
    assert FORMATS[name]([], INFO).strip() in (
        "", "WEBVTT", '{"text": ""}',
        '{"task": "transcribe", "language": "german", "duration": 3725.5, "text": "", '
        '"segments": []}',
    )  # fmt: skip
