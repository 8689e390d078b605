"""Attention to keys in several pieces of memory, such as those of a ring."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.attention.ops import (
    merge_attention_states,
    sliding_window_attention,
    sliding_window_decode,
)

# Queries up to which sliding_window_decode is called: beyond, keys are worth packing.
_DECODE_TOKENS = 8


def attention_op(queries: int) -> Any:
    """Return the attention op for this number of queries."""
    return sliding_window_decode if queries <= _DECODE_TOKENS else sliding_window_attention


class Piece(NamedTuple):
    """Keys and values that are contiguous in memory.

    Attributes
    ----------
    keys, values
        ``[batch, kv_heads, n, head_size]`` and ``[..., value_size]``.
    ranges
        Their positions as consecutive ranges (begin, end). Several ranges are only for a single
        query that sees all of them.
    is_pinned
        Every query sees them from their own position on, however far away.
    """

    keys: Tensor
    values: Tensor
    ranges: tuple[tuple[int, int], ...]
    is_pinned: bool = False

    def columns_of(self, mask: Tensor) -> Tensor:
        """Return the columns [batch, n] of a mask [batch, positions]."""
        columns = [mask[:, begin:end] for begin, end in self.ranges]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _visibility(
    piece: Piece, window: int, q_begin: int, q_end: int, has_distances: bool, device: torch.device
) -> dict[str, Any]:
    """Return the op's arguments for the keys of a piece that queries [q_begin, q_end) see.

    A piece must not begin before the window of the first query.
    """
    first, end = piece.ranges[0]
    if not has_distances:
        if q_end - q_begin == 1 or (piece.is_pinned and q_begin >= end - 1):
            return dict(window=None, window_right=None)
    size = None if piece.is_pinned else window
    if len(piece.ranges) == 1 and end == q_end:
        return dict(window=size)
    return dict(window=size, q_positions=torch.arange(q_begin, q_end, device=device) - first)


def attend_pieces(
    q: Tensor,
    pieces: list[Piece],
    window: int,
    q_begin: int,
    *,
    sinks: Tensor | None,
    key_padding_mask: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to each piece, and merge the results into attention over all of them.

    Parameters
    ----------
    q
        ``[batch, q_heads, tokens, head_size]``, at positions ``q_begin`` on.
    pieces
        At least one.
    sinks
        Scores ``[q_heads]``, added to the first piece only.
    key_padding_mask
        ``[batch, positions]`` or None.
    options
        scale, softcap, alibi_slopes.
    """
    queries = q.shape[2]
    attention = attention_op(queries)
    has_distances = options.get("alibi_slopes") is not None
    out = lse = None
    for number, piece in enumerate(pieces):
        result = attention(
            q,
            piece.keys,
            piece.values,
            sinks=sinks if number == 0 else None,
            key_padding_mask=None
            if key_padding_mask is None
            else piece.columns_of(key_padding_mask),
            return_lse=return_lse or len(pieces) > 1,
            **_visibility(piece, window, q_begin, q_begin + queries, has_distances, q.device),
            **options,
        )
        if len(pieces) == 1:
            return result
        if out is None or lse is None:
            out, lse = result
        else:
            out, lse = merge_attention_states(out, lse, *result)
    assert out is not None and lse is not None
    return (out, lse) if return_lse else out
