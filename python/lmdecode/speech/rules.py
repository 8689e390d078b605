"""Rules of a window's text, applied to logits before the softmax, as in Whisper."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode.decoder.searches import DecodingSearches

__all__ = ["ruled"]


def ruled(
    searches: DecodingSearches, values: Tensor, repetition_penalty: float, no_repeat_ngram_size: int
) -> Tensor:
    """Return the logits that tokens are chosen by, [rows, V], -inf where one is forbidden.

    The last tokens of the searches have been read; their rules are bans and times. ``values`` is
    [2, rows, V] of ``read_tokens``: logits, which are overwritten, and scores after these rules.
    Penalties, off at 1 and 0, see only the tokens generated after the prompt.
    """
    logits, scores = values
    if repetition_penalty == 1.0 and no_repeat_ngram_size == 0:
        return scores  # the logits up to a constant for each row
    state, rules, beams = searches.state, searches.token_rules, searches.state.scores.shape[1]
    for slot in searches.are_running().nonzero()[:, 0].tolist():
        length, prompt = int(state.lengths[slot]), int(searches.parameters.prompt_lengths[slot])
        first_time, end, begin, _ = rules.timestamps[slot].tolist()
        bans = rules.bans[slot]
        banned = bans[(bans[:, 0] >= 0) & (bans[:, 1] <= length) & (length <= bans[:, 2]), 0]
        for beam, sequence in enumerate(state.sequences[slot, :, :length].tolist()):
            of_row, after = logits[slot * beams + beam], scores[slot * beams + beam]
            _penalise(of_row, sequence[prompt:], repetition_penalty, no_repeat_ngram_size)
            of_row[banned] = -torch.inf
            if first_time < 0:
                continue
            # The same times stay allowed, but penalties change whether text is.
            words, times = of_row[:first_time], of_row[first_time:]
            times[after[first_time:] == -torch.inf] = -torch.inf
            words[-1] = -torch.inf  # "no times follow"
            text = sequence[begin:]
            if not text:
                words.fill_(-torch.inf)
            elif len(text) > 1 and text[-1] >= first_time > text[-2]:
                words[:end] = -torch.inf
            if times.logsumexp(0) > words.max():
                words.fill_(-torch.inf)
    return logits


def _penalise(logits: Tensor, new: list[int], penalty: float, size: int) -> None:
    """Penalise generated tokens, and forbid tokens that would repeat an n-gram."""
    seen = torch.tensor(sorted(set(new)), dtype=torch.int64, device="cpu")
    before = logits[seen]
    logits[seen] = torch.where(before < 0, before * penalty, before / penalty)
    for i in range(len(new) - size + 1 if size else 0):
        if new[i : i + size - 1] == new[len(new) - size + 1 :]:
            logits[new[i + size - 1]] = -torch.inf
