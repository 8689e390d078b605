"""The packed matmul and the norms in plain torch; sums in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["layer_norm", "packed_linear", "quantize_rows", "rms_norm"]

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
    activation: str | None = None,
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(x @ weight.T + bias) * multiplier + residual`` of ``lmdecode.PackedLinear``.

    Without an activation, ``dtype="int8"`` gives the op's bits.

    Parameters
    ----------
    x, weight, bias, dtype, activation, multiplier, residual
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
