"""The beams that a search of ``BeamSearch`` does not have in its first step."""

from __future__ import annotations

import torch
from torch import Tensor

from lmdecode.beam.types import UNUSED_BEAM_SCORE, BeamCandidates

__all__ = ["all_beams"]


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
