"""Fakes of the ops of linear."""

from __future__ import annotations

import torch

from lmdecode._fakes.registry import check_devices, fake


# Of formats with groups, by their numbers: elements of a step, and its bytes of one output; see
# csrc/linear/grouped_format.h.
_STEPS = {
    3: (32, 18), 4: (32, 19), 5: (64, 35), 6: (128, 67), 8: (32, 20), 9: (64, 36), 10: (128, 68),
    11: (32, 34), 12: (32, 36), 13: (32, 18), 14: (32, 18), 15: (256, 148), 16: (256, 276),
    17: (256, 274), 18: (256, 164), 19: (256, 146), 20: (256, 138),
}  # fmt: skip
_BYTES_OF_FOUR = {0: 16, 1: 8, 2: 4, 7: 4}
_INT8_ROWS = (2, 7)
# Of GGUF's types: the format, and the bytes of a block; see csrc/linear/gguf_blocks.h.
_GGUF_BLOCKS = {
    2: (3, 18), 3: (8, 20), 6: (11, 22), 7: (12, 24), 8: (11, 34), 10: (18, 84), 11: (19, 110),
    12: (15, 144), 13: (16, 176), 14: (17, 210), 20: (13, 18), 23: (20, 136), 39: (14, 17),
}  # fmt: skip


def _packed_bytes(out_features, in_features, format):
    # csrc/linear/packed_layout.h
    unit, unit_bytes = _STEPS[format] if format in _STEPS else (4, _BYTES_OF_FOUR[format])
    outputs = out_features + (-out_features % 64)
    size = 64 + outputs * ((in_features + unit - 1) // unit) * unit_bytes
    return size + 8 * outputs * (format in _INT8_ROWS)


@fake("pack_linear")
def _pack_linear(weight, format):
    return weight.new_empty((_packed_bytes(*weight.shape, format),), dtype=torch.uint8)


@fake("pack_gguf_linear")
def _pack_gguf_linear(blocks, type):
    format, block_bytes = _GGUF_BLOCKS[type]
    in_features = blocks.shape[1] // block_bytes * _STEPS[format][0]
    return blocks.new_empty((_packed_bytes(blocks.shape[0], in_features, format),))


@fake("dequantize_gguf")
def _dequantize_gguf(blocks, type):
    format, block_bytes = _GGUF_BLOCKS[type]
    in_features = blocks.shape[1] // block_bytes * _STEPS[format][0]
    return blocks.new_empty((blocks.shape[0], in_features), dtype=torch.float32)


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
