"""Weights in the blocks of a GGUF file as floats: llama.cpp's dequantization in plain torch.

Each function takes blocks, uint8 [N, bytes of a block], and gives float32 [N, weights of a block].
Products and differences are in the order of ggml-quants.c, so that all bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["dequantize_blocks"]

# What four bits stand for: in IQ4_NL and IQ4_XS, and in MXFP4 (twice its numbers).
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# Blocks of 32 that are read together, so that temporaries stay in the cache.
_BLOCKS_AT_ONCE = 1 << 13


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 at a byte of each block, [N, 1] float32."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _bits(data: Tensor, run: int, width: int) -> Tensor:
    """Numbers of ``width`` bits, [N, numbers].

    Each ``run`` bytes hold first the lowest bits of all of them, then the next.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    parts = data.reshape(len(data), -1, 1, run) >> shifts
    return (parts & ((1 << width) - 1)).reshape(len(data), -1)


def _times(scales: Tensor, numbers: Tensor) -> Tensor:
    """Each scale, of ``scales`` [N, S], times its share of ``numbers`` [N, weights]."""
    return scales[..., None] * numbers.float().reshape(*scales.shape, -1)


def _less(products: Tensor, minima: Tensor) -> Tensor:
    return (products - minima[..., None]).flatten(1)


def _q4_0(b: Tensor) -> Tensor:
    return _times(_halves(b, 0), _bits(b[:, 2:], 16, 4).float() - 8).flatten(1)


def _q4_1(b: Tensor) -> Tensor:
    return _times(_halves(b, 0), _bits(b[:, 4:], 16, 4)).flatten(1) + _halves(b, 2)


def _five_bits(fifth: Tensor, data: Tensor) -> Tensor:
    """Take 4 and 16 bytes; bit j of the 32 belongs to weight j."""
    return _bits(data, 16, 4) | _bits(fifth, 1, 1) << 4


def _q5_0(b: Tensor) -> Tensor:
    return _times(_halves(b, 0), _five_bits(b[:, 2:6], b[:, 6:]).float() - 16).flatten(1)


def _q5_1(b: Tensor) -> Tensor:
    numbers = _five_bits(b[:, 4:8], b[:, 8:])
    return _times(_halves(b, 0), numbers).flatten(1) + _halves(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _times(_halves(b, 0), b[:, 2:].view(torch.int8)).flatten(1)


def _q2_k(b: Tensor) -> Tensor:
    scales, minima = (b[:, :16] & 15).float(), (b[:, :16] >> 4).float()
    products = _times(_halves(b, 80) * scales, _bits(b[:, 16:80], 32, 2))
    return _less(products, _halves(b, 82) * minima)


def _q3_k(b: Tensor) -> Tensor:
    packed = b[:, 96:108]
    scales = _bits(packed[:, :8], 8, 4) | _bits(packed[:, 8:], 4, 2) << 4
    # Where the bit of the mask is off, 4 is taken away.
    high = _bits(b[:, :32], 32, 1)
    numbers = _bits(b[:, 32:96], 32, 2).float() - 4 * (1 - high.float())
    return _times(_halves(b, 108) * (scales.float() - 32), numbers).flatten(1)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits, of 12 bytes, each [N, 8] float32."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6) << 4], dim=1)
    minima = torch.cat([high & 63, (rest >> 4) | (high >> 6) << 4], dim=1)
    return scales.float(), minima.float()


def _with_pairs(b: Tensor, numbers: Tensor) -> Tensor:
    scales, minima = _six_bit_pairs(b[:, 4:16])
    return _less(_times(_halves(b, 0) * scales, numbers), _halves(b, 2) * minima)


def _q4_k(b: Tensor) -> Tensor:
    return _with_pairs(b, _bits(b[:, 16:], 32, 4))


def _q5_k(b: Tensor) -> Tensor:
    return _with_pairs(b, _bits(b[:, 48:], 32, 4) | _bits(b[:, 16:48], 32, 1) << 4)


def _q6_k(b: Tensor) -> Tensor:
    numbers = _bits(b[:, :128], 64, 4) | _bits(b[:, 128:192], 32, 2) << 4
    scales = _halves(b, 208) * b[:, 192:208].view(torch.int8).float()
    return _times(scales, numbers.float() - 32).flatten(1)


def _valued(numbers: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[numbers.int()]


def _iq4_nl(b: Tensor) -> Tensor:
    return _times(_halves(b, 0), _valued(_bits(b[:, 2:], 16, 4), _IQ4_VALUES)).flatten(1)


def _iq4_xs(b: Tensor) -> Tensor:
    scales = _bits(b[:, 4:8], 1, 4) | _bits(b[:, 2:4], 1, 2) << 4
    numbers = _valued(_bits(b[:, 8:], 16, 4), _IQ4_VALUES)
    return _times(_halves(b, 0) * (scales.float() - 32), numbers).flatten(1)


def _mxfp4(b: Tensor) -> Tensor:
    exponent = b[:, :1].int()
    # Half of 2^(exponent - 127), as the values are doubled; the least two are subnormal.
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    numbers = _valued(_bits(b[:, 1:], 16, 4), _MXFP4_VALUES)
    return _times(bits.view(torch.float32), numbers).flatten(1)


# Weights and bytes of a block, and the function that reads it, by the names of ggml.
_KINDS: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
    "MXFP4": (32, 17, _mxfp4),
}


def dequantize_blocks(data: Tensor, kind: str) -> Tensor:
    """Return blocks, uint8 [..., bytes], as float32 [..., weights], bit for bit as llama.cpp.

    ``kind`` is a type of blocks by ggml's name. Raises ValueError for another kind or dtype, and
    for rows that are not whole blocks.
    """
    if kind not in _KINDS:
        raise ValueError(
            f"dequantize_blocks: kind is {kind!r}; expected one of {', '.join(_KINDS)}"
        )
    if data.dtype != torch.uint8 or data.dim() == 0:
        raise ValueError(
            f"dequantize_blocks: data is {data.dtype} {list(data.shape)}; expected uint8 rows"
        )
    size, block_bytes, read = _KINDS[kind]
    blocks, left = divmod(data.shape[-1], block_bytes)
    if left:
        raise ValueError(
            f"dequantize_blocks: data has rows of {data.shape[-1]} bytes; expected a multiple of "
            f"{block_bytes}, as kind is {kind}"
        )
    flat = data.reshape(-1, block_bytes)
    values = torch.empty(len(flat), size)
    for begin in range(0, len(flat), _BLOCKS_AT_ONCE * 32 // size):
        part = slice(begin, begin + _BLOCKS_AT_ONCE * 32 // size)
        values[part] = read(flat[part])
    return values.view(*data.shape[:-1], blocks * size)
