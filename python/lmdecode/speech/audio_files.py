"""Sounds from files of any format, arrays and tensors."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import dtype_name, install_hint, type_error
from lmdecode.speech.features import RATE

__all__ = ["load_audio"]

_OP = "Transcriber"


def load_audio(audio: Any) -> Tensor:
    """Return a sound as [n] float32 at 16 kHz on the CPU.

    ``audio`` is a file of any format that FFmpeg reads (its first sound track, channels mixed), or
    [n] floats at 16 kHz, -1 to 1. Raises ImportError if a file needs the missing package av,
    OSError if the file does not exist, and ValueError or TypeError if it has no sound or is
    damaged, or if ``audio`` is no sound of one dimension.
    """
    if isinstance(audio, (str, os.PathLike)) or hasattr(audio, "read"):
        return _decode(audio)
    if not isinstance(audio, Tensor) and hasattr(audio, "__array__"):
        audio = torch.as_tensor(audio, device="cpu")
    if not isinstance(audio, Tensor):
        raise type_error(_OP, "audio", audio, "a path, a binary file, a tensor or an array")
    if audio.dim() != 1 or not audio.dtype.is_floating_point:
        raise ValueError(
            f"{_OP}: audio is {dtype_name(audio)} of shape {list(audio.shape)}; expected floats of "
            "one dimension, samples at 16 kHz from -1 to 1"
        )
    sound = audio.detach().to(device="cpu", dtype=torch.float32).contiguous()
    if not bool(sound.isfinite().all()):
        raise ValueError(f"{_OP}: audio has NaN or infinite samples; expected -1 to 1")
    return sound


def _name(audio: Any) -> str:
    if isinstance(audio, (str, os.PathLike)):
        return os.fspath(audio)
    return str(getattr(audio, "name", None) or type(audio).__name__)


def _decode(audio: Any) -> Tensor:
    """Return the first sound track of a file, mixed to one channel."""
    try:
        import av
    except ImportError as error:
        raise ImportError(
            f"{_OP}: files of sound need the package av: {install_hint('audio')}"
        ) from error
    if isinstance(audio, (str, os.PathLike)):
        with open(audio, "rb"):  # raises the system's error if there is no file
            pass
        audio = os.fspath(audio)
    parts: list[Tensor] = []
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)

    def take(frame: Any) -> None:
        for resampled in resampler.resample(frame):
            parts.append(torch.from_numpy(resampled.to_ndarray().reshape(-1)))

    try:
        with av.open(audio, mode="r", metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise ValueError(f"{_OP}: {_name(audio)} has no sound; expected a sound track")
            for packet in container.demux(container.streams.audio[0]):
                try:
                    frames = packet.decode()
                except av.error.InvalidDataError:
                    continue  # a damaged packet is left out, as players do
                for frame in frames:
                    frame.pts = None  # gaps and repeats in time stamps have no meaning here
                    take(frame)
            if parts:
                take(None)
    except av.error.FFmpegError as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{_OP}: {_name(audio)} cannot be decoded ({reason}); expected a file of sound"
        ) from error
    if not parts:
        raise ValueError(f"{_OP}: {_name(audio)} has no samples; expected a sound track")
    return torch.cat(parts)
