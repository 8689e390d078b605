"""Sounds from files, arrays and tensors."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from lmdecode.speech import Segment, TranscriptionInfo, TranscriptionOptions, Word
from lmdecode.speech.audio_files import load_audio
from lmdecode.speech.features import HOP, RATE, LogMel
from lmdecode.speech.formats import FORMATS
from tests.speech.models import sound
from tests.support.processes import run_python

av = pytest.importorskip("av")


def write(target: Any, samples: Tensor, codec: str, form: str, rate: int, channels: int) -> None:
    """Write a sound, resampled by repeating samples, to a file or buffer."""
    layout = "stereo" if channels == 2 else "mono"
    with av.open(target, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        data = samples.numpy()[None].repeat(channels, 0).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(data, format="fltp", layout=layout)
        frame.rate = 16000
        resampler = av.AudioResampler(
            format=stream.codec_context.format, layout=layout, rate=rate,
            frame_size=stream.codec_context.frame_size,
        )  # fmt: skip
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))


@pytest.mark.parametrize(
    ("codec", "form", "rate", "channels", "error"),
    [
        ("pcm_s16le", "wav", 16000, 1, 1e-4),
        ("pcm_f32le", "wav", 16000, 1, 0.0),
        ("pcm_s16le", "wav", 44100, 2, 0.15),
        ("flac", "flac", 48000, 2, 0.15),
        ("libmp3lame", "mp3", 44100, 1, None),
        ("libopus", "ogg", 48000, 1, None),
        ("aac", "mp4", 16000, 1, None),
    ],
)
def test_files(
    codec: str, form: str, rate: int, channels: int, error: float | None, tmp_path: Path
) -> None:
    samples = sound(1.3) * 0.3
    path = tmp_path / f"sound.{form}"
    try:
        write(str(path), samples, codec, form, rate, channels)
    except (av.error.FFmpegError, ValueError) as why:
        pytest.skip(f"this FFmpeg does not write {codec} ({why})")
    for source in (path, str(path), io.BytesIO(path.read_bytes())):
        got = load_audio(source)
        assert got.dtype == torch.float32 and got.dim() == 1
        assert abs(len(got) - len(samples)) < 2500  # padding of the codecs
        if error is not None:
            count = min(len(got), len(samples))
            assert float((got[:count] - samples[:count]).abs().max()) <= error


def test_arrays_and_tensors() -> None:
    samples = sound(0.2)
    for given in (
        samples, samples.numpy(), samples.double(), samples.requires_grad_(), samples.detach()[::1],
        samples.detach().repeat_interleave(2)[::2],
    ):  # fmt: skip
        got = load_audio(given)
        assert torch.equal(got, samples.detach()) and not got.requires_grad
    assert load_audio(np.zeros(0, np.float32)).shape == (0,)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (torch.zeros(2, 5), ValueError, r"audio is float32 of shape \[2, 5\]"),
        (torch.zeros(5, dtype=torch.int16), ValueError, "audio is int16"),
        (np.zeros((3, 1)), ValueError, r"audio is float64 of shape \[3, 1\]"),
        (torch.tensor([0.0, torch.nan]), ValueError, "NaN or infinite"),
        (3, TypeError, "audio is of type int"),
        (None, TypeError, "audio is of type NoneType"),
        ("there-is-no-such-file.wav", FileNotFoundError, "there-is-no-such-file"),
    ],
    ids=str,
)
def test_what_is_no_sound(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        load_audio(given)


def test_files_without_sound(tmp_path: Path) -> None:
    path = tmp_path / "text.wav"
    path.write_bytes(b"This is a text." * 50)
    with pytest.raises(ValueError, match=r"text\.wav cannot be decoded"):
        load_audio(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"text\.wav cannot be decoded"):
        load_audio(path)
    with pytest.raises(IsADirectoryError):
        load_audio(tmp_path)
    with pytest.raises(ValueError, match="BytesIO cannot be decoded"):
        load_audio(io.BytesIO(b"nothing"))


def test_a_damaged_file(tmp_path: Path) -> None:
    """What is left of it counts."""
    path = tmp_path / "sound.flac"
    write(str(path), sound(2.0) * 0.3, "flac", "flac", 16000, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 3000] = bytes(3000)
    path.write_bytes(data[: -len(data) // 8])
    assert 8000 < len(load_audio(path)) <= 32000


@pytest.mark.parametrize(("package", "extra"), [("av", "audio"), ("silero_vad", "vad")])
@pytest.mark.slow
def test_missing_packages_name_their_extra(package: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"")
    code = f"""
import sys
sys.modules[{package!r}] = None
import torch
from lmdecode.speech.audio_files import load_audio
from lmdecode.speech.voice_activity import speech_of
{"load_audio('a.wav')" if package == "av" else "speech_of(torch.zeros(9), 100, None)"}
"""
    done = run_python("-c", code, cwd=tmp_path)
    message = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and message.startswith("ImportError")
    assert f"pip install 'lmdecode[{extra}]'" in message


@pytest.mark.parametrize("channels", [16, 80, 128])
@pytest.mark.parametrize("samples", [0, 1, 150, 3 * RATE + 77, 30 * RATE])
def test_a_window(channels: int, samples: int) -> None:
    sound = torch.randn(samples, generator=torch.Generator().manual_seed(0)) * 0.1
    extractor = WhisperFeatureExtractor(feature_size=channels)
    if samples:
        found = extractor(sound.numpy(), sampling_rate=RATE, return_tensors="pt")
    else:
        found = extractor(torch.zeros(1).numpy(), sampling_rate=RATE, return_tensors="pt")
    got = LogMel(channels)(sound, 3000)
    torch.testing.assert_close(got, found.input_features[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("seconds", [30.01, 61.7])
def test_a_long_sound(seconds: float) -> None:
    """Its parts are computed one by one, and its loudest place sets the floor of all."""
    sound = torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(0)) * 0.01
    sound[len(sound) // 2 :][:5000] *= 80
    sound[:RATE] = 0
    found = WhisperFeatureExtractor()(
        sound.numpy(), sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
    )
    got = LogMel(80)(sound)
    assert got.shape == (80, len(sound) // HOP)
    torch.testing.assert_close(got, found.input_features[0], rtol=0, atol=1e-5)


def test_a_sound_without_a_frame() -> None:
    assert LogMel(80)(torch.zeros(0)).shape == (80, 0)
    assert LogMel(80)(torch.zeros(HOP - 1)).shape == (80, 0)


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
