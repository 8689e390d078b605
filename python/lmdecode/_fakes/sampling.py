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
