"""What ``BeamSearch`` gives ``log_softmax_top_k`` beside logits, and the beams of a first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.engine.slots import BeamSlots
from lmdecode.beam.types import UNUSED_BEAM_SCORE, BeamCandidates

__all__ = ["all_beams", "constant_processors", "step_processors"]


def constant_processors(
    requests: Sequence[BeamRequest], slots: Tensor, store: BeamSlots, vocab: int
) -> dict[str, Tensor]:
    """Return the arguments that are the same in every step, of the rules that somebody uses."""
    names = []
    if any(request.repetition_penalty != 1.0 for request in requests):
        names.append("repetition_penalty")
    if any(request.no_repeat_ngram_size for request in requests):
        names.append("no_repeat_ngram_size")
    if any(request.suppress_tokens for request in requests):
        names.append("suppressed_tokens")
    if any(request.diversity_penalty for request in requests):
        names.append("diversity_penalty")
    arguments = {}
    if any(request.min_new_tokens and request.eos_token_id for request in requests):
        names.append("min_lengths")
        arguments["end_tokens"] = store.parameters.end_tokens.index_select(0, slots)
    arguments |= {name: store.columns[name].index_select(0, slots) for name in names}
    if any(request.logit_bias for request in requests):
        arguments["bias"] = _bias(requests, vocab, store.device)
    return arguments


def _bias(requests: Sequence[BeamRequest], vocab: int, device: torch.device) -> Tensor:
    """[R, vocab] float32."""
    bias = torch.zeros(len(requests), vocab, dtype=torch.float32, device=device)
    for number, request in enumerate(requests):
        known = {token: value for token, value in request.logit_bias.items() if token < vocab}
        if known:
            tokens = torch.tensor(list(known), dtype=torch.int64, device=device)
            values = torch.tensor(list(known.values()), dtype=torch.float32, device=device)
            bias[number, tokens] = values
    return bias


def step_processors(
    constant: dict[str, Tensor],
    requests: Sequence[BeamRequest],
    slots: Tensor,
    beams: Tensor,
    longest: int,
    store: BeamSlots,
) -> dict[str, Tensor]:
    """Return the arguments of this step.

    Parameters
    ----------
    constant
        What ``constant_processors`` returned.
    requests, slots
        The searches.
    beams : Tensor
        [W] of each row: slot * beams + beam.
    longest
        Tokens in the longest sequence.
    store
        The slots.
    """
    arguments = dict(constant)
    forced = any(
        request.forced_bos_token_id is not None or request.forced_eos_token_id is not None
        for request in requests
    )
    history = "repetition_penalty" in constant or "no_repeat_ngram_size" in constant
    if not (forced or history or "min_lengths" in constant):
        return arguments
    lengths = store.state.lengths.index_select(0, slots)
    arguments["lengths"] = lengths
    if history:
        flat = store.state.sequences.flatten(0, 1)[:, :longest]
        arguments["sequences"] = flat.index_select(0, beams)
    if forced:
        last = store.parameters.max_lengths.index_select(0, slots) - 1
        begin = store.columns["forced_bos"].index_select(0, slots).masked_fill(lengths != 1, -1)
        end = store.columns["forced_eos"].index_select(0, slots).masked_fill(lengths != last, -1)
        arguments["forced_tokens"] = torch.where(end >= 0, end, begin)
    return arguments


def all_beams(candidates: BeamCandidates, widths: Tensor, widest: int) -> BeamCandidates:
    """Add the candidates of the beams that searches of one row do not have yet.

    transformers begins with ``num_beams`` equal rows, the scores of all but the first at -1e9.
    Their candidates count where the first row has too few of its own.

    Parameters
    ----------
    candidates : BeamCandidates
        [R, K].
    widths : Tensor
        [R] beams that the search is to have; 0: its rows are all there.
    widest
        The largest of the widths.
    """
    if widest == 1:
        return candidates
    scores, tokens, beams, status, log_probs = candidates
    requests, count = scores.shape
    alive = scores > -torch.inf
    # Candidates of equal score stand in the order of their tokens.
    order = tokens.masked_fill(~alive, torch.iinfo(torch.int64).max).argsort(dim=1)
    shape = (requests, widest - 1, count)
    beam = torch.arange(1, widest, device=scores.device)[None, :, None]
    other_scores = (log_probs.gather(1, order) + UNUSED_BEAM_SCORE)[:, None].expand(shape)
    other_scores = other_scores.masked_fill(beam >= widths[:, None, None], -torch.inf).flatten(1)
    best, places = other_scores.sort(dim=1, descending=True, stable=True)
    have = alive.sum(dim=1, keepdim=True)
    rank = torch.arange(count, device=scores.device)[None]
    behind = (rank - have).clamp(0, best.shape[1] - 1)
    place = places.gather(1, behind)
    best = best.gather(1, behind)
    source = order.gather(1, place % count)
    missing = (rank >= have) & (best > -torch.inf)
    return BeamCandidates(
        torch.where(missing, best, scores),
        torch.where(missing, tokens.gather(1, source), tokens),
        torch.where(missing, place // count + 1, beams),
        status,
        torch.where(missing, log_probs.gather(1, source), log_probs),
    )
