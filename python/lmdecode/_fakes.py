"""Fake (shape-only) implementations of every op, for torch.compile and export."""

from __future__ import annotations

import torch

from lmdecode import _library  # noqa: F401  the schemas must be there first


def _check_devices(
    op: str, name: str, tensor: torch.Tensor, others: dict[str, torch.Tensor | None]
) -> None:
    """CPU tensors with a meta tensor beside them end up in a fake, and not in the CPU op."""
    for other_name, other in others.items():
        if other is not None and other.device != tensor.device:
            raise ValueError(
                f"{op}: {other_name} is on {other.device}; "
                f"expected the device of {name}, {tensor.device}"
            )


@torch.library.register_fake("lmdecode::top_k_top_p_sample")
def _top_k_top_p_sample(
    logits,
    top_k,
    top_k_rows,
    top_p,
    top_p_rows,
    min_p,
    min_p_rows,
    temperature,
    temperature_rows,
    q,
    seed,
    position,
    eps,
    return_logits,
    return_logprob,
    dialect,
):
    rows = dict(
        top_k=top_k_rows, top_p=top_p_rows, min_p=min_p_rows, temperature=temperature_rows,
        q=q, seed=seed, position=position,
    )  # fmt: skip
    _check_devices("top_k_top_p_sample", "logits", logits, rows)
    batch, vocab = logits.shape
    return (
        logits.new_empty((batch,), dtype=torch.int64),
        logits.new_empty((batch, vocab), dtype=torch.float32) if return_logits else None,
        logits.new_empty((batch,), dtype=torch.float32) if return_logprob else None,
        logits.new_empty((batch,), dtype=torch.int32),
        logits.new_empty((batch,), dtype=torch.uint8),
    )


@torch.library.register_fake("lmdecode::top_k_top_p_sample.out")
def _top_k_top_p_sample_out(
    logits,
    top_k,
    top_k_rows,
    top_p,
    top_p_rows,
    min_p,
    min_p_rows,
    temperature,
    temperature_rows,
    q,
    seed,
    position,
    eps,
    dialect,
    **outputs,
):
    rows = dict(
        top_k=top_k_rows, top_p=top_p_rows, min_p=min_p_rows, temperature=temperature_rows,
        q=q, seed=seed, position=position,
    )  # fmt: skip
    _check_devices("top_k_top_p_sample", "logits", logits, {**rows, **outputs})


@torch.library.register_fake("lmdecode::log_softmax_top_k")
def _log_softmax_top_k(logits, beam_scores, num_candidates, num_beams, row_offsets, **processors):
    others = dict(beam_scores=beam_scores, num_beams=row_offsets, **processors)
    _check_devices("log_softmax_top_k", "logits", logits, others)
    requests = logits.shape[0] // num_beams if row_offsets is None else row_offsets.shape[0] - 1
    shape = (requests, num_candidates)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty((requests,), dtype=torch.uint8),
        logits.new_empty(shape, dtype=torch.float32),
    )


@torch.library.register_fake("lmdecode::log_softmax_top_k.processed")
def _log_softmax_top_k_processed(
    logits,
    beam_scores,
    num_candidates,
    num_beams,
    row_offsets,
    sequences,
    lengths,
    repetition_penalty,
    repetition_penalties,
    no_repeat_ngram_size,
    no_repeat_ngram_sizes,
    end_tokens,
    min_length,
    min_lengths,
    suppressed_tokens,
    forced_tokens,
    diversity_tokens,
    diversity_penalty,
    diversity_penalties,
    bias,
    token_bitmask,
):
    return _log_softmax_top_k(
        logits, beam_scores, num_candidates, num_beams, row_offsets,
        sequences=sequences, lengths=lengths, repetition_penalty=repetition_penalties,
        no_repeat_ngram_size=no_repeat_ngram_sizes, end_tokens=end_tokens, min_lengths=min_lengths,
        suppressed_tokens=suppressed_tokens, forced_tokens=forced_tokens,
        diversity_tokens=diversity_tokens, diversity_penalty=diversity_penalties, bias=bias,
        token_bitmask=token_bitmask,
    )  # fmt: skip


def _entries(**lists):
    """Name the tensors of lists for an error."""
    return {
        f"{name}[{number}]": tensor
        for name, tensors in lists.items()
        for number, tensor in enumerate(tensors)
    }


def _fields(state, parameters):
    """Name the tensors of a beam search's state and parameters for an error."""
    return _entries(state=state, parameters=parameters)


@torch.library.register_fake("lmdecode::beam_step")
def _beam_step(
    state,
    parameters,
    scores,
    tokens,
    beams,
    log_probs,
    status,
    slots,
    row_offsets,
    parent_offsets,
    sequences,
    stopped,
    bonus,
    rules,
    rows,
):
    others = dict(
        scores=scores, tokens=tokens, beams=beams, log_probs=log_probs, status=status, slots=slots,
        row_offsets=row_offsets, parent_offsets=parent_offsets, sequences=sequences,
        stopped=stopped, bonus=bonus,
    )  # fmt: skip
    _check_devices("beam_step", "state", state[0], {**_fields(state, parameters), **others})
    if row_offsets is None:
        rows = scores.shape[0] * state[0].shape[1]
    elif isinstance(rows, int) and rows < 0:  # in the tensor
        rows = torch.library.get_ctx().new_dynamic_size()
    return (
        scores.new_empty((rows,), dtype=torch.float32),
        scores.new_empty((rows,), dtype=torch.int64),
        scores.new_empty((rows,), dtype=torch.int64),
        scores.new_empty(scores.shape, dtype=torch.int32),
    )


@torch.library.register_fake("lmdecode::beam_finalize")
def _beam_finalize(
    state, parameters, num_return_sequences, num_groups, slots, sequences, scores, add_open, rules
):
    others = dict(slots=slots, sequences=sequences, scores=scores)
    _check_devices("beam_finalize", "state", state[0], {**_fields(state, parameters), **others})
    first = state[0]
    entries = first.shape[0] if slots is None else slots.shape[0]
    shape = (entries // num_groups, num_return_sequences)
    return (
        first.new_empty((*shape, first.shape[2]), dtype=torch.int64),
        first.new_empty(shape, dtype=torch.int64),
        first.new_empty(shape, dtype=torch.float64),
        first.new_empty((*shape, state[1].shape[2]), dtype=torch.float32),
        first.new_empty((*shape, state[2].shape[2]), dtype=torch.int32),
        first.new_empty(shape, dtype=torch.int64),
    )


@torch.library.register_fake("lmdecode::reorder_cache_")
def _reorder_cache_(tensors, parents, batch_dim, length_dim, length):
    others = {f"tensors[{number}]": tensor for number, tensor in enumerate(tensors)}
    _check_devices("reorder_cache_", "parents", parents, others)


@torch.library.register_fake("lmdecode::update_beam_indirection_")
def _update_beam_indirection_(indirection, parents, length, length_rows):
    others = dict(parents=parents, length=length_rows)
    _check_devices("update_beam_indirection_", "indirection", indirection, others)


@torch.library.register_fake("lmdecode::ring_cache_append_")
def _ring_cache_append_(keys, values, k, v, position, position_rows, num_sink_tokens):
    others = dict(values=values, k=k, v=v, position=position_rows)
    _check_devices("ring_cache_append_", "keys", keys, others)


@torch.library.register_fake("lmdecode::copy_blocks_")
def _copy_blocks_(pools, copies):
    others = {f"pools[{number}]": pool for number, pool in enumerate(pools)}
    _check_devices("copy_blocks_", "copies", copies, others)


@torch.library.register_fake("lmdecode::block_table_append_")
def _block_table_append_(
    block_table, lengths, ref_counts, free_blocks, counters, copies, num_tokens, block_size
):
    others = dict(
        lengths=lengths, ref_counts=ref_counts, free_blocks=free_blocks, counters=counters,
        copies=copies, num_tokens=num_tokens,
    )  # fmt: skip
    _check_devices("block_table_append_", "block_table", block_table, others)


@torch.library.register_fake("lmdecode::block_table_reorder_")
def _block_table_reorder_(
    block_table, lengths, ref_counts, free_blocks, counters, parents, rows, block_size
):
    others = dict(
        lengths=lengths, ref_counts=ref_counts, free_blocks=free_blocks, counters=counters,
        parents=parents,
    )  # fmt: skip
    _check_devices("block_table_reorder_", "block_table", block_table, others)


@torch.library.register_fake("lmdecode::sliding_window_attention")
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
    _check_devices("sliding_window_attention", "q", q, others)
    lse_shape = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape, dtype=torch.float32) if return_lse else None,
    )


@torch.library.register_fake("lmdecode::sliding_window_decode")
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
    _check_devices("sliding_window_decode", "q", q, others)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(q.shape[:-1], dtype=torch.float32) if return_lse else None,
    )


@torch.library.register_fake("lmdecode::merge_attention_states")
def _merge_attention_states(o1, lse1, o2, lse2):
    _check_devices("merge_attention_states", "o1", o1, dict(lse1=lse1, o2=o2, lse2=lse2))
    return o1.new_empty(o1.shape), o1.new_empty(lse1.shape, dtype=torch.float32)


@torch.library.register_fake("lmdecode::pack_linear")
def _pack_linear(weight, format):
    outputs, inputs = (
        size + (-size % unit) for size, unit in zip(weight.shape, (64, 4), strict=True)
    )
    size = 64 + outputs * inputs * (4, 2, 1)[format]  # csrc/linear/packed_layout.h
    return weight.new_empty((size + 8 * outputs * (format == 2),), dtype=torch.uint8)


@torch.library.register_fake("lmdecode::packed_linear")
def _packed_linear(x, packed, out_features, format, bias, activation, multiplier, residual):
    others = dict(packed=packed, bias=bias, multiplier=multiplier, residual=residual)
    _check_devices("packed_linear", "x", x, others)
    return x.new_empty((x.shape[0], out_features))


@torch.library.register_fake("lmdecode::packed_linear.out")
def _packed_linear_out(
    x, packed, out_features, format, bias, activation, multiplier, residual, *, out
):
    others = dict(packed=packed, bias=bias, multiplier=multiplier, residual=residual, out=out)
    _check_devices("packed_linear", "x", x, others)


@torch.library.register_fake("lmdecode::layer_norm")
def _layer_norm(x, weight, bias, eps):
    _check_devices("layer_norm", "x", x, dict(weight=weight, bias=bias))
    return x.new_empty(x.shape)


@torch.library.register_fake("lmdecode::rms_norm")
def _rms_norm(x, weight, eps):
    _check_devices("rms_norm", "x", x, dict(weight=weight))
    return x.new_empty(x.shape)


@torch.library.register_fake("lmdecode::cpu_capability")
def _cpu_capability():
    return 0


@torch.library.register_fake("lmdecode::decoding_steps_")
def _decoding_steps(
    weights, config, numbers, state, parameters, rules, caches, workspace, options, logits=None
):
    others = _entries(
        weights=weights, state=state, parameters=parameters, token_rules=rules, caches=caches
    )
    others["logits"] = logits
    _check_devices("decoding_steps_", "workspace", workspace, others)
    return workspace.new_empty((), dtype=torch.int64)


@torch.library.register_fake("lmdecode::decoding_read_memory_")
def _decoding_read_memory(weights, config, numbers, caches, memory, lengths, requests):
    others = dict(lengths=lengths, requests=requests, **_entries(weights=weights, caches=caches))
    _check_devices("decoding_read_memory_", "memory", memory, others)


@torch.library.register_fake("lmdecode::faster_transformer_decoding_")
def _faster_transformer_decoding(weights, config, numbers, caches, options):
    others = _entries(weights=weights, caches=caches)
    _check_devices("faster_transformer_decoding_", "caches", caches[0], others)
    steps, rows = options[1], caches[0].shape[1]
    ids = caches[0].new_empty((steps, rows), dtype=torch.int32)
    return ids, torch.empty_like(ids), ids.new_empty((rows,))


@torch.library.register_fake("lmdecode::decoder_layer")
def _decoder_layer(
    x, weights, config, numbers, relative_bias, caches, cache_rows, positions, requests
):
    others = dict(
        relative_bias=relative_bias, cache_rows=cache_rows, positions=positions, requests=requests
    )
    _check_devices("decoder_layer", "x", x, others | _entries(weights=weights, caches=caches))
    return torch.empty_like(x)


@torch.library.register_fake("lmdecode::gather_tree")
def _gather_tree(step_ids, parent_ids, max_sequence_lengths, end_token):
    others = dict(parent_ids=parent_ids, max_sequence_lengths=max_sequence_lengths)
    _check_devices("gather_tree", "step_ids", step_ids, others)
    return torch.empty_like(step_ids)


@torch.library.register_fake("lmdecode::decoding_workspace_bytes")
def _decoding_workspace_bytes(config, numbers, sizes):
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # no tensors: the size is that of the op itself
        return torch.ops.lmdecode.decoding_workspace_bytes(config, numbers, sizes)


@torch.library.register_fake("lmdecode::decoder_self_attention_")
def _decoder_self_attention_(
    qkv, keys, values, table, positions, bias, scale, denominator_epsilon, *, out
):
    others = dict(keys=keys, values=values, table=table, positions=positions, bias=bias, out=out)
    _check_devices("decoder_self_attention_", "qkv", qkv, others)


@torch.library.register_fake("lmdecode::decoder_cross_attention")
def _decoder_cross_attention(queries, keys, values, lengths, scale, denominator_epsilon, *, out):
    others = dict(keys=keys, values=values, lengths=lengths, out=out)
    _check_devices("decoder_cross_attention", "queries", queries, others)


@torch.library.register_fake("lmdecode::decoder_cross_cache_")
def _decoder_cross_cache_(key_value, keys, values):
    _check_devices("decoder_cross_cache_", "key_value", key_value, dict(keys=keys, values=values))


@torch.library.register_fake("lmdecode::decoder_add_norm_")
def _decoder_add_norm_(x, delta, bias, gamma, beta, epsilon, rms_norm, norm_first, *, out):
    others = dict(delta=delta, bias=bias, gamma=gamma, beta=beta, out=out)
    _check_devices("decoder_add_norm_", "x", x, others)


@torch.library.register_fake("lmdecode::decoder_embed")
def _decoder_embed(tokens, positions, embedding, position_table, scale, position_offset, *, x):
    others = dict(positions=positions, embedding=embedding, position_table=position_table, x=x)
    _check_devices("decoder_embed", "tokens", tokens, others)


@torch.library.register_fake("lmdecode::decoder_activate_")
def _decoder_activate_(up, gate, activation):
    _check_devices("decoder_activate_", "up", up, dict(gate=gate))
