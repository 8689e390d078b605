"""The KV cache ops in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["reorder_cache_"]


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
