"""The encoder of an encoder-decoder model, again in plain torch."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.models.configs import EncoderConfig
from lmdecode.models.weights import EncoderLayerWeights, EncoderWeights, bias_of_layer
from lmdecode.reference.decoder import Linear, feed_forward, normed, residual, self_attention
from lmdecode.reference.linear import packed_linear

__all__ = ["encoder_forward"]


def _linear_of(weight_format: str) -> Linear:
    """Return the products of a format; they return float32, except for the format float32."""
    if weight_format == "float32":
        return F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow = None if bias is None else bias.float()
        rows = x.flatten(0, -2).float()
        y = packed_linear(rows, weight.float(), narrow, dtype=weight_format)
        return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    return linear


def _layer(
    config: EncoderConfig,
    w: EncoderLayerWeights,
    relative_bias: Tensor | None,
    x: Tensor,
    linear: Linear,
    attention_dtype: torch.dtype | None,
) -> Tensor:
    """Apply a layer to a sequence, [T, D]; relative_bias is the layer's own, [heads, 2 n - 1]."""
    bias = None
    if relative_bias is not None:
        places, middle = torch.arange(x.shape[0]), relative_bias.shape[1] // 2
        bias = relative_bias[:, places - places[:, None] + middle]
    attention = partial(
        self_attention, config, w, visible=None, bias=bias, linear=linear,
        factor_dtype=attention_dtype,
    )  # fmt: skip
    ffn = partial(feed_forward, config, w, linear=linear)
    x = residual(config, x[None], w.self_norm_gamma, w.self_norm_beta, attention)
    return residual(config, x, w.ffn_norm_gamma, w.ffn_norm_beta, ffn)[0]


@torch.no_grad()
def encoder_forward(
    config: EncoderConfig,
    weights: EncoderWeights,
    row_begins: Tensor,
    positions: Tensor,
    *,
    tokens: Tensor | None = None,
    inputs: Tensor | None = None,
    weight_format: str = "float32",
    dtype: torch.dtype = torch.float32,
    attention_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the encoder's output, [rows, model_size] in ``dtype``, float32 or float64.

    ``row_begins``, ``positions``, ``tokens`` and ``inputs`` (of any dtype) are those of
    ``PackedEncoder.forward``. Products with linear weights of ``weight_format`` are those of
    ``lmdecode.reference.packed_linear``, except for float32, whose products are computed in
    ``dtype``. Queries, keys, values and weights of attention are rounded to ``attention_dtype``:
    bfloat16 is what the op does where ``cpu_capability()`` is "amx" and the weights are not
    float32.
    """

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    if tokens is not None:
        assert weights.embedding is not None
        x = weights.embedding[tokens].to(dtype)
    else:
        assert inputs is not None
        x = inputs.to(dtype)
    x = x * config.embedding_scale
    if weights.positions is not None:
        x = x + weights.positions[positions + config.position_offset].to(dtype)
    if weights.embedding_norm_gamma is not None:
        norm = (wide(weights.embedding_norm_gamma), wide(weights.embedding_norm_beta))
        x = normed(config, x, *norm)

    linear = _linear_of(weight_format)
    for number, layer in enumerate(weights.layers):
        w = EncoderLayerWeights(*map(wide, layer))  # type: ignore[arg-type]
        table = wide(bias_of_layer(config, weights.relative_bias, number))
        sequences = x.tensor_split(row_begins[1:-1])
        options = (linear, attention_dtype)
        x = torch.cat([_layer(config, w, table, rows, *options) for rows in sequences])
    if weights.final_norm_gamma is None:
        return x
    return normed(config, x, wide(weights.final_norm_gamma), wide(weights.final_norm_beta))
