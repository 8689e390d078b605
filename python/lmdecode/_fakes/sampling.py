"""Fakes of the ops of sampling."""

from __future__ import annotations

import torch

from lmdecode._fakes.registry import check_devices, fake


@fake("top_k_top_p_sample")
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
    int_seed=-1,
    int_position=0,
):
    rows = dict(
        top_k=top_k_rows, top_p=top_p_rows, min_p=min_p_rows, temperature=temperature_rows,
        q=q, seed=seed, position=position,
    )  # fmt: skip
    check_devices("top_k_top_p_sample", "logits", logits, rows)
    batch, vocab = logits.shape
    return (
        logits.new_empty((batch,), dtype=torch.int64),
        logits.new_empty((batch, vocab), dtype=torch.float32) if return_logits else None,
        logits.new_empty((batch,), dtype=torch.float32) if return_logprob else None,
        logits.new_empty((batch,), dtype=torch.int32),
        logits.new_empty((batch,), dtype=torch.uint8),
    )


@fake("top_k_top_p_sample.out")
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
    int_seed=-1,
    int_position=0,
    **outputs,
):
    rows = dict(
        top_k=top_k_rows, top_p=top_p_rows, min_p=min_p_rows, temperature=temperature_rows,
        q=q, seed=seed, position=position,
    )  # fmt: skip
    check_devices("top_k_top_p_sample", "logits", logits, {**rows, **outputs})


@fake("prompt_lookup")
def _prompt_lookup(tokens, lengths, num_tokens, max_ngram):
    check_devices("prompt_lookup", "tokens", tokens, dict(lengths=lengths))
    return tokens.new_empty((tokens.shape[0], num_tokens))


@fake("sampler_row_bytes")
def _sampler_row_bytes(vocab, text_capacity, rules_capacity):
    return torch.ops.lmdecode.sampler_row_bytes(vocab, text_capacity, rules_capacity)


@fake("sampler_insert_")
def _sampler_insert(
    state, vocab, text_capacity, rules_capacity, row, integers, numbers, rules, prompt
):
    rows = dict(integers=integers, numbers=numbers, rules=rules, prompt=prompt)
    check_devices("sampler_insert_", "state", state, rows)


@fake("sampler_accept_")
def _sampler_accept(state, vocab, text_capacity, rules_capacity, row, tokens):
    check_devices("sampler_accept_", "state", state, dict(tokens=tokens))


@fake("sampler_rewind_")
def _sampler_rewind(state, vocab, text_capacity, rules_capacity, row, count):
    pass


@fake("sampler_copy_")
def _sampler_copy(
    to,
    text_capacity,
    rules_capacity,
    from_state,
    from_text_capacity,
    from_rules_capacity,
    vocab,
):
    check_devices("Sampler.load_state_dict", "to", to, dict(from_state=from_state))


@fake("sampler_step_")
def _sampler_step(
    state,
    logits,
    bitmask,
    results,
    kept_logits,
    kept_ids,
    kept_logprobs,
    vocab,
    text_capacity,
    rules_capacity,
    num_logprobs,
    flags,
):
    tensors = dict(
        logits=logits, bitmask=bitmask, results=results, kept_logits=kept_logits,
        kept_ids=kept_ids, kept_logprobs=kept_logprobs,
    )  # fmt: skip
    check_devices("Sampler.sample", "state", state, tensors)


@fake("sampler_verify_")
def _sampler_verify(
    state,
    logits,
    bitmask,
    draft,
    parents,
    num_draft,
    draft_logits,
    results,
    tokens,
    path,
    num_accepted,
    vocab,
    text_capacity,
    rules_capacity,
    rejection,
):
    tensors = dict(
        logits=logits, bitmask=bitmask, draft=draft, parents=parents, num_draft=num_draft,
        draft_logits=draft_logits, results=results, tokens=tokens, path=path,
        num_accepted=num_accepted,
    )  # fmt: skip
    check_devices("verify_draft", "state", state, tensors)
