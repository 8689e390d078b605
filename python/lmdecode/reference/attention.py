"""The attention ops and their masks in plain torch, in float64 throughout."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "compressed_swa_mask",
    "expand_compressed_swa_mask",
    "merge_attention_states",
    "sliding_window_attention",
    "sliding_window_decode",
    "swa_mask",
]

_MASKED = -65536.0
_COMPRESSED_SIZE = 512


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [Hq, S, D], k [Hkv, Skv, D], v [Hkv, Skv, Dv], the rest [Hq or 1, S, Skv]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.double() @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # A hidden key takes no part, whatever its score is.
    scores = torch.where(visible, scores + bias, -torch.inf)
    joined = scores
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, q.shape[1], -1)
        joined = torch.cat((scores, sink), dim=-1)
    if joined.shape[-1] == 0:
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    else:
        lse = torch.logsumexp(joined, dim=-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float64).min)[..., None])
    return weights @ v, lse


def _visible(positions: Tensor, keys: int, window: int | None, window_right: int | None) -> Tensor:
    """[S, keys]: whether the query at each position sees each key."""
    key = torch.arange(keys)[None]
    position = positions[:, None]
    visible = torch.ones(len(positions), keys, dtype=torch.bool)
    if window is not None:
        visible &= key > position - window
    if window_right is not None:
        visible &= key <= position + window_right
    return visible


def _mask_terms(mask: Tensor, convention: str) -> tuple[Tensor, Tensor]:
    """Visibility, and the terms added to the scores."""
    if mask.dtype == torch.bool:
        visible = mask if convention == "visible" else ~mask
        return visible, torch.zeros((), dtype=torch.float64)
    visible = mask.double() > _MASKED
    return visible, torch.where(visible, mask.double(), 0.0)


def _sequences(
    states: Tensor,
    bounds: Tensor | None,
    block_table: Tensor | None = None,
    indirection: Tensor | None = None,
) -> list[Tensor]:
    """Queries, keys or values of each sequence in their order, [heads, tokens, size]."""
    if block_table is not None:
        # Entries after a sequence's length may be anything.
        blocks = block_table.long().clamp(0, len(states) - 1)
        return list(states[blocks].transpose(1, 2).flatten(2, 3))
    if indirection is not None:
        tokens = states.shape[2]
        rows = indirection[:, :tokens].long().clamp(0, len(states) - 1)
        return list(states[rows, :, torch.arange(tokens)].transpose(1, 2))
    if bounds is None:
        return list(states)
    ends = bounds.tolist()
    return [states[a:b].transpose(0, 1) for a, b in pairwise(ends)]


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
) -> Any:
    """``lmdecode.sliding_window_attention``: scores, mask and weights written out."""
    ragged = cu_seqlens_q is not None
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    heads = q.shape[1]
    outputs, lses, first = [], [], 0
    sequences = zip(
        _sequences(q, cu_seqlens_q),
        *(_sequences(x, cu_seqlens_kv, block_table, indirection) for x in (k, v)),
        strict=True,
    )
    for row, (one_q, one_k, one_v) in enumerate(sequences):
        queries, keys = one_q.shape[1], one_k.shape[1]
        capacity = keys
        if kv_lengths is not None:
            keys = int(kv_lengths[row])
            one_k, one_v = one_k[:, :keys], one_v[:, :keys]
        positions = torch.arange(queries) + (keys - queries)
        if q_positions is not None:
            if ragged:
                positions = q_positions[first : first + queries]
            else:
                positions = q_positions.expand(len(q), queries)[row]
        bias = torch.zeros((), dtype=torch.float64)
        if attn_mask is None:
            visible = _visible(positions, keys, window, window_right)[None]
        else:
            mask = attn_mask.expand(len(q), heads, queries, capacity)[row, :, :, :keys]
            visible, bias = _mask_terms(mask, mask_convention)
        if key_padding_mask is not None:
            visible = visible & key_padding_mask[row, :keys]
        if alibi_slopes is not None:
            slopes = (alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[row]).double()
            distance = (positions[:, None] - torch.arange(keys)).abs()
            bias = bias - slopes[:, None, None] * distance
        out, lse = _attend(one_q, one_k, one_v, visible, bias, scale, softcap, sinks)
        outputs.append(out.transpose(0, 1) if ragged else out)
        lses.append(lse.transpose(0, 1) if ragged else lse)
        first += queries
    if ragged:
        out = torch.cat([q.new_empty(0, heads, v.shape[-1], dtype=torch.float64), *outputs])
        lse = torch.cat([q.new_empty(0, heads, dtype=torch.float64), *lses]).transpose(0, 1)
    else:
        shape = (len(q), heads, q.shape[2])
        out = torch.stack(outputs) if outputs else q.new_empty(*shape, v.shape[-1])
        lse = torch.stack(lses) if lses else q.new_empty(shape)
    out = out.to(q.dtype)
    return (
        (out, lse.to(q.dtype if q.dtype == torch.float64 else torch.float32)) if return_lse else out
    )


def sliding_window_decode(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """``lmdecode.sliding_window_decode``: the same function of the same arguments."""
    return sliding_window_attention(q, k, v, **options)


def merge_attention_states(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """``lmdecode.merge_attention_states``: the two outputs, each with its share of the weight."""
    lse = torch.logaddexp(lse1.double(), lse2.double())
    finite = lse.clamp(min=torch.finfo(torch.float64).min)
    shares = [torch.exp(one.double() - finite)[..., None] for one in (lse1, lse2)]
    # A part of no weight may hold anything; an infinite one has no share.
    parts = [
        torch.where(s == 0, 0.0, s * o.double()) for s, o in zip(shares, (o1, o2), strict=True)
    ]
    return (parts[0] + parts[1]).to(o1.dtype), lse.to(lse1.dtype)


def _band(size: int, width: int, form: str) -> Tensor:
    """Return the seed's ``triu(1) + tril(-width)``."""
    masked = torch.ones(size, size, dtype=torch.float32)
    masked = torch.triu(masked, 1) + torch.tril(masked, -width)
    if form == "bool":
        return masked.bool()
    return masked * _MASKED


def swa_mask(seq_len: int, window: int, *, form: str = "float") -> Tensor:
    """``lmdecode.swa_mask``: as the seed has it."""
    return _band(seq_len, window, form)


def compressed_swa_mask(
    window: int, head_size: int, *, form: str = "float", variant: str | None = None
) -> Tensor:
    """``lmdecode.compressed_swa_mask``: both listings of the seed, and ours, line by line."""
    if variant == "cpp":
        block = 16384 // head_size // 16 * 16 if head_size > 128 else 128
        width = 2 * block + window % block if window > 3 * block else window
        return _band(_COMPRESSED_SIZE, width, form)
    block = 128 if head_size <= 128 else 64
    if window <= 3 * block:
        width = window
    elif variant == "python":
        width = 3 * block if window % block == 0 else 2 * block + window % block
    else:
        width = 2 * block + (window - 1) % block + 1
    return _band(_COMPRESSED_SIZE, width, form)


def expand_compressed_swa_mask(mask: Tensor, seq_len: int, window: int, head_size: int) -> Tensor:
    """``lmdecode.expand_compressed_swa_mask``: one tile after the other."""
    block = 128 if head_size <= 128 else 64
    tiles = -(-seq_len // block)
    last = -(-window // block)
    hidden = mask[0, 1]
    full = hidden.expand(tiles * block, tiles * block).clone()
    for row in range(tiles):
        for column in range(row + 1):
            distance = row - column
            if distance > last:
                continue
            if window <= 3 * block or distance == 0:
                tile = distance
            else:
                tile = 3 if distance == last else 2 if distance == last - 1 else 1
            full[row * block : (row + 1) * block, column * block : (column + 1) * block] = mask[
                tile * block : (tile + 1) * block, :block
            ]
    return full[:seq_len, :seq_len].contiguous()
