"""New keys and values of a ring: each token is written once, to its slot."""

from __future__ import annotations

from torch import Tensor

from lmdecode._checks import check_dense_tensors, check_int, check_layout
from lmdecode._ops import ops

__all__ = ["ring_cache_append_"]

_append = ops.ring_cache_append_.default


def _contiguous_vectors(states: Tensor) -> Tensor:
    return states if states.dim() == 0 or states.stride(-1) == 1 else states.contiguous()


def ring_cache_append_(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    position: int | Tensor,
    *,
    num_sink_tokens: int = 0,
) -> None:
    """Write new keys and values to their slots of a ring, in place.

    The first ``num_sink_tokens`` positions have slots of their own, in front; every other position
    p goes to slot ``num_sink_tokens + (p - num_sink_tokens) % capacity``, where capacity is the
    number of other slots. Each token is written once; of a chunk longer than the ring, only the
    last tokens are. So the content of a ring depends on the number of tokens, not on the chunks.

    Parameters
    ----------
    keys, values : Tensor
        ``[batch, kv_heads, slots, head_size]`` and ``[..., value_size]`` of one dtype, any dtype,
        elements apart, and side by side in the last dimension.
    k, v : Tensor
        ``[batch, kv_heads, tokens, head_size]`` and ``[..., value_size]``, any strides.
    position : int or Tensor
        The position of the first of these tokens, 0 to 2^40: of all rows, or ``[batch]`` int64 or
        int32. On CUDA values are not checked: a row with a position out of range is unchanged.
    num_sink_tokens : int
        Fewer than there are slots.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; nothing has been written.
    """
    op = "ring_cache_append_"
    for name, value in (("keys", keys), ("values", values), ("k", k), ("v", v)):
        check_dense_tensors(op, **{name: value})
    rows = None
    if isinstance(position, Tensor):
        check_layout(op, "position", position)
        position, rows = 0, position
    else:
        position = check_int(
            op, "position", position, kind="an int or a tensor", limits="0 to 2^40"
        )
    _append(
        keys, values, _contiguous_vectors(k), _contiguous_vectors(v), position, rows,
        num_sink_tokens,
    )  # fmt: skip
