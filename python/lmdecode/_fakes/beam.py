"""Fakes of the ops of beam."""

from __future__ import annotations

import torch

from lmdecode._fakes.registry import check_devices, entries, fake


def _fields(state, parameters):
    """Name the tensors of a beam search's state and parameters for an error."""
    return entries(state=state, parameters=parameters)


@fake("log_softmax_top_k")
def _log_softmax_top_k(logits, beam_scores, num_candidates, num_beams, row_offsets, **processors):
    others = dict(beam_scores=beam_scores, num_beams=row_offsets, **processors)
    check_devices("log_softmax_top_k", "logits", logits, others)
    requests = logits.shape[0] // num_beams if row_offsets is None else row_offsets.shape[0] - 1
    shape = (requests, num_candidates)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty((requests,), dtype=torch.uint8),
        logits.new_empty(shape, dtype=torch.float32),
    )


@fake("log_softmax_top_k.processed")
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


@fake("log_softmax_top_k.trie")
def _log_softmax_top_k_trie(*arguments):
    *processed, trie_tokens, child_begin, nodes = arguments
    logits, others = processed[0], dict(trie=trie_tokens, child_begin=child_begin, nodes=nodes)
    check_devices("log_softmax_top_k", "logits", logits, others)
    return _log_softmax_top_k_processed(*processed)


@fake("trie_build")
def _trie_build(tokens, offsets):
    check_devices("trie_build", "tokens", tokens, dict(offsets=offsets))
    nodes = torch.library.get_ctx().new_dynamic_size(min=1)
    return (
        tokens.new_empty((nodes,), dtype=torch.int32),
        tokens.new_empty((nodes + 1,), dtype=torch.int32),
        tokens.new_empty((nodes,), dtype=torch.uint8),
    )


@fake("trie_step")
def _trie_step(trie_tokens, child_begin, nodes, tokens):
    others = dict(child_begin=child_begin, nodes=nodes, tokens=tokens)
    check_devices("trie_step", "trie_tokens", trie_tokens, others)
    return nodes.new_empty(nodes.shape)


@fake("beam_step")
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
    check_devices("beam_step", "state", state[0], {**_fields(state, parameters), **others})
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


@fake("beam_search_step_")
def _beam_search_step(
    logits,
    state,
    parameters,
    rules,
    searches,
    nodes,
    num_candidates,
    next_rows,
    token_bitmask,
    bonus,
    trace,
):
    others = dict(
        logits=logits, searches=searches, nodes=nodes, token_bitmask=token_bitmask, bonus=bonus
    )
    lists = {**_fields(state, parameters), **entries(token_rules=rules, trace=trace)}
    check_devices("beam_search_step_", "state", state[0], {**lists, **others})
    return (
        state[0].new_empty((next_rows,), dtype=torch.int64),
        state[0].new_empty((next_rows,), dtype=torch.int64),
        state[0].new_empty((searches.shape[0],), dtype=torch.int64),
    )


@fake("beam_finalize")
def _beam_finalize(
    state, parameters, num_return_sequences, num_groups, slots, sequences, scores, add_open, rules
):
    others = dict(slots=slots, sequences=sequences, scores=scores)
    check_devices("beam_finalize", "state", state[0], {**_fields(state, parameters), **others})
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
