"""The KV cache ops in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["gather_indirect", "reorder_cache_", "update_beam_indirection_"]


def reorder_cache_(
    tensors: Sequence[Tensor],
    parents: Tensor,
    *,
    batch_dim: int = 0,
    length_dim: int | None = None,
    length: int | None = None,
) -> None:
    """``lmdecode.reorder_cache_``: by way of a copy of each tensor."""
    for tensor in tensors:
        part = tensor if length_dim is None else tensor.narrow(length_dim, 0, length or 0)
        part.copy_(part.index_select(batch_dim, parents))


def update_beam_indirection_(indirection: Tensor, parents: Tensor, length: int | Tensor) -> None:
    """``lmdecode.update_beam_indirection_``: position by position of a copy."""
    rows, capacity = indirection.shape
    before = indirection.clone()
    for row in range(rows):
        used = int(length[row]) if isinstance(length, Tensor) else length
        indirection[row, :used] = before[int(parents[row]), :used]
        if used < capacity:
            indirection[row, used] = row


def gather_indirect(states: Tensor, indirection: Tensor, length: int | None = None) -> Tensor:
    """``lmdecode.gather_indirect``: position by position."""
    length = indirection.shape[1] if length is None else length
    out = states.new_empty((*states.shape[:2], length, states.shape[3]))
    for row in range(len(states)):
        for position in range(length):
            out[row, :, position] = states[int(indirection[row, position]), :, position]
    return out
