"""Fakes of the ops of linear."""

from __future__ import annotations

import torch

from lmdecode._fakes.registry import check_devices, fake


@fake("pack_linear")
def _pack_linear(weight, format):
    # csrc/linear/packed_layout.h
    unit = (4, 4, 4, 32, 32, 64, 128)[format]
    unit_bytes = (16, 8, 4, 18, 19, 35, 67)[format]
    outputs = weight.shape[0] + (-weight.shape[0] % 64)
    size = 64 + outputs * ((weight.shape[1] + unit - 1) // unit) * unit_bytes
    return weight.new_empty((size + 8 * outputs * (format == 2),), dtype=torch.uint8)


@fake("repack_linear")
def _repack_linear(packed):
    return torch.empty_like(packed)


@fake("pack_quantized_linear")
def _pack_quantized_linear(weight, scales, zeros):
    check_devices("pack_quantized_linear", "weight", weight, dict(scales=scales, zeros=zeros))
    outputs, groups = weight.shape[0] + (-weight.shape[0] % 64), scales.shape[1]
    beside = 2 if zeros is None and weight.shape[1] == 32 * groups else 3  # scales and zeros
    size = 64 + outputs * (weight.shape[1] // 2 + beside * groups)
    return weight.new_empty((size,), dtype=torch.uint8)


@fake("packed_linear")
def _packed_linear(x, packed, out_features, format, bias, activation, multiplier, residual):
    others = dict(packed=packed, bias=bias, multiplier=multiplier, residual=residual)
    check_devices("packed_linear", "x", x, others)
    return x.new_empty((x.shape[0], out_features))


@fake("packed_linear.out")
def _packed_linear_out(
    x, packed, out_features, format, bias, activation, multiplier, residual, *, out
):
    others = dict(packed=packed, bias=bias, multiplier=multiplier, residual=residual, out=out)
    check_devices("packed_linear", "x", x, others)


@fake("layer_norm")
def _layer_norm(x, weight, bias, eps):
    check_devices("layer_norm", "x", x, dict(weight=weight, bias=bias))
    return x.new_empty(x.shape)


@fake("rms_norm")
def _rms_norm(x, weight, eps):
    check_devices("rms_norm", "x", x, dict(weight=weight))
    return x.new_empty(x.shape)
