"""Fakes of the ops of linear."""

from __future__ import annotations

import torch

from lmdecode._fakes.registry import check_devices, fake


@fake("pack_linear")
def _pack_linear(weight, format):
    outputs, inputs = (
        size + (-size % unit) for size, unit in zip(weight.shape, (64, 4), strict=True)
    )
    size = 64 + outputs * inputs * (4, 2, 1)[format]  # csrc/linear/packed_layout.h
    return weight.new_empty((size + 8 * outputs * (format == 2),), dtype=torch.uint8)


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
