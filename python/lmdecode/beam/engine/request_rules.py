"""A ``BeamRequest`` as token rules."""

from __future__ import annotations

import torch

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.token_rules import ALWAYS, TokenRules, one_slot

__all__ = ["check_tokens_of_request", "token_rules_of_request"]


def check_tokens_of_request(op: str, request: BeamRequest, vocab_size: int) -> None:
    """Raise ValueError for a token that is to be written, and that the vocabulary does not have."""
    forced = (request.forced_bos_token_id, request.forced_eos_token_id)
    for name, tokens in (
        ("prompt_ids", request.prompt_ids),
        ("pad_token_id, by default the first end token,", (request.pad_token,)),
        ("forced_bos_token_id", forced[:1]),
        ("forced_eos_token_id", forced[1:]),
    ):
        if any(token is not None and token >= vocab_size for token in tokens):
            raise ValueError(f"{op}: {name} is {list(tokens)}; expected tokens below {vocab_size}")


def token_rules_of_request(request: BeamRequest, vocab_size: int) -> TokenRules:
    """Return the rules of one slot. Token ids >= vocab_size are ignored."""
    prompt = len(request.prompt_ids)
    bans = [(token, 0, ALWAYS, 1) for token in request.suppress_tokens]
    if request.min_new_tokens:
        last = prompt + request.min_new_tokens - 1
        bans += [(token, 0, last, 0) for token in request.eos_token_id]
    forced = [
        (length, token)
        for length, token in (
            (1, request.forced_bos_token_id),
            (request.max_length - 1, request.forced_eos_token_id),
        )
        if token is not None and token < vocab_size
    ]
    bias = None
    values = {token: value for token, value in request.logit_bias.items() if token < vocab_size}
    if values:
        bias = torch.zeros(vocab_size, dtype=torch.float32, device="cpu")
        bias[list(values)] = torch.tensor(list(values.values()), dtype=torch.float32, device="cpu")
    return one_slot(
        repetition_penalty=request.repetition_penalty,
        no_repeat_ngram_size=request.no_repeat_ngram_size,
        diversity_penalty=request.diversity_penalty,
        bans=bans,
        forced=forced,
        bias=bias,
    )
