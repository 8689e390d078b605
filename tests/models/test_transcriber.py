"""``Transcriber`` on real models: the words, times and languages of transformers' pipeline."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor, pipeline

import lmdecode
from benchmarks.quality.speech import RATE, WHY_NOT, can_speak, sentences, speak, word_error_rate
from lmdecode.formats.ctranslate2 import load_tokenizer
from tests.models.real_models import WHISPER_NAMES, model_file

pytestmark = pytest.mark.slow
PAUSE = RATE // 2


@functools.cache
def sounds(count: int) -> list[Tensor]:
    if not can_speak():
        pytest.skip(WHY_NOT)
    return [speak(text) for text in sentences()[:count]]


def long_sound(count: int) -> Tensor:
    """Return sentences one after the other, with pauses."""
    return torch.cat([part for one in sounds(count) for part in (one, torch.zeros(PAUSE))])


@functools.cache
def both(name: str) -> tuple[Any, lmdecode.Transcriber]:
    """Return transformers' pipeline, and ours in float32 of the same weights."""
    folder = model_file(name).parent
    decoding = lmdecode.Decoding.from_pretrained(folder, "float32")
    pipe = pipeline(
        "automatic-speech-recognition",
        model=decoding.model,
        tokenizer=load_tokenizer(folder),
        feature_extractor=WhisperFeatureExtractor(),
    )
    return pipe, lmdecode.Transcriber(decoding)


def options_of(name: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the same call, of transformers and ours."""
    theirs: dict[str, Any] = {"temperature": 0.0, "renormalize_logits": True, **more}
    if not name.endswith(".en"):
        theirs |= {"language": "en", "task": "transcribe"}
    ours: dict[str, Any] = {
        "temperature": 0.0,
        "beam_size": more.get("num_beams", 1),
        "language": "en",
        "condition_on_previous_text": False,
        "batched": False,
        "no_speech_threshold": None,
    }
    return theirs, ours


@pytest.mark.parametrize("num_beams", [1, 5])
@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_sentences(name: str, num_beams: int) -> None:
    pipe, transcriber = both(name)
    theirs, ours = options_of(name, num_beams=num_beams)
    for sound in sounds(30):
        want = pipe(sound.numpy(), generate_kwargs=dict(theirs))["text"]
        segments, _ = transcriber.transcribe(sound, without_timestamps=True, **ours)
        assert "".join(segment.text for segment in segments).split() == want.split()


@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_a_long_sound(name: str, condition: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of the pipeline, which may join two segments of ``generate()``."""
    pipe, transcriber = both(name)
    theirs, ours = options_of(name, num_beams=5, condition_on_prev_tokens=condition)
    sound = long_sound(30)
    segments = list[Any]()

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        out = type(pipe.model).generate(pipe.model, *args, **kwargs, return_segments=True)
        segments.extend(out["segments"][0])
        return out["sequences"]

    monkeypatch.setattr(pipe.model, "generate", generate)
    want = pipe(sound.numpy(), return_timestamps=True, generate_kwargs=dict(theirs))
    ours["condition_on_previous_text"] = condition
    got = list(transcriber.transcribe(sound, **ours)[0])
    assert "".join(segment.text for segment in got).split() == want["text"].split()
    texts = [pipe.tokenizer.decode(s["tokens"], skip_special_tokens=True) for s in segments]
    # Ours leaves segments without text out.
    expected = [pair for pair in zip(texts, segments, strict=True) if pair[0].strip()]
    assert [segment.text for segment in got] == [text for text, _ in expected]
    for segment, (_, other) in zip(got, expected, strict=True):
        assert segment.start == pytest.approx(float(other["start"]), abs=0.0201)


@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_times_of_words(name: str) -> None:
    """One frame from those of transformers, but for marks that stand for a pause."""
    pipe, transcriber = both(name)
    theirs, ours = options_of(name, num_beams=5)
    sound = long_sound(16)
    want = pipe(sound.numpy(), return_timestamps="word", generate_kwargs=dict(theirs))["chunks"]
    segments, _ = transcriber.transcribe(sound, word_timestamps=True, **ours)
    got = [word for segment in segments for word in segment.words or ()]
    assert [word.word for word in got] == [chunk["text"] for chunk in want]
    for i, (word, chunk) in enumerate(zip(got, want, strict=True)):
        start, end = chunk["timestamp"]
        assert word.start == pytest.approx(start, abs=0.0201), word
        if word.word[-1].isalnum():
            assert end is None or word.end == pytest.approx(end, abs=0.0201), word
        else:
            assert word.start <= word.end <= (word.end if end is None else end + 0.0201), word
        assert 0 < word.probability <= 1
        if i:
            assert got[i - 1].end <= word.start + 0.0201


@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_words_are_where_they_are_spoken(name: str) -> None:
    """The first and last word of each sentence, within a third of a second."""
    _, transcriber = both(name)
    count = 6
    segments, _ = transcriber.transcribe(long_sound(count), language="en", word_timestamps=True)
    words = [word for segment in segments for word in segment.words or ()]
    at = 0.0
    for sound in sounds(count):
        end = at + len(sound) / RATE
        inside = [word for word in words if at - 0.3 <= word.start < end]
        assert inside[0].start == pytest.approx(at, abs=0.33)
        assert inside[-1].end == pytest.approx(end, abs=0.33)
        at = end + PAUSE / RATE


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_long_pauses(name: str, batched: bool) -> None:
    """With a detector each sentence has its own times, however long the silence before it is."""
    pytest.importorskip("silero_vad")
    _, transcriber = both(name)
    generator = torch.Generator().manual_seed(0)
    parts: list[Tensor] = []
    spoken: list[tuple[float, float]] = []
    for number, sound in enumerate(sounds(4)):
        seconds = 8 + 7 * (number % 3)
        parts.append(torch.randn(seconds * RATE, generator=generator) * 3e-4)
        begin = sum(map(len, parts)) / RATE
        spoken.append((begin, begin + len(sound) / RATE))
        parts.append(sound)
    segments, info = transcriber.transcribe(
        torch.cat(parts), language="en", vad=True, batched=batched, word_timestamps=True
    )
    found = list(segments)
    assert info.duration_after_vad < sum(end - begin for begin, end in spoken) + 4
    for begin, end in spoken:
        inside = [segment for segment in found if begin - 0.5 < segment.start < end]
        assert inside and inside[0].start == pytest.approx(begin, abs=0.5)
        assert inside[-1].end == pytest.approx(end, abs=0.8)
        words = [word for segment in inside for word in segment.words or ()]
        assert begin - 0.5 < words[0].start and words[-1].end < end + 0.8


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1.5), ("int8", 2.5)])
@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_formats_and_windows_together(name: str, dtype: str, most: float) -> None:
    """Few words change: by the format, or by windows that are decoded together."""
    spoken = " ".join(sentences()[:30])
    _, exact = both(name)
    small = lmdecode.Transcriber(model_file(name).parent, dtype)

    def wrong(transcriber: lmdecode.Transcriber, **options: Any) -> float:
        segments, _ = transcriber.transcribe(long_sound(30), language="en", **options)
        return 100 * word_error_rate([spoken], [" ".join(segment.text for segment in segments)])

    expected = wrong(exact)
    assert wrong(small) <= expected + most
    assert wrong(small, batched=True) <= expected + most + 1


def test_languages() -> None:
    name = next(name for name in WHISPER_NAMES if not name.endswith(".en"))
    _, transcriber = both(name)
    assert len(transcriber.supported_languages) == 99
    segments, info = transcriber.transcribe(sounds(1)[0])
    assert (info.language, info.language_probability > 0.9) == ("en", True)
    assert info.all_language_probs is not None and len(info.all_language_probs) == 99
    assert list(segments)


@pytest.mark.parametrize("name", WHISPER_NAMES)
def test_silence_and_noise_end(name: str) -> None:
    _, transcriber = both(name)
    generator = torch.Generator().manual_seed(0)
    for sound in (torch.zeros(40 * RATE), torch.randn(8 * RATE, generator=generator) * 0.3):
        segments, _ = transcriber.transcribe(sound, language="en")
        for segment in segments:
            assert segment.end > segment.start


@pytest.mark.parametrize("name", WHISPER_NAMES[:1])
def test_a_saved_model(name: str, tmp_path: Path) -> None:
    folder = model_file(name).parent
    decoding = lmdecode.Decoding.from_pretrained(folder, "int8", keep_model=False)
    decoding.save(tmp_path)
    expected = list(lmdecode.Transcriber(decoding).transcribe(sounds(1)[0])[0])
    assert list(lmdecode.Transcriber(tmp_path).transcribe(sounds(1)[0])[0]) == expected
