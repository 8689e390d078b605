"""Reordering of KV cache rows by the beams."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lmdecode._checks import check_int, type_error
from lmdecode._ops import ops

__all__ = ["reorder_cache_"]

_OP = "reorder_cache_"
_reorder = ops.reorder_cache_.default


def reorder_cache_(
    tensors: Sequence[Tensor],
    parents: Tensor,
    *,
    batch_dim: int = 0,
    length_dim: int | None = None,
    length: int | None = None,
) -> None:
    """Reorder the rows of cache tensors in place: row r becomes what row ``parents[r]`` was.

    Only rows that move are copied. It needs no second cache, only a small plan. A step that keeps
    most beams does not touch most of the cache. Any map is allowed: rows may be duplicated, dropped
    or permuted.

    Parameters
    ----------
    tensors : sequence of Tensor
        The keys and values of all layers, a list or tuple, each with ``batch`` rows along
        ``batch_dim``: ``[batch, heads, length, dim]``, ``[length, batch, dim]`` or any other shape.
        Shapes and dtypes may differ; any dtype, any strides without overlapping elements. No two
        may share memory; disjoint views of one buffer are allowed.
    parents : Tensor
        ``[batch]`` int64 or int32 on the same device: the row that each row continues, 0 to
        batch - 1. On CUDA values are not checked: a row with a parent out of range is unchanged.
    batch_dim : int
        The dimension of the rows, in every tensor.
    length_dim, length : int, optional
        Copy only the first ``length`` positions along ``length_dim``: the valid part of a cache of
        fixed size. Later positions are unchanged in every row.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been written.
    """
    if not isinstance(tensors, (list, tuple)):
        raise type_error(_OP, "tensors", tensors, "a list of tensors")
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise type_error(_OP, f"tensors[{number}]", tensor, "a tensor")
    if not isinstance(parents, Tensor):
        raise type_error(_OP, "parents", parents, "a tensor")
    batch_dim = check_int(_OP, "batch_dim", batch_dim)
    if length_dim is not None:
        length_dim = check_int(_OP, "length_dim", length_dim, kind="an int or None")
    if length is not None:
        length = check_int(_OP, "length", length, kind="an int or None")
    _reorder(tensors, parents, batch_dim, length_dim, length)
