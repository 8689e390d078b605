"""The packed matmul and the norms in plain torch; sums in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.reference.arithmetic import fused_multiply_add

__all__ = [
    "layer_norm",
    "packed_linear",
    "packed_quantized_linear",
    "quantize_groups",
    "quantize_rows",
    "rms_norm",
]

_LEAST_SCALED_MAGNITUDE = 2.0**-100


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to whole multiples of a 127th of their largest magnitude.

    Parameters
    ----------
    x : Tensor
        float32 ``[rows, size]``.

    Returns
    -------
    tuple of Tensor
        int8 ``[rows, size]`` and the float32 scales ``[rows]``: 0 where all magnitudes lie below
        2^-100, NaN, with quotients of 0, where the row holds NaN or inf.
    """
    if x.shape[1] == 0:
        return x.to(torch.int8), torch.zeros(x.shape[0])
    largest = x.abs().amax(1)  # NaN where there is one
    scaled = (largest >= _LEAST_SCALED_MAGNITUDE) & largest.isfinite()
    most = torch.full_like(largest, 127.0)  # torch divides a number by multiplying it
    factor = torch.where(scaled, most / largest, 0.0)
    scale = torch.where(scaled, largest / most, 0.0)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    quotients = torch.where(scaled[:, None], torch.round(x * factor[:, None]), 0.0)
    return quotients.to(torch.int8), scale


def _grouped(x: Tensor, size: int) -> Tensor:
    """``[rows, features]`` as ``[rows, groups, size]``, zeros at the end."""
    groups = -(-x.shape[1] // size)
    return F.pad(x, (0, groups * size - x.shape[1])).view(x.shape[0], groups, size)


def quantize_groups(weight: Tensor, group_size: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Round weights to four bits, in groups: ``scale * (q - zero)``.

    Parameters
    ----------
    weight : Tensor
        float32 ``[out_features, in_features]``.
    group_size : {32, 64, 128}, optional
        None: groups of 32 whose zero is 8. The scale is -1/8 of the number of the largest
        magnitude, the first of them. Else the scale is a 15th of the distance from the least
        number to the largest, 0 among them, and the zero is a number from 0 to 15.

    Returns
    -------
    tuple of Tensor
        ``q`` uint8 ``[out_features, in_features]``, the scales float16 and the zeros uint8, both
        ``[out_features, groups]``. A scale is NaN where its group holds NaN or inf, or where it
        is too large for float16.
    """
    groups = _grouped(weight, group_size or 32)
    finite = groups.isfinite().all(2)
    if group_size is None:
        first = groups.abs().argmax(2, keepdim=True) if groups.numel() else groups[:, :, :1].long()
        step = groups.gather(2, first)[:, :, 0] / torch.full((), -8.0)
    else:
        zero = torch.zeros(())
        least, most = (
            torch.minimum(groups.amin(2), zero) if groups.numel() else groups.sum(2),
            torch.maximum(groups.amax(2), zero) if groups.numel() else groups.sum(2),
        )
        step = (most * 0.5 - least * 0.5) / torch.full_like(most, 7.5)
    scales = step.half()
    scales = torch.where(finite & scales.isfinite(), scales, torch.nan)
    wide = scales.float()
    usable = (wide != 0) & ~wide.isnan()
    factor = torch.where(usable, torch.ones(()) / wide, 0.0)
    if group_size is None:
        zeros = torch.full_like(wide, 8.0)
    else:
        zeros = torch.where(usable, torch.round(-least * factor), 0.0).clamp(0, 15)
    q = torch.where(usable[:, :, None], torch.round(groups * factor[:, :, None]), 0.0)
    q = (q + zeros[:, :, None]).clamp(0, 15).view(weight.shape[0], -1)
    return q[:, : weight.shape[1]].to(torch.uint8), scales, zeros.to(torch.uint8)


def _group_sums(x: Tensor, q: Tensor, scales: Tensor, zeros: Tensor, size: int) -> Tensor:
    """Multiply by scales * (q - zeros), the rows of x rounded to int8 in groups, as the op does."""
    left, right = _grouped(x, size), _grouped(q, size).long()
    y = torch.zeros(x.shape[0], q.shape[0])
    for group in range(left.shape[1]):
        rows, row_scales = quantize_rows(left[:, group])
        sums = rows.long() @ (right[:, group] - zeros[:, group, None].long()).mT
        factors = row_scales[:, None] * scales[:, group].float()
        y = fused_multiply_add(sums.float(), factors, y)
    return y


def packed_quantized_linear(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    """``x @ (scales * (weight - zeros)).T`` of ``PackedLinear.from_quantized``, with its bits.

    Parameters
    ----------
    x : Tensor
        float32 ``[rows, in_features]``.
    weight, scales, zeros
        Those of ``lmdecode.PackedLinear.from_quantized``, in groups of 32, 64 or 128.

    Returns
    -------
    Tensor
        float32 ``[rows, out_features]``.
    """
    if zeros is None:
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    size = weight.shape[1] // max(scales.shape[1], 1)
    return _group_sums(x, weight, scales, zeros, max(size, 1))


def _activate(x: Tensor, activation: str | None) -> Tensor:
    match activation:
        case "relu":
            return torch.where(x < 0, 0.0, x)
        case "gelu":
            return x * 0.5 * torch.special.erfc(-x / 2**0.5)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu(x)
    return x


def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str = "float32",
    group_size: int | None = None,
    activation: str | None = None,
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(x @ weight.T + bias) * multiplier + residual`` of ``lmdecode.PackedLinear``.

    Without an activation, ``dtype="int8"`` and ``"int4"`` give the op's bits.

    Parameters
    ----------
    x, weight, bias, dtype, group_size, activation, multiplier, residual
        Those of ``lmdecode.PackedLinear``; ``x`` is ``[rows, in_features]``.

    Returns
    -------
    Tensor
        float32 ``[rows, out_features]``.
    """
    if dtype == "int8":
        left, left_scale = quantize_rows(x)
        right, right_scale = quantize_rows(weight)
        sums = left.long() @ right.long().mT
        y = sums.float() * (left_scale[:, None] * right_scale[None])
    elif dtype == "int4":
        y = _group_sums(x, *quantize_groups(weight, group_size), group_size or 32)
    else:
        held = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        y = x.to(held).double() @ weight.to(held).double().mT
    if bias is not None:
        y = y + bias
    y = _activate(y.double(), activation) if activation is not None else y
    y = y.float()
    if multiplier is not None:
        y = y * multiplier
    return y if residual is None else y + residual


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """See ``lmdecode.layer_norm``."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias).float()


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """See ``lmdecode.rms_norm``."""
    wide = x.double()
    y = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).float()
