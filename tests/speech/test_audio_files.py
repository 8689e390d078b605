"""Sounds from files, arrays and tensors."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmdecode.speech.audio_files import load_audio
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
