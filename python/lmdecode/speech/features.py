"""Log-mel features of sound, as Whisper's encoder reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["HOP", "RATE", "LogMel"]

RATE = 16_000  # samples a second
HOP = 160  # samples of a frame
_WINDOW = 400  # samples in the window of a frame
_FRAMES = 3000  # frames computed at a time: their spectra take 5 MB
_FLOOR = 1e-10
_RANGE = 8.0  # decades below the loudest value of a sound


def _mel_of_hertz(hertz: Tensor) -> Tensor:
    """Slaney's scale: linear below 1000 Hz, logarithmic above."""
    above = 15.0 + torch.log(hertz.clamp(min=1000.0) / 1000.0) * (27.0 / math.log(6.4))
    return torch.where(hertz < 1000.0, hertz * (3.0 / 200.0), above)


def _hertz_of_mel(mel: Tensor) -> Tensor:
    above = 1000.0 * torch.exp((mel.clamp(min=15.0) - 15.0) * (math.log(6.4) / 27.0))
    return torch.where(mel < 15.0, mel * (200.0 / 3.0), above)


def _mel_filters(channels: int) -> Tensor:
    """Return [channels, bins] float32: triangles of equal area, evenly spaced in mel."""
    top = _mel_of_hertz(torch.tensor([RATE / 2], dtype=torch.float64, device="cpu"))
    edges = _hertz_of_mel(
        torch.linspace(0.0, float(top), channels + 2, dtype=torch.float64, device="cpu")
    )
    bins = torch.linspace(0.0, RATE / 2, _WINDOW // 2 + 1, dtype=torch.float64, device="cpu")
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (bins - left) / (middle - left), (right - bins) / (right - middle)
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    return (triangles * (2.0 / (right - left))).float()


class LogMel:
    """Computes the features of sounds; they equal transformers' within 1e-5.

    ``channels`` are mel bands: 80, or 128 for large-v3.
    """

    def __init__(self, channels: int) -> None:
        self._filters = _mel_filters(channels)
        self._window = torch.hann_window(_WINDOW, dtype=torch.float32, device="cpu")

    def __call__(self, samples: Tensor, least: int = 0) -> Tensor:
        """Return [channels, frames] float32 of [n] float32 at 16 kHz, a frame for each whole 10 ms.

        The loudest value of the sound sets the floor of all. Silence extends a sound shorter than
        ``least`` frames.
        """
        count = max(len(samples), least * HOP)
        frames = count // HOP
        found = torch.empty(len(self._filters), frames, dtype=torch.float32, device="cpu")
        half = _WINDOW // 2
        padded = samples.new_zeros(max(count, half + 1) + 2 * half)
        padded[half : half + len(samples)] = samples
        # A frame's window is centred: beyond the ends the sound is mirrored.
        padded[:half] = padded[half + 1 : 2 * half + 1].flip(0)
        padded[-half:] = padded[-2 * half - 1 : -half - 1].flip(0)
        for begin in range(0, frames, _FRAMES):
            end = min(begin + _FRAMES, frames)
            part = padded[begin * HOP : (end - 1) * HOP + _WINDOW]
            spectra = torch.stft(
                part, _WINDOW, HOP, window=self._window, center=False, return_complex=True
            )
            power = spectra.abs().square()
            torch.matmul(self._filters, power, out=found[:, begin:end])
        found.clamp_(min=_FLOOR).log10_()
        if frames:
            found = torch.maximum(found, found.max() - _RANGE)
        return found.add_(4.0).div_(4.0)
