"""Speech alone is transcribed: with a detector that answers what a test wants."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from lmdecode.speech import voice_activity
from lmdecode.speech.voice_activity import speech_of
from tests.speech.models import EASY, check_times, sound, transcriber


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let silero-vad find speech in 0.5 to 1.5 s, 1.7 to 2.4 s and 4.0 to 6.5 s."""
    calls: list[dict[str, Any]] = []

    def get_speech_timestamps(audio: Any, model: Any, **given: Any) -> list[dict[str, int]]:
        if "humour" in given:
            raise TypeError("got an unexpected keyword argument 'humour'")
        calls.append(given)
        torch.set_num_threads(1)
        rate = given["sampling_rate"]
        pieces = [(0.5, 1.5), (1.7, 2.4), (4.0, 6.5)]
        return [
            {"start": int(begin * rate), "end": int(end * rate)}
            for begin, end in pieces
            if end * rate <= len(audio)
        ]

    module = types.ModuleType("silero_vad")
    module.load_silero_vad = lambda: "a model"  # type: ignore[attr-defined]
    module.get_speech_timestamps = get_speech_timestamps  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "silero_vad", module)
    voice_activity._silero.cache_clear()
    yield calls  # type: ignore[misc]
    voice_activity._silero.cache_clear()


def test_pieces_fit_a_window(asked: list[dict[str, Any]]) -> None:
    threads = torch.get_num_threads()
    found = speech_of(torch.zeros(7 * 16000), 200, {"threshold": 0.3})
    assert found == [(50, 150), (170, 240), (400, 600), (600, 650)]
    assert torch.get_num_threads() == threads
    assert asked[0] == {
        "sampling_rate": 16000, "threshold": 0.3, "min_speech_duration_ms": 0,
        "min_silence_duration_ms": 2000, "speech_pad_ms": 400, "max_speech_duration_s": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("batched", [False, True])
def test_windows_are_where_speech_is(asked: list[dict[str, Any]], batched: bool) -> None:
    ours = transcriber(1)
    segments, info = ours.transcribe(sound(7.0), vad=True, batched=batched, **EASY)
    found = list(segments)
    assert info.duration == 7.0 and info.duration_after_vad == pytest.approx(4.2)
    assert info.vad_options == {}
    for segment in found:
        assert 50 <= segment.seek < 240 or 400 <= segment.seek < 650
    assert {50, 400} <= {segment.seek for segment in found}
    assert list(ours.transcribe(sound(7.0), vad=True, batched=batched, **EASY)[0]) == found


@pytest.mark.parametrize("batched", [False, True])
def test_words_are_where_speech_is(asked: list[dict[str, Any]], batched: bool) -> None:
    options: dict[str, Any] = {"vad": True, "batched": batched, "word_timestamps": True, **EASY}
    found = list(transcriber(1).transcribe(sound(7.0), **options)[0])
    check_times(found, 6.5)
    for segment in found:
        assert 0.5 <= segment.start and (segment.end <= 2.4 or 4.0 <= segment.start)


def test_nobody_speaks(asked: list[dict[str, Any]]) -> None:
    for options in ({}, {"batched": True}, {"language": "en"}):
        segments, info = transcriber().transcribe(sound(0.4), vad=True, **options, **EASY)
        assert list(segments) == [] and info.duration_after_vad == 0


def test_wrong_parameters(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(TypeError, match=r"vad_parameters is .*humour"):
        transcriber().transcribe(sound(0.4), vad=True, vad_parameters={"humour": 1})
    with pytest.raises(TypeError, match="vad_parameters is of type list"):
        transcriber().transcribe(sound(0.4), vad=True, vad_parameters=[1])


def test_the_detector_itself() -> None:
    pytest.importorskip("silero_vad")
    silence = torch.randn(3 * 16000, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert speech_of(silence, 3000, None) == []
