"""Speech alone is transcribed: with a detector that answers what a test wants."""

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


def test_the_detector_is_asked_for_pieces_that_fit_a_window(asked: list[dict[str, Any]]) -> None:
    threads = torch.get_num_threads()
    found = speech_of(torch.zeros(7 * 16000), 200, {"threshold": 0.3})
    assert found == [(50, 150), (170, 240), (400, 650)]
    assert torch.get_num_threads() == threads
    assert asked[0] == {
        "sampling_rate": 16000, "threshold": 0.3, "min_speech_duration_ms": 0,
        "min_silence_duration_ms": 2000, "speech_pad_ms": 400, "max_speech_duration_s": 2.0,
    }  # fmt: skip
    speech_of(torch.zeros(7 * 16000), None, None)
    assert "max_speech_duration_s" not in asked[1]


def test_long_speech_is_cut_at_its_last_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """faster-whisper 1.2.1's rule; silero-vad 6.2.3 takes its longest pause if it is not told."""
    calls: list[dict[str, Any]] = []

    def get_speech_timestamps(
        audio: Any, model: Any, use_max_poss_sil_at_max_speech: bool = True, **given: Any
    ) -> list[dict[str, int]]:
        calls.append({"longest": use_max_poss_sil_at_max_speech, **given})
        return []

    monkeypatch.setattr(voice_activity, "_silero", lambda: ("a model", get_speech_timestamps))
    speech_of(torch.zeros(16000), 200, None)
    assert (calls[0]["longest"], calls[0]["max_speech_duration_s"]) == (False, 2.0)
    own = {"use_max_poss_sil_at_max_speech": True, "max_speech_duration_s": 9}
    speech_of(torch.zeros(16000), 200, own)
    assert (calls[1]["longest"], calls[1]["max_speech_duration_s"]) == (True, 9)


def test_speech_without_a_pause_is_cut_where_it_is_quiet(asked: list[dict[str, Any]]) -> None:
    """Windows that are decoded together; in order the text says where one ends."""
    samples = sound(7.0)
    samples[int(5.7 * 16000) : int(5.9 * 16000)] *= 1e-3
    options = {"vad": True, "language": "en", **EASY}
    together = list(transcriber(1).transcribe(samples, batched=True, **options)[0])
    seeks = sorted({segment.seek for segment in together if segment.seek >= 400})
    assert len(seeks) == 2 and 570 <= seeks[1] <= 590
    in_order = list(transcriber(1).transcribe(samples, **options)[0])
    assert {50, 400} <= {segment.seek for segment in in_order}


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
    found = list(transcriber(1).transcribe(sound(7.0, 2), **options)[0])
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
