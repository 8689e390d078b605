"""Fakes of the ops of attention."""

from __future__ import annotations

import torch

from lmdecode._fakes.registry import check_devices, fake


@fake("sliding_window_attention")
def _sliding_window_attention(
    q,
    k,
    v,
    window,
    window_right,
    scale,
    softcap,
    sinks,
    alibi_slopes,
    q_positions,
    kv_lengths,
    cu_seqlens_q,
    cu_seqlens_kv,
    attn_mask,
    true_is_visible,
    key_padding_mask,
    block_table,
    indirection,
    return_lse,
):
    others = dict(
        k=k, v=v, sinks=sinks, alibi_slopes=alibi_slopes, q_positions=q_positions,
        kv_lengths=kv_lengths, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
        attn_mask=attn_mask, key_padding_mask=key_padding_mask, block_table=block_table,
        indirection=indirection,
    )  # fmt: skip
    check_devices("sliding_window_attention", "q", q, others)
    lse_shape = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape, dtype=torch.float32) if return_lse else None,
    )


@fake("sliding_window_decode")
def _sliding_window_decode(
    q,
    k,
    v,
    window,
    window_right,
    scale,
    softcap,
    sinks,
    alibi_slopes,
    q_positions,
    kv_lengths,
    key_padding_mask,
    block_table,
    indirection,
    return_lse,
):
    others = dict(
        k=k, v=v, sinks=sinks, alibi_slopes=alibi_slopes, q_positions=q_positions,
        kv_lengths=kv_lengths, key_padding_mask=key_padding_mask, block_table=block_table,
        indirection=indirection,
    )  # fmt: skip
    check_devices("sliding_window_decode", "q", q, others)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(q.shape[:-1], dtype=torch.float32) if return_lse else None,
    )


@fake("merge_attention_states")
def _merge_attention_states(o1, lse1, o2, lse2):
    check_devices("merge_attention_states", "o1", o1, dict(lse1=lse1, o2=o2, lse2=lse2))
    return o1.new_empty(o1.shape), o1.new_empty(lse1.shape, dtype=torch.float32)
