"""Finished searches as results: cut to their size."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lmdecode._upload import uploaded
from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.state import BeamFinal

__all__ = ["beam_result", "beam_results", "final_columns"]


def _columns(found: int, shortest: int, longest: int, room_for_end: bool) -> int:
    return min(max(found, shortest) + room_for_end, longest)


def final_columns(lengths: Tensor, shortest: int, longest: int, *, room_for_end: bool) -> int:
    """Return how many columns hold sequences of these lengths; waits for the device.

    transformers' scorer leaves room for an end token that lengths do not count, where the longest
    sequence that there may be has it.
    """
    found = int(lengths.max()) if lengths.numel() else shortest
    return _columns(found, shortest, longest, room_for_end)


def beam_results(
    request: BeamRequest,
    request_ids: Sequence[Hashable],
    final: BeamFinal,
    status: Tensor,
    num_hypotheses: int,
    steps: Sequence[int],
) -> list[BeamResult]:
    """Return the results of searches by equal requests; waits for the device.

    ``request_ids``, ``steps`` and the rows of ``final`` and ``status`` ([searches, groups] uint8)
    are those of the searches. ``num_hypotheses`` is the state's, by which ``final.places`` count.
    """
    prompt = len(request.prompt_ids)
    room_for_end = request.dialect == "scorer" and bool(request.eos_token_id)
    parts = (
        final.sequences,
        final.scores,
        final.lengths,
        final.log_probs,
        final.beam_indices,
    )
    results = []
    # Copies: a result that is kept, or pickled, has no memory of the others.
    for request_id, took, places, counts, bits, *tensors in zip(
        request_ids,
        steps,
        final.places.tolist(),
        final.lengths.tolist(),
        status.tolist(),
        *(part.unbind() for part in parts),
        strict=True,
    ):
        found = sum(place >= 0 for place in places)
        columns = _columns(
            max(counts[:found], default=prompt), prompt, request.max_length, room_for_end
        )
        new = columns - prompt
        if found < len(places):
            tensors = [tensor[:found] for tensor in tensors]
        sequences, scores, lengths, log_probs, indices = tensors
        groups = [place // num_hypotheses for place in places[:found]]
        results.append(
            BeamResult(
                request_id=request_id,
                sequences=sequences.narrow(1, 0, columns).clone(),
                scores=scores.clone(),
                lengths=lengths.clone(),
                log_probs=log_probs.narrow(1, prompt, new).clone(),
                beam_indices=indices.narrow(1, prompt, new).clone(),
                groups=uploaded(groups, torch.int64, scores.device),
                prompt_length=prompt,
                num_steps=took,
                status=functools.reduce(operator.or_, bits, 0),
            )
        )
    return results


def beam_result(
    request: BeamRequest,
    request_id: Hashable,
    final: BeamFinal,
    status: Tensor,
    num_hypotheses: int,
    steps: int,
) -> BeamResult:
    """Return the result of one search; see ``beam_results``. Status is [groups]."""
    (result,) = beam_results(request, [request_id], final, status[None], num_hypotheses, [steps])
    return result
