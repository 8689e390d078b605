"""Linear layers of AWQ and GPTQ checkpoints, without loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode._checks import check_dense_tensors, dtype_name
from lmdecode.linear import PackedLinear

__all__ = ["packed_from_awq", "packed_from_gptq"]

# Which of the eight columns of a 32-bit word each four bits of it hold, from the lowest on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# A word of eight ones.
_ONES = 0x11111111


def packed_from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None = None
) -> PackedLinear:
    """Pack the layer of an AWQ checkpoint (the layout "gemm", 4 bits).

    Parameters
    ----------
    qweight : Tensor
        int32 ``[in_features, out_features / 8]``.
    qzeros : Tensor
        int32 ``[groups, out_features / 8]``.
    scales : Tensor
        float16 ``[groups, out_features]``; another float dtype, if float16 holds its
        numbers. They are finite.
    bias : Tensor, optional
        ``[out_features]``.

    Returns
    -------
    PackedLinear
        The same weights: ``scale * (q - zero)``.

    Raises
    ------
    TypeError
        An argument that is no tensor.
    ValueError
        An argument of another dtype, shape or value than expected.
    """
    op = "packed_from_awq"
    halves = _check(op, qweight, qzeros, scales)
    columns = torch.tensor(_AWQ_COLUMNS, device=qweight.device).argsort()
    q, zeros = (_nibbles(words)[:, :, columns].flatten(1) for words in (qweight, qzeros))
    _check_columns(op, q.shape[1], zeros, halves)
    return PackedLinear.from_quantized(q.T, halves.T, zeros.T, bias)


def packed_from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    zero_offset: int = 1,
) -> PackedLinear:
    """Pack the layer of a GPTQ checkpoint of 4 bits.

    Parameters
    ----------
    qweight : Tensor
        int32 ``[in_features / 8, out_features]``.
    qzeros : Tensor
        int32 ``[groups, out_features / 8]``.
    scales : Tensor
        float16 ``[groups, out_features]``; another float dtype, if float16 holds its
        numbers. They are finite.
    g_idx : Tensor, optional
        int32 or int64 ``[in_features]``: the group of each input. Each has the same number of them.
        Without it groups are neighbours.
    bias : Tensor, optional
        ``[out_features]``.
    zero_offset : int
        What zeros are larger by than what is stored: 1, but 0 in the format "gptq_v2". It is added
        to the eight zeros of a word at once, as 0x11111111: gptqmodel subtracts it likewise, and a
        zero of 0 borrows from the next.

    Returns
    -------
    PackedLinear
        The same weights: ``scale * (q - zero)``. Where ``g_idx`` mixes the inputs, they are put in
        the order of the groups at each call.

    Raises
    ------
    TypeError
        An argument that is no tensor.
    ValueError
        An argument of another dtype, shape or value than expected.
    """
    op = "packed_from_gptq"
    halves = _check(op, qweight, qzeros, scales)
    if zero_offset not in (0, 1):
        raise ValueError(f"{op}: zero_offset is {zero_offset!r}; expected 0 or 1")
    q = _nibbles(qweight.T).flatten(1)  # [out_features, in_features]
    zeros = _nibbles(qzeros.long() + zero_offset * _ONES).flatten(1)
    _check_columns(op, q.shape[0], zeros, halves)
    order = None
    if g_idx is not None:
        order = _order(op, g_idx, q.shape[1], halves.shape[0])
        if torch.equal(order, torch.arange(len(order), device=order.device)):
            order = None
        else:
            q = q.index_select(1, order)
    return PackedLinear.from_quantized(q, halves.T, zeros.T, bias, input_order=order)


def _nibbles(words: Tensor) -> Tensor:
    """Words ``[rows, columns]`` as uint8 ``[rows, columns, 8]``, from the lowest four bits on."""
    parts = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for place in range(8):  # one after another: little memory beside the result
        parts[:, :, place] = words >> 4 * place & 15
    return parts


def _check(op: str, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Return the scales as float16."""
    check_dense_tensors(op, qweight=qweight, qzeros=qzeros, scales=scales)
    for name, value in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales)):
        if value.dim() != 2:
            raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected two dimensions")
        if name != "scales" and value.dtype != torch.int32:
            raise ValueError(
                f"{op}: {name} has dtype {str(value.dtype).removeprefix('torch.')}; expected int32"
            )
    if not scales.is_floating_point():
        raise ValueError(f"{op}: scales has dtype {dtype_name(scales)}; expected a float dtype")
    halves = scales.to(torch.float16)
    if not scales.isfinite().all():
        raise ValueError(f"{op}: scales holds infinities; expected finite numbers")
    others = scales[halves.to(scales.dtype) != scales]
    if others.numel():
        raise ValueError(
            f"{op}: scales holds numbers that float16 does not hold, {others[0].item()!r} the "
            "first of them; expected those of float16"
        )
    return halves


def _check_columns(op: str, outputs: int, zeros: Tensor, scales: Tensor) -> None:
    for name, value in (("qzeros", zeros), ("scales", scales)):
        if value.shape != (scales.shape[0], outputs):
            raise ValueError(
                f"{op}: {name} is of {list(value.shape)} groups and outputs; expected "
                f"{[scales.shape[0], outputs]}, from qweight, as 4 bits a weight give them"
            )


def _order(op: str, g_idx: Tensor, inputs: int, groups: int) -> Tensor:
    """The inputs, group by group."""
    check_dense_tensors(op, g_idx=g_idx)
    if g_idx.shape != (inputs,) or g_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: g_idx is {str(g_idx.dtype).removeprefix('torch.')} {list(g_idx.shape)}; "
            f"expected int32 or int64 [{inputs}]"
        )
    order, size = g_idx.argsort(stable=True), inputs // max(groups, 1)
    want = torch.arange(groups, dtype=g_idx.dtype, device=g_idx.device).repeat_interleave(size)
    if not torch.equal(g_idx[order], want):
        numbers, counts = (found.tolist() for found in g_idx.unique(return_counts=True))
        wrong = {
            n: c for n, c in zip(numbers, counts, strict=True) if c != size or not 0 <= n < groups
        }
        number, count = next(iter(wrong.items()))
        raise ValueError(
            f"{op}: g_idx does not have {size} inputs of each of {groups} groups, but {count} of "
            f"group {number}; expected {size} of each from 0 to {groups - 1}"
        )
    return order
