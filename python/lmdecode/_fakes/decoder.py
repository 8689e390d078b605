"""Fakes of the ops of decoder."""

from __future__ import annotations

import torch

from lmdecode._fakes.registry import check_devices, entries, fake


@fake("decoding_steps_")
def _decoding_steps(
    weights, config, numbers, state, parameters, rules, caches, workspace, options, logits=None
):
    others = entries(
        weights=weights, state=state, parameters=parameters, token_rules=rules, caches=caches
    )
    others["logits"] = logits
    check_devices("decoding_steps_", "workspace", workspace, others)
    return workspace.new_empty((), dtype=torch.int64)


@fake("decoding_read_memory_")
def _decoding_read_memory(weights, config, numbers, caches, memory, lengths, requests):
    others = dict(lengths=lengths, requests=requests, **entries(weights=weights, caches=caches))
    check_devices("decoding_read_memory_", "memory", memory, others)


@fake("faster_transformer_decoding_")
def _faster_transformer_decoding(weights, config, numbers, caches, options):
    others = entries(weights=weights, caches=caches)
    check_devices("faster_transformer_decoding_", "caches", caches[0], others)
    steps, rows = options[1], caches[0].shape[1]
    ids = caches[0].new_empty((steps, rows), dtype=torch.int32)
    return ids, torch.empty_like(ids), ids.new_empty((rows,))


@fake("decoder_layer")
def _decoder_layer(
    x, weights, config, numbers, relative_bias, caches, cache_rows, positions, requests
):
    others = dict(
        relative_bias=relative_bias, cache_rows=cache_rows, positions=positions, requests=requests
    )
    check_devices("decoder_layer", "x", x, others | entries(weights=weights, caches=caches))
    return torch.empty_like(x)


@fake("gather_tree")
def _gather_tree(step_ids, parent_ids, max_sequence_lengths, end_token):
    others = dict(parent_ids=parent_ids, max_sequence_lengths=max_sequence_lengths)
    check_devices("gather_tree", "step_ids", step_ids, others)
    return torch.empty_like(step_ids)


@fake("decoding_workspace_bytes")
def _decoding_workspace_bytes(config, numbers, sizes):
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # no tensors: the size is that of the op itself
        return torch.ops.lmdecode.decoding_workspace_bytes(config, numbers, sizes)


@fake("decoder_self_attention_")
def _decoder_self_attention_(
    qkv, keys, values, table, positions, bias, scale, denominator_epsilon, *, out
):
    others = dict(keys=keys, values=values, table=table, positions=positions, bias=bias, out=out)
    check_devices("decoder_self_attention_", "qkv", qkv, others)


@fake("decoder_cross_attention")
def _decoder_cross_attention(queries, keys, values, lengths, scale, denominator_epsilon, *, out):
    others = dict(keys=keys, values=values, lengths=lengths, out=out)
    check_devices("decoder_cross_attention", "queries", queries, others)


@fake("decoder_cross_cache_")
def _decoder_cross_cache_(key_value, keys, values):
    check_devices("decoder_cross_cache_", "key_value", key_value, dict(keys=keys, values=values))


@fake("decoder_add_norm_")
def _decoder_add_norm_(x, delta, bias, gamma, beta, epsilon, rms_norm, norm_first, *, out):
    others = dict(delta=delta, bias=bias, gamma=gamma, beta=beta, out=out)
    check_devices("decoder_add_norm_", "x", x, others)


@fake("decoder_embed")
def _decoder_embed(tokens, positions, embedding, position_table, scale, position_offset, *, x):
    others = dict(positions=positions, embedding=embedding, position_table=position_table, x=x)
    check_devices("decoder_embed", "tokens", tokens, others)


@fake("decoder_activate_")
def _decoder_activate_(up, gate, activation):
    check_devices("decoder_activate_", "up", up, dict(gate=gate))


@fake("encoder_forward")
def _encoder_forward(weights, config, numbers, tokens, inputs, positions, row_begins):
    others = dict(tokens=tokens, inputs=inputs, row_begins=row_begins)
    check_devices("encoder_forward", "positions", positions, others | entries(weights=weights))
    return positions.new_empty((positions.shape[0], config[1]), dtype=torch.float32)


@fake("causal_forward_")
def _causal_forward(
    weights,
    layout,
    config,
    numbers,
    caches,
    windows,
    workspace,
    tokens,
    entries_,
    num_logits,
    max_rows,
):
    others = dict(weights=weights, layout=layout, tokens=tokens, entries=entries_)
    check_devices("causal_forward_", "workspace", workspace, others | entries(caches=caches))
    return workspace.new_empty((num_logits, config[6]), dtype=torch.float32)


@fake("causal_caches_reorder_")
def _causal_caches_reorder(caches, windows, parents):
    check_devices("causal_caches_reorder_", "parents", parents, entries(caches=caches))


@fake("causal_caches_start_")
def _causal_caches_start(caches, windows, lengths):
    check_devices("causal_caches_start_", "lengths", lengths, entries(caches=caches))


@fake("causal_caches_truncate_")
def _causal_caches_truncate(caches, windows, lengths):
    check_devices("causal_caches_truncate_", "lengths", lengths, entries(caches=caches))


@fake("causal_workspace_bytes")
def _causal_workspace_bytes(config, numbers, sizes):
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # no tensors: the size is that of the op itself
        return torch.ops.lmdecode.causal_workspace_bytes(config, numbers, sizes)
