"""Attention over a sliding window of keys, its masks, and the merging of its parts."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from lmdecode._checks import (
    MAX_INT,
    check_dense_tensor,
    check_dense_tensors,
    check_int,
    check_no_gradient,
    check_number,
    dtype_name,
)
from lmdecode._ops import ops
from lmdecode.attention.masks import compressed_swa_mask, expand_compressed_swa_mask, swa_mask

__all__ = [
    "KeyPiece",
    "attend_pieces",
    "attention_op",
    "compressed_swa_mask",
    "expand_compressed_swa_mask",
    "merge_attention_states",
    "sliding_window_attention",
    "sliding_window_decode",
    "swa_mask",
]


class DecodeOptions(TypedDict, total=False):
    """What ``sliding_window_decode`` takes beside its tensors and ``return_lse``."""

    window: int | None
    window_right: int | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    q_positions: Tensor | None
    kv_lengths: Tensor | None
    key_padding_mask: Tensor | None
    block_table: Tensor | None
    indirection: Tensor | None


class AttentionOptions(DecodeOptions, total=False):
    """What ``sliding_window_attention`` takes beside its tensors and ``return_lse``."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    attn_mask: Tensor | None
    mask_convention: str


_sliding_window_attention = ops.sliding_window_attention.default
_sliding_window_decode = ops.sliding_window_decode.default
_merge_attention_states = ops.merge_attention_states.default
_CONVENTIONS = ("masked", "visible")
_MASK_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)
# Queries up to which sliding_window_decode is called: beyond, keys are worth packing.
_DECODE_TOKENS = 8


def _check_key_tensors(
    op: str,
    key_padding_mask: Tensor | None,
    block_table: Tensor | None,
    indirection: Tensor | None,
) -> None:
    if key_padding_mask is not None:
        check_dense_tensor(op, "key_padding_mask", key_padding_mask)
    if block_table is not None:
        check_dense_tensor(op, "block_table", block_table)
    if indirection is not None:
        check_dense_tensor(op, "indirection", indirection)


def _bound(op: str, name: str, value: int | None, least: int) -> int:
    """A window as the op takes it: -1 for none."""
    if value is None:
        return -1
    if type(value) is int and least <= value <= MAX_INT:
        return value
    limits = f"an int of 64 bits, at least {least}, or None"
    return check_int(op, name, value, least, kind="an int or None", limits=limits)


def _number(op: str, name: str, value: float) -> float:
    limits = "a finite number, or None"
    return check_number(op, name, value, kind="a float or None", is_finite=True, limits=limits)


def _integers(op: str, name: str, value: Tensor, like: Tensor) -> Tensor:
    """int32 or int64 as contiguous int64."""
    check_dense_tensor(op, name, value)
    if value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{op}: {name} has dtype {dtype_name(value)}; expected int64 or int32")
    if value.device != like.device:
        raise ValueError(
            f"{op}: {name} is on {value.device}; expected the device of q, {like.device}"
        )
    if value.dtype == torch.int64 and value.is_contiguous():
        return value
    return value.to(torch.int64).contiguous()


def _per_head(op: str, name: str, value: Tensor) -> Tensor:
    """Any floating dtype as contiguous float32."""
    check_dense_tensor(op, name, value)
    if not value.dtype.is_floating_point:
        raise ValueError(f"{op}: {name} has dtype {dtype_name(value)}; expected a floating dtype")
    return value.to(torch.float32).contiguous()


def _positions(op: str, value: Tensor, q: Tensor) -> Tensor:
    value = _integers(op, "q_positions", value, q)
    if q.dim() == 4 and value.dim() == 1:
        if value.shape[0] != q.shape[2]:
            raise ValueError(
                f"{op}: q_positions has shape {list(value.shape)}; expected [{q.shape[2]}] or "
                f"{[q.shape[0], q.shape[2]]}"
            )
        return value.expand(q.shape[0], -1)
    return value


def _mask(op: str, mask: Tensor) -> Tensor:
    """Four dimensions, the first ones of size 1 where there are fewer."""
    check_dense_tensor(op, "attn_mask", mask)
    if mask.dtype not in _MASK_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _MASK_DTYPES)
        raise ValueError(f"{op}: attn_mask has dtype {dtype_name(mask)}; expected one of {names}")
    if not 2 <= mask.dim() <= 4:
        raise ValueError(
            f"{op}: attn_mask has shape {list(mask.shape)}; expected 2 to 4 dimensions, "
            "[batch, heads, q_tokens, kv_tokens] or the last of these"
        )
    return mask.view((1,) * (4 - mask.dim()) + mask.shape) if mask.dim() < 4 else mask


def _default_scale(q: Tensor) -> float:
    size = q.shape[-1] if q.dim() else 0
    return 1.0 / math.sqrt(size) if size else 1.0


def _window_and_scale(
    op: str,
    q: Tensor,
    window: int | None,
    window_right: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[int, int, float, float]:
    if softcap is not None and _number(op, "softcap", softcap) <= 0:
        raise ValueError(f"{op}: softcap is {softcap}; expected more than 0, or None")
    return (
        _bound(op, "window", window, 1),
        _bound(op, "window_right", window_right, 0),
        _default_scale(q) if scale is None else _number(op, "scale", scale),
        float(softcap or 0.0),
    )


@overload
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    window_right: int | None = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    attn_mask: Tensor | None = None,
    mask_convention: str = "masked",
    key_padding_mask: Tensor | None = None,
    block_table: Tensor | None = None,
    indirection: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sliding window attention. Keys outside of the window are not read, and no mask is built.

    flash-attention's ``window_size=(left, right)`` is ``window=left + 1`` here. A row's result is
    bitwise a function of its own query, its sequence and the parameters. It does not depend on the
    rest of the batch, the number of threads, or the chunks of a prompt that attend to the same
    cache.

    Parameters
    ----------
    q : Tensor
        ``[batch, q_heads, tokens, head_size]``, or ragged ``[tokens, q_heads, head_size]``:
        float32, float16 or bfloat16, any strides, head sizes 1 to 1024.
    k, v : Tensor
        ``[batch, kv_heads, kv_tokens, head_size]`` and ``[..., value_size]``, or ragged ones, with
        the dtype of q. ``kv_heads`` divides ``q_heads`` (GQA): groups of consecutive query heads
        share keys and values.
    window : int, optional
        Number of visible keys up to and including the query's own, at least 1: the query at
        position m sees the keys n with m - window < n <= m. None: all earlier keys.
    window_right : int, optional
        Number of visible keys after the query's own. 0: causal. None: all.
    scale : float, optional
        Factor of the scores, by default ``1 / sqrt(head_size)``.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    sinks : Tensor, optional
        ``[q_heads]`` float: an attention sink. Each head has one more key of this score, without a
        value, that every query sees.
    alibi_slopes : Tensor, optional
        ``[q_heads]`` or ``[batch, q_heads]`` float: ``slope * abs(m - n)`` is subtracted from the
        scores.
    q_positions : Tensor, optional
        ``[tokens]`` or ``[batch, tokens]`` int: the position of each query. Key n has position n.
        By default the last query has the position of the last key.
    kv_lengths : Tensor, optional
        ``[batch]`` int, 0 to ``kv_tokens``: number of valid keys of each sequence. Later ones are
        not read.
    cu_seqlens_q, cu_seqlens_kv : Tensor, optional
        ``[sequences + 1]`` int: cumulative lengths of the sequences in ragged q, and in ragged k
        and v. ``cu_seqlens_kv`` is ``cu_seqlens_q`` by default.
    attn_mask : Tensor, optional
        ``[batch or 1, q_heads or 1, tokens, kv_tokens]``, or the last two or three of these
        dimensions. It alone decides which keys are visible. Bool: see ``mask_convention``.
        Floating: added to the scores; values of -65536 and less hide. A mask that is equal to a
        window is treated as that window.
    mask_convention : str
        "masked": True hides, as in ``swa_mask``. "visible": True shows, as in torch.
    key_padding_mask : Tensor, optional
        ``[batch, kv_tokens]`` bool. True is a token. False hides the key, in addition to the
        window.
    block_table : Tensor, optional
        ``[batch, blocks]`` int32: k and v are pools ``[num_blocks, kv_heads, block_size, size]``,
        and key n of a sequence is in block ``block_table[sequence, n // block_size]``, at ``n %
        block_size``. ``kv_tokens`` is ``blocks * block_size``; ``kv_lengths`` has the valid
        lengths. Entries of blocks that no query sees are not read. With ``cu_seqlens_q`` q is
        ragged, and ``cu_seqlens_kv`` must not be given. See ``BlockTable``.
    indirection : Tensor, optional
        ``[batch, kv_tokens or more]`` int32: k and v are ``[rows, kv_heads, kv_tokens, size]``, and
        key n of a sequence is in row ``indirection[sequence, n]``, at n. The rest is as for
        ``block_table``; give only one of the two. See ``BeamIndirection``.
    return_lse : bool
        Also return the log-sum-exp of the scores.

    Returns
    -------
    Tensor or tuple of Tensor
        The output, shaped as q with ``value_size`` for ``head_size``, contiguous, with the dtype
        of q; 0 if a query sees no key. With ``return_lse`` also the natural logarithm of the sum
        of ``exp(score)``, including the sink's, float32 ``[batch, q_heads, tokens]`` or ragged
        ``[q_heads, tokens]``; -inf if a query sees no key.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    op = "sliding_window_attention"
    check_dense_tensors(op, q=q, k=k, v=v)
    if mask_convention not in _CONVENTIONS:
        raise ValueError(
            f"{op}: mask_convention is {mask_convention!r}; expected 'masked' or 'visible'"
        )
    if attn_mask is not None and (window is not None or window_right != 0):
        given = "window" if window is not None else "window_right"
        raise ValueError(
            f"{op}: attn_mask was given with {given}; expected one of them: "
            "a mask alone decides what is visible"
        )
    _check_key_tensors(op, key_padding_mask, block_table, indirection)
    check_no_gradient(op, q=q, k=k, v=v, sinks=sinks, alibi_slopes=alibi_slopes)
    if cu_seqlens_kv is None and block_table is None and indirection is None:
        cu_seqlens_kv = cu_seqlens_q
    out, lse = _sliding_window_attention(
        q,
        k,
        v,
        *_window_and_scale(op, q, window, window_right, scale, softcap),
        None if sinks is None else _per_head(op, "sinks", sinks),
        None if alibi_slopes is None else _per_head(op, "alibi_slopes", alibi_slopes),
        None if q_positions is None else _positions(op, q_positions, q),
        None if kv_lengths is None else _integers(op, "kv_lengths", kv_lengths, q),
        None if cu_seqlens_q is None else _integers(op, "cu_seqlens_q", cu_seqlens_q, q),
        None if cu_seqlens_kv is None else _integers(op, "cu_seqlens_kv", cu_seqlens_kv, q),
        None if attn_mask is None else _mask(op, attn_mask),
        mask_convention == "visible",
        key_padding_mask,
        block_table,
        indirection,
        bool(return_lse),
    )
    return (out, lse) if return_lse else out


@overload
def sliding_window_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...


@overload
def sliding_window_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def sliding_window_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def sliding_window_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    window: int | None = None,
    window_right: int | None = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    block_table: Tensor | None = None,
    indirection: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``sliding_window_attention`` for one or a few queries against a cache.

    Keys and values are read once, without a copy, for all query heads of their KV head. The cache
    is split at fixed positions. So all threads have work, and the result depends neither on them
    nor on the batch. The result equals that of ``sliding_window_attention`` up to rounding, as the
    order of the sums differs.

    Parameters
    ----------
    q : Tensor
        ``[batch, q_heads, tokens, head_size]`` float32, float16 or bfloat16, any strides.
        Optimised for few tokens, correct for any number.
    k, v : Tensor
        ``[batch, kv_heads, kv_tokens, head_size]`` and ``[..., value_size]``, the cache, with the
        dtype of q. Fastest if the last dimension is contiguous and sizes are multiples of 32.
    window, window_right, scale, softcap, sinks, alibi_slopes, q_positions, kv_lengths, \
key_padding_mask, block_table, indirection, return_lse
        As for ``sliding_window_attention``. For a cache of fixed size, ``kv_lengths`` has the valid
        lengths.

    Returns
    -------
    Tensor or tuple of Tensor
        As ``sliding_window_attention``.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    op = "sliding_window_decode"
    for name, value in (("k", k), ("v", v)):
        if not isinstance(value, Tensor) and hasattr(value, "attend"):
            raise TypeError(
                f"{op}: {name} is a {type(value).__name__}; expected a tensor: attend to a ring by "
                "ring.attend(q)"
            )
    check_dense_tensors(op, q=q, k=k, v=v)
    assert v is not None
    _check_key_tensors(op, key_padding_mask, block_table, indirection)
    check_no_gradient(op, q=q, k=k, v=v, sinks=sinks, alibi_slopes=alibi_slopes)
    out, lse = _sliding_window_decode(
        q,
        k,
        v,
        *_window_and_scale(op, q, window, window_right, scale, softcap),
        None if sinks is None else _per_head(op, "sinks", sinks),
        None if alibi_slopes is None else _per_head(op, "alibi_slopes", alibi_slopes),
        None if q_positions is None else _positions(op, q_positions, q),
        None if kv_lengths is None else _integers(op, "kv_lengths", kv_lengths, q),
        key_padding_mask,
        block_table,
        indirection,
        bool(return_lse),
    )
    return (out, lse) if return_lse else out


def merge_attention_states(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys into attention over both.

    Use it for a prefix that many requests share, or for keys in two buffers. Pass a sink to only
    one of the two calls.

    Parameters
    ----------
    o1, o2 : Tensor
        ``[batch, heads, tokens, size]`` or ragged ``[tokens, heads, size]`` float32, float16 or
        bfloat16, any strides: the outputs.
    lse1, lse2 : Tensor
        ``[batch, heads, tokens]`` or ragged ``[heads, tokens]`` float32: the log-sum-exps that
        ``return_lse`` returned with them. An output whose log-sum-exp is -inf is not read.

    Returns
    -------
    tuple of Tensor
        The output, contiguous, with the dtype of ``o1``, and its log-sum-exp: 0 and -inf if both
        parts are empty.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    op = "merge_attention_states"
    check_dense_tensors(op, o1=o1, lse1=lse1, o2=o2, lse2=lse2)
    check_no_gradient(op, o1=o1, lse1=lse1, o2=o2, lse2=lse2)
    return _merge_attention_states(o1, lse1, o2, lse2)


def attention_op(queries: int) -> Any:
    """Return the attention op for this number of queries."""
    return sliding_window_decode if queries <= _DECODE_TOKENS else sliding_window_attention


class KeyPiece(NamedTuple):
    """Keys [batch, kv_heads, n, head_size] and values [..., value_size], contiguous in memory.

    ``ranges`` are their positions as consecutive ranges (begin, end); only a single query that sees
    all keys may have several. Every query sees pinned keys up to its own position, however far
    away.
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
    piece: KeyPiece,
    window: int,
    q_begin: int,
    q_end: int,
    has_distances: bool,
    device: torch.device,
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
    pieces: list[KeyPiece],
    window: int,
    q_begin: int,
    *,
    sinks: Tensor | None,
    key_padding_mask: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to each of the pieces, at least one, and merge the results.

    ``q`` is [batch, q_heads, tokens, head_size], at positions ``q_begin`` on. ``sinks``, scores
    [q_heads], are added to the first piece only. ``key_padding_mask`` is [batch, positions].
    ``options`` are scale, softcap and alibi_slopes.
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
