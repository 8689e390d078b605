"""Encoders of encoder-decoder models, of tokens and of sound, in C++."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode._ops import ops
from lmdecode.decoder.config import (
    FORMATS,
    ActivationName,
    Norm,
    check_numbers,
    check_sizes,
    check_switches,
    float32,
)
from lmdecode.decoder.weights import PackedStack, pack_layer, packed_fields
from lmdecode.linear import PackedLinear

__all__ = [
    "CONVOLUTIONS",
    "AudioEncoder",
    "EncoderConfig",
    "EncoderLayerWeights",
    "EncoderWeights",
    "PackedEncoder",
    "pack_convolution",
]


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes and switches of an encoder; ``DecoderConfig`` explains the fields that it has, too.

    ``vocab_size`` is 0 if the encoder reads rows of ``model_size`` features instead of tokens;
    these are scaled by ``embedding_scale``, too. ``position_offset`` is the row of the position
    table for position 0. Raises ValueError or TypeError that names the argument.
    """

    num_layers: int
    model_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    norm: Norm = "layer_norm"
    norm_first: bool = False
    norm_epsilon: float = 1e-5
    activation: ActivationName = "relu"
    gated: bool = False
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    position_offset: int = 0

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "EncoderConfig"
        check_sizes(op, self, "num_layers", "model_size", "num_heads", "head_size", "ffn_size")
        check_sizes(op, self, "vocab_size", "position_offset", least=0)
        check_switches(op, self)
        check_numbers(op, self, "norm_epsilon", "attention_scale", "embedding_scale")

    @property
    def attention_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_size


class EncoderLayerWeights(NamedTuple):
    """One layer's weights, as those of ``LayerWeights`` without cross-attention.

    D is ``model_size``, A ``num_heads * head_size``, F ``ffn_size``.
    """

    self_norm_gamma: Tensor | None
    self_norm_beta: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    self_out: Tensor
    self_out_bias: Tensor | None
    ffn_norm_gamma: Tensor | None
    ffn_norm_beta: Tensor | None
    ffn_up: Tensor
    ffn_up_bias: Tensor | None
    ffn_gate: Tensor | None
    ffn_gate_bias: Tensor | None
    ffn_down: Tensor
    ffn_down_bias: Tensor | None


class EncoderWeights(NamedTuple):
    """The weights of an encoder, floats of any dtype.

    ``embedding`` is [V, D], or None if the encoder reads rows. ``positions``, [P, D], are added to
    the embeddings. ``relative_bias`` is added to the scores by key position - query position, from
    1 - n on: [heads, 2 n - 1] for all layers, or [layers * heads, 2 n - 1]. Norms are [D]; without
    a gamma there is no norm.
    """

    embedding: Tensor | None
    positions: Tensor | None
    relative_bias: Tensor | None
    embedding_norm_gamma: Tensor | None
    embedding_norm_beta: Tensor | None
    final_norm_gamma: Tensor | None
    final_norm_beta: Tensor | None
    layers: tuple[EncoderLayerWeights, ...]


class PackedEncoder(PackedStack):
    """An encoder's weights, packed once.

    ``weights`` are not kept, except for an embedding that is float32 already. Raises ValueError or
    TypeError that names the weight with a wrong shape, dtype or type.
    """

    config: EncoderConfig
    kind = "encoder"
    config_type = EncoderConfig
    layer_type = EncoderLayerWeights

    def __init__(
        self,
        config: EncoderConfig,
        weights: EncoderWeights,
        weight_format: str | torch.dtype = "float32",
    ) -> None:
        weight_format = check_format("Decoding", weight_format, FORMATS)
        layers = (pack_layer(config, layer, weight_format) for layer in weights.layers)
        embedding = float32(weights.embedding)
        parts = packed_fields(weights, weight_format)
        self._gather(config, weight_format, embedding, parts, layers)

    @property
    def longest(self) -> int | None:
        """The most rows of a sequence; None if neither positions nor distances limit it."""
        if self.num_positions is not None or self.num_distances is None:
            return self.num_positions
        return self.num_distances // 2 + 1

    def forward(
        self,
        row_begins: Tensor,
        positions: Tensor,
        *,
        tokens: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the encoder's output, [rows, model_size] float32.

        ``row_begins``, [sequences + 1] int64, is the first row of each sequence, then the number of
        rows. ``positions``, [rows] int64, index the position embeddings, if the model has them.
        Exactly one of ``tokens``, [rows] int64, and ``inputs``, [rows, model_size] float32, is
        given.
        """
        out: Tensor = ops.encoder_forward(*self.of_model, tokens, inputs, positions, row_begins)
        return out


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
