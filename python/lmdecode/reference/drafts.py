"""Drafts again in plain torch: ``prompt_lookup`` and ``verify_draft``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.reference.arithmetic import philox, position_words, sum_masses, token_noise
from lmdecode.reference.sampler import Distribution, Sampler, softmax_row
from lmdecode.reference.sampler_stages import EXTRA_STREAM
from lmdecode.reference.sampling import best_score
from lmdecode.sampling.types import STATUS_EMPTY, STATUS_NO_SEQUENCE, VerifyOutput

__all__ = ["prompt_lookup", "verify_draft"]

_ACCEPT_BLOCK = 0xFFFFFFFE  # no token's block: those end at 2^30
_RESIDUAL_STREAM = 4  # of Philox: tokens' noise has 0 and 1


def prompt_lookup(
    tokens: Tensor, num_tokens: int, max_ngram: int = 3, *, lengths: Tensor | None = None
) -> Tensor:
    """See ``lmdecode.prompt_lookup``."""
    if tokens.dim() == 2:
        if lengths is None:
            lengths = torch.full((len(tokens),), tokens.shape[1])
        rows = [
            prompt_lookup(row[:length], num_tokens, max_ngram)
            for row, length in zip(tokens, lengths.tolist(), strict=True)
        ]
        return torch.stack(rows) if rows else torch.empty(0, num_tokens, dtype=torch.int64)
    proposed = torch.full((num_tokens,), -1)
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        windows = tokens[:-1].unfold(0, size, 1)  # each with a token after it
        places = (windows == tokens[-size:]).all(dim=1).nonzero()
        if len(places):
            first = int(places[0]) + size
            behind = tokens[first : first + num_tokens]
            proposed[: len(behind)] = behind
            break
    return proposed


def _accept_bits(seed: int, position: int) -> int:
    """64 random bits."""
    words = philox(torch.tensor([_ACCEPT_BLOCK]), *position_words(position), EXTRA_STREAM, seed)[0]
    return int(words[0]) << 32 | int(words[1])


def _by_token(ids: Tensor, mass: Tensor) -> dict[int, int]:
    return dict(zip(ids.tolist(), mass.tolist(), strict=True))


def _accept_or_recover(
    sampler: Sampler, row: int, left: Distribution, drafted: int, draft_row: Tensor | None
) -> int | None:
    """Return None where the drafted token is accepted, else the token that stands for it."""
    sequence = sampler.rows[row]
    assert sequence is not None
    seed, position = sequence.parameters.seed, sequence.position
    target, target_total = _by_token(left.ids, left.mass), sum_masses(left.mass)
    draft, draft_total = {drafted: 1}, 1
    if draft_row is not None:
        q = softmax_row(draft_row.cpu().to(torch.float32))
        if len(q.ids) > 0:
            draft, draft_total = _by_token(q.ids, q.mass), sum_masses(q.mass)
    p = target.get(drafted, 0) * draft_total
    q_mass = draft.get(drafted, 0) * target_total
    if _accept_bits(seed, position) * q_mass < p << 64:
        return None
    # What the draft gave too little, exactly; then rounded once.
    residual = {
        token: mass * draft_total - draft.get(token, 0) * target_total
        for token, mass in sorted(target.items())
    }
    ids = [token for token, weight in residual.items() if weight > 0]
    if not ids:
        return int(left.ids[sampler.draw(row, left)])
    weight = torch.tensor([float(residual[token]) for token in ids], dtype=torch.float64)
    tokens = torch.tensor(ids)
    noise = token_noise(seed, position, tokens, _RESIDUAL_STREAM)
    return ids[best_score(tokens, weight / noise)]


def _next_token(
    sampler: Sampler,
    row: int,
    left: Distribution,
    children: list[int],
    draft: list[int],
    rejection: bool,
    draft_row: Tensor | None,
) -> tuple[int, int | None]:
    """Return the next token, and the child with that token or None."""
    sequence = sampler.rows[row]
    assert sequence is not None
    drawn = int(left.ids[sampler.draw(row, left)])
    if children and rejection and left.is_drawn and sequence.parameters.seed >= 0:
        child = children[0]
        token = _accept_or_recover(sampler, row, left, draft[child], draft_row)
        return (draft[child], child) if token is None else (token, None)
    return drawn, next((child for child in children if draft[child] == drawn), None)


def verify_draft(
    logits: Tensor,
    draft: Tensor,
    sampler: Sampler,
    *,
    mode: str = "match",
    draft_logits: Tensor | None = None,
    num_draft: Tensor | None = None,
    parents: Tensor | None = None,
    bitmask: Tensor | None = None,
) -> VerifyOutput:
    """See ``lmdecode.verify_draft``: logits [B, D + 1, V], draft [B, D].

    Logits 0 are those before the draft, logits i + 1 those after drafted token i. ``parents``
    [B, D] makes the draft a tree: the place of each token's parent, -1 for the root. What is
    accepted, and the token after it, go on with the sequences of ``sampler``.
    """
    batch, width = draft.shape
    rejection = mode == "rejection"
    if rejection and parents is not None:
        raise ValueError("verify_draft: mode is 'rejection'; expected 'match' for a tree")
    num_accepted = torch.zeros(batch, dtype=torch.int64)
    tokens, path = torch.full((batch, width + 1), -1), torch.full((batch, width), -1)
    status = torch.zeros(batch, dtype=torch.uint8)
    counts: list[Any] = [width] * batch if num_draft is None else num_draft.tolist()
    for b in range(batch):
        if sampler.rows[b] is None:
            status[b] = STATUS_NO_SEQUENCE
            continue
        drafted = draft[b, : counts[b]].tolist()
        above = list(range(-1, counts[b] - 1)) if parents is None else parents[b].tolist()
        node, bits = -1, 0
        for place in range(counts[b] + 1):
            x = logits[b, node + 1].cpu().to(torch.float32)
            allowed = None if bitmask is None else bitmask[b, node + 1].cpu()
            left = sampler.distribution(b, x, allowed)
            bits |= left.status
            if left.status & STATUS_EMPTY:
                tokens[b, place] = 0
                sampler.accept(b, 0)
                break
            children = [i for i in range(counts[b]) if above[i] == node]
            draft_row = (
                None if draft_logits is None or node + 1 >= width else draft_logits[b, node + 1]
            )
            token, child = _next_token(sampler, b, left, children, drafted, rejection, draft_row)
            tokens[b, place] = token
            sampler.accept_drawn(b, left, left.ids.tolist().index(token))
            if child is None:
                break
            path[b, place] = node = child
            num_accepted[b] += 1
        status[b] = bits
    return VerifyOutput(
        num_accepted.to(sampler.device),
        tokens.to(sampler.device),
        status.to(sampler.device),
        path.to(sampler.device),
    )
