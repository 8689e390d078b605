"""Encoders of sound: convolutions, then a packed encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmdecode.linear import PackedLinear
from lmdecode.models.packed_stack import PackedEncoder

__all__ = ["CONVOLUTIONS", "AudioEncoder", "pack_convolution"]

# The stride of each; they are 3 frames wide.
CONVOLUTIONS = {"conv1": 1, "conv2": 2}
_WIDTH = 3


def pack_convolution(weight: Tensor, bias: Tensor | None, dtype: str) -> PackedLinear:
    """Return a convolution, [out, in, 3], as a linear layer of frames side by side."""
    return PackedLinear(weight.detach().transpose(1, 2).flatten(1), bias, dtype=dtype)


class AudioEncoder:
    """Two convolutions, each followed by GELU, and an encoder that reads rows.

    ``parts`` has the "encoder", and the convolutions by their names.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._encoder: PackedEncoder = parts["encoder"]
        self._convolutions: list[tuple[PackedLinear, int]] = [
            (parts[name], stride) for name, stride in CONVOLUTIONS.items()
        ]

    @property
    def positions(self) -> int:
        """Return the positions of a memory."""
        return self._encoder.longest or 0

    @property
    def channels(self) -> int:
        """Return the channels of features."""
        return self._convolutions[0][0].in_features // _WIDTH

    @property
    def frames(self) -> int:
        """Return the frames of features."""
        return 2 * self.positions

    def forward(self, features: Tensor) -> Tensor:
        """Return memories, [B, positions, model_size] float32, of features [B, channels, frames].

        Raises ValueError for features of another shape.
        """
        shape = list(features.shape)
        if len(shape) != 3 or shape[1:] != [self.channels, self.frames]:
            raise ValueError(
                f"features has shape {shape}; expected [batch, {self.channels}, {self.frames}]"
            )
        x = features.detach().float().transpose(1, 2)
        for linear, stride in self._convolutions:
            x = _convolved(linear, stride, x)
        batch, length, size = x.shape
        places = torch.arange(length, device="cpu").repeat(batch)
        begins = torch.arange(batch + 1, device="cpu") * length
        return self._encoder.forward(begins, places, inputs=x.reshape(-1, size)).view(x.shape)


def _convolved(linear: PackedLinear, stride: int, x: Tensor) -> Tensor:
    """Return [B, frames / stride, out] of [B, frames, in]: neighbours of a frame are a row."""
    batch, frames, channels = x.shape
    padded = x.new_zeros(batch, frames + _WIDTH - 1, channels)
    padded[:, _WIDTH // 2 : frames + _WIDTH // 2] = x
    count = (frames - 1) // stride + 1
    out = x.new_empty(batch, count, linear.out_features)
    for sequence, result in zip(padded, out, strict=True):
        rows = sequence.as_strided(
            (count, _WIDTH * channels), (stride * channels, 1), sequence.storage_offset()
        )
        linear(rows, activation="gelu", out=result)
    return out
