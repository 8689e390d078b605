"""The packed matmul and the norms in plain torch; sums in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.reference.arithmetic import flushed_multiply_add, fused_multiply_add

__all__ = [
    "layer_norm",
    "packed_linear",
    "packed_quantized_linear",
    "quantize_groups",
    "quantize_rows",
    "rms_norm",
    "rotate_rows",
    "tile_product",
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


def rotate_rows(x: Tensor) -> Tensor:
    """Multiply rows by blocks of Hadamard matrices / sqrt(size), in Sylvester's order.

    Blocks of 64 features, of what is left one each of 32 and 16; the rest stays. Elements
    are multiplied by 1 / sqrt(size), then (a, b) become (a + b, a - b), for those 1, 2, 4, ...
    apart.

    Parameters
    ----------
    x : Tensor
        float32 ``[rows, size]``.

    Returns
    -------
    Tensor
        float32 ``[rows, size]``. Rotated again they are ``x``, but for roundings.
    """
    parts, at = [], 0
    for block in (64, 32, 16):
        while x.shape[1] - at >= block:
            part = x[:, at : at + block] * torch.tensor(block**-0.5)
            apart = 1
            while apart < block:
                a, b = part.view(x.shape[0], block // (2 * apart), 2, apart).unbind(2)
                part = torch.stack((a + b, a - b), 2).view(x.shape[0], block)
                apart *= 2
            parts.append(part)
            at += block
    return torch.cat([*parts, x[:, at:]], 1)


def _minimum_codes(values: Tensor, minimums: Tensor, factors: Tensor) -> Tensor:
    """Round (values - minimums) * factors to whole numbers from 0 to 15."""
    return torch.round(((values - minimums) * factors).clamp(0, 15))


def quantize_groups(weight: Tensor, group_size: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Round weights to four bits, in groups: ``scale * q + minimum``.

    Of some ways to cut the distance from the least to the largest number of a group, 15 steps and
    14 to 17 steps in 17 ways, that with the least squared error. Each of the 17 gives codes, and a
    line through them by least squares; scales and minimums are rounded to float16, and codes are
    made anew by them. The error of a number counts as much as its magnitude and the group's average
    magnitude together. Sums are float32 ones, from the first element on.

    Parameters
    ----------
    weight : Tensor
        float32 ``[out_features, in_features]``.
    group_size : {32, 64, 128}
        Weights that share a scale and a minimum.

    Returns
    -------
    tuple of Tensor
        ``q`` uint8 ``[out_features, in_features]``, and scales and minimums, float16
        ``[out_features, groups]``: NaN where the group holds NaN or inf, or numbers that are too
        large for float16.
    """
    rows, features = weight.shape
    groups = -(-features // group_size)
    if rows == 0 or features == 0:
        empty = weight.new_empty((rows, groups), dtype=torch.float16)
        return weight.to(torch.uint8), empty, empty
    codes = torch.zeros(rows, groups * group_size)
    scales, minimums = torch.zeros(2, rows, groups, dtype=torch.float16)
    for sizes in {group_size, features % group_size or group_size}:
        # Groups of the same size: all but the last one, which may be smaller.
        first = 0 if sizes == group_size else groups - 1
        last = groups if features % group_size == 0 else groups - 1
        last = last if sizes == group_size else groups
        values = weight[:, first * group_size : first * group_size + (last - first) * sizes]
        q, scale, minimum = _minimum_groups(values.reshape(rows, last - first, sizes))
        scales[:, first:last], minimums[:, first:last] = scale.half(), minimum.half()
        flat = q.reshape(rows, (last - first) * sizes)
        codes[:, first * group_size : first * group_size + flat.shape[1]] = flat
    return codes[:, :features].to(torch.uint8), scales, minimums


def _minimum_groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minimums of ``[rows, groups, size]``, floats."""
    each = values.unbind(2)
    zero, one = torch.zeros(values.shape[:2]), torch.ones(values.shape[:2])
    size = torch.full_like(zero, len(each))
    least, most, magnitudes = each[0], each[0], zero
    for value in each:
        least, most = torch.minimum(least, value), torch.maximum(most, value)
        magnitudes = magnitudes + value.abs()
    counts = [magnitudes / size + value.abs() for value in each]
    all_counts = total = zero
    for count, value in zip(counts, each, strict=True):
        all_counts, total = all_counts + count, total + count * value
    distance = most - least
    has_distance = distance >= _LEAST_SCALED_MAGNITUDE
    unit = torch.where(has_distance, one / distance, zero)
    # Each way to cut the distance is an index of the first dimension.
    steps = torch.arange(17)[:, None, None] * 0.1875 + 14
    factors = unit * steps
    codes = squares = products = torch.zeros_like(factors)
    for count, value in zip(counts, each, strict=True):
        code = _minimum_codes(value, least, factors)
        counted = count * code
        codes, squares = codes + counted, squares + counted * code
        products = products + counted * value
    determinant = all_counts * squares - codes * codes
    is_line = determinant > 0
    divisor = torch.where(is_line, determinant, one)
    slope = (all_counts * products - codes * total) / divisor
    offset = (squares * total - codes * products) / divisor
    fifteen = torch.full_like(zero, 15.0)  # torch divides by a number by multiplying
    whole = torch.where(has_distance, distance / fifteen, zero)
    scale = torch.cat((whole[None], torch.where(is_line, slope, zero))).half().float()
    minimum = torch.cat((least[None], torch.where(is_line, offset, least))).half().float()
    factors = torch.where(scale.abs() > 0, one / scale, zero)
    errors = torch.zeros_like(scale)
    for count, value in zip(counts, each, strict=True):
        off = scale * _minimum_codes(value, minimum, factors) + minimum - value
        errors = errors + count * (off * off)
    best = torch.full_like(zero, torch.inf)
    scales = minimums = torch.full_like(zero, torch.nan)
    for way, error in enumerate(errors):
        is_better = error < best
        best = torch.where(is_better, error, best)
        scales = torch.where(is_better, scale[way], scales)
        minimums = torch.where(is_better, minimum[way], minimums)
    is_finite = values.isfinite().all(2)
    scales = torch.where(is_finite, scales, torch.nan)
    minimums = torch.where(is_finite, minimums, torch.nan)
    factor = torch.where(scales.abs() > 0, one / scales, zero)
    q = _minimum_codes(values, minimums[:, :, None], factor[:, :, None])
    q = torch.where((scales.abs() > 0)[:, :, None], q, 0.0)
    return q, scales, minimums


def _group_sums(
    x: Tensor,
    q: Tensor,
    scales: Tensor,
    size: int,
    zeros: Tensor | None = None,
    minimums: Tensor | None = None,
) -> Tensor:
    """Multiply by scales * (q - zeros) + minimums, x rounded to int8 in groups, as the op does."""
    left, right = _grouped(x, size), _grouped(q, size).long()
    y = torch.zeros(x.shape[0], q.shape[0])
    for group in range(left.shape[1]):
        rows, row_scales = quantize_rows(left[:, group])
        numbers = right[:, group]
        if zeros is not None:
            numbers = numbers - zeros[:, group, None].long()
        sums = rows.long() @ numbers.mT
        factors = row_scales[:, None] * scales[:, group].float()
        y = fused_multiply_add(sums.float(), factors, y)
        if minimums is not None:
            row_sums = row_scales * rows.long().sum(1).float()
            y = fused_multiply_add(minimums[:, group].float().expand_as(y), row_sums[:, None], y)
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
    return _group_sums(x, weight, scales, max(size, 1), zeros)


def tile_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` of bfloat16 in the order in which Intel's matrix units add (TDPBF16PS).

    ``PackedLinear(weight, dtype="bfloat16")`` has these bits where ``cpu_capability()`` is "amx". A
    sum starts from 0. For each 32 elements along ``in_features`` two chains start from 0, of the
    even and of the odd elements: each product is added with one rounding. Even + odd, rounded, is
    added to the sum, rounded. Subnormal numbers are 0 before and after each of these operations.

    Parameters
    ----------
    x
        float32 ``[rows, in_features]``, rounded to bfloat16 here.
    weight
        float32 ``[out_features, in_features]``, likewise.

    Returns
    -------
    Tensor
        float32 ``[rows, out_features]``, the same bits on any machine, except in NaN.
    """
    padding = (0, -x.shape[1] % 32)
    a = F.pad(x.bfloat16().float(), padding).view(x.shape[0], 1, -1, 16, 2)
    b = F.pad(weight.bfloat16().float(), padding).view(1, weight.shape[0], -1, 16, 2)
    chains = torch.zeros(x.shape[0], weight.shape[0], a.shape[2], 2)
    for pair in range(16):
        chains = flushed_multiply_add(a[..., pair, :], b[..., pair, :], chains)
    one = torch.ones(())
    both = flushed_multiply_add(chains[..., 0], one, chains[..., 1])
    total = torch.zeros(x.shape[0], weight.shape[0])
    for part in both.unbind(2):
        total = flushed_multiply_add(part, one, total)
    return total


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
    rotate: bool = True,
    activation: str | None = None,
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(x @ weight.T + bias) * multiplier + residual`` of ``lmdecode.PackedLinear``.

    Without an activation, ``dtype="int8"`` and ``"int4"`` give the op's bits.

    Parameters
    ----------
    x, weight, bias, dtype, group_size, rotate, activation, multiplier, residual
        Those of ``lmdecode.PackedLinear``; ``x`` is ``[rows, in_features]``.

    Returns
    -------
    Tensor
        float32 ``[rows, out_features]``.
    """
    if dtype == "int8":
        left, left_scale = quantize_rows(rotate_rows(x) if rotate else x)
        right, right_scale = quantize_rows(rotate_rows(weight) if rotate else weight)
        sums = left.long() @ right.long().mT
        y = sums.float() * (left_scale[:, None] * right_scale[None])
    elif dtype == "int4":
        size = group_size or 32
        q, scales, minimums = quantize_groups(rotate_rows(weight) if rotate else weight, size)
        y = _group_sums(rotate_rows(x) if rotate else x, q, scales, size, minimums=minimums)
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
