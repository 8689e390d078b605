"""Finished searches as results: cut to their size."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest, BeamResult
from lmdecode.beam.state import BeamFinal

__all__ = ["beam_result", "final_columns"]


def final_columns(lengths: Tensor, shortest: int, longest: int, *, room_for_end: bool) -> int:
    """Return how many columns hold sequences of these lengths; waits for the device.

    transformers' scorer leaves room for an end token that lengths do not count, where the longest
    sequence that there may be has it.
    """
    columns = int(lengths.max()) if lengths.numel() else shortest
    return min(max(columns, shortest) + room_for_end, longest)


def beam_result(
    request: BeamRequest,
    request_id: Hashable,
    final: BeamFinal,
    status: Tensor,
    num_hypotheses: int,
    steps: int,
) -> BeamResult:
    """Return the result of one request; waits for the device.

    Parameters
    ----------
    request, request_id, steps
        The request, as whom it ran, and for how many steps.
    final
        Of this request alone.
    status : Tensor
        [groups] uint8.
    num_hypotheses
        Of the state: what places count by.
    """
    prompt = len(request.prompt_ids)
    found = int((final.places[0] >= 0).sum())
    lengths = final.lengths[0, :found]
    room_for_end = request.rules == "scorer" and bool(request.eos_token_id)
    columns = final_columns(lengths, prompt, request.max_length, room_for_end=room_for_end)
    bits = 0
    for value in status.tolist():
        bits |= value
    return BeamResult(
        request_id=request_id,
        sequences=final.sequences[0, :found, :columns].clone(),
        scores=final.scores[0, :found].clone(),
        lengths=lengths.clone(),
        log_probs=final.log_probs[0, :found, prompt:columns].clone(),
        beam_indices=final.beam_indices[0, :found, prompt:columns].clone(),
        groups=final.places[0, :found] // num_hypotheses,
        prompt_length=prompt,
        num_steps=steps,
        status=bits,
    )
