"""What ``BeamSearch`` decided in a step, for a reader: the trace, and its text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lmdecode.beam_state import DECISIONS, BeamStep
from lmdecode.beam_types import BeamCandidates

if TYPE_CHECKING:
    from lmdecode._beam_plan import BeamPass
    from lmdecode._beam_slots import BeamSlots

__all__ = ["BeamTrace", "TracedBeam", "TracedCandidate", "TracedHypothesis", "format_trace"]


class TracedCandidate(NamedTuple):
    """A candidate, and what became of it.

    Attributes
    ----------
    score, log_prob : float
        The sum with the beam's, and of the token alone.
    token, beam : int
        The beam is counted within the group.
    decision : str
        One of ``DECISIONS``: "continued", "closed", "end_token_too_low" (ranked below the beams),
        "not_better" (than the hypotheses), "stopped" (it goes on, far below, for want of others) or
        "unused".
    place : int or None
        The next beam that it became, or its place among the hypotheses.
    """

    score: float
    log_prob: float
    token: int
    beam: int
    decision: str
    place: int | None


class TracedBeam(NamedTuple):
    """A running beam after the step: its score, its parent before it, its new tokens."""

    score: float
    parent: int
    tokens: tuple[int, ...]


class TracedHypothesis(NamedTuple):
    """A finished sequence: its place, its score, its new tokens."""

    place: int
    score: float
    tokens: tuple[int, ...]


class BeamTrace(NamedTuple):
    """One step of one request; of one group of it in a diverse search.

    Attributes
    ----------
    request_id
        As ``insert`` returned it.
    step : int
        From 0.
    group : int
        From 0.
    candidates : tuple of TracedCandidate
        Best first.
    beams : tuple of TracedBeam
        After the step, those of score -inf included.
    hypotheses : tuple of TracedHypothesis
        After the step, in the order of their places.
    done : bool
        Whether the search of this group has ended.
    status : int
        As in ``BeamResult``.
    """

    request_id: Hashable
    step: int
    group: int
    candidates: tuple[TracedCandidate, ...]
    beams: tuple[TracedBeam, ...]
    hypotheses: tuple[TracedHypothesis, ...]
    done: bool
    status: int


def trace_searches(
    store: BeamSlots, layout: BeamPass, candidates: BeamCandidates, step: BeamStep
) -> list[BeamTrace]:
    """Return the traces of a pass, after its step; waits for the device."""
    state = store.state
    columns = zip(
        *(
            part.tolist()
            for part in (*candidates._replace(status=candidates.scores), step.decisions)
        ),
        strict=True,
    )
    parents = (
        step.parents - layout.parent_offsets.repeat_interleave(layout.row_offsets.diff())
    ).tolist()
    starts = layout.row_offsets.tolist()
    traces = []
    for number, (search, (scores, tokens, beams, _, log_probs, decisions)) in enumerate(
        zip(layout.searches, columns, strict=True)
    ):
        request, slot = search.request, search.slots[layout.group]
        prompt, length = len(request.prompt_ids), int(state.lengths[slot])
        traced = [
            TracedCandidate(
                score,
                log_prob,
                token,
                beam,
                DECISIONS[decision & 7],
                decision >> 3 if DECISIONS[decision & 7] in _WITH_PLACE else None,
            )
            for score, log_prob, token, beam, decision in zip(
                scores, log_probs, tokens, beams, decisions, strict=True
            )
            if score > -float("inf")
        ]
        own = parents[starts[number] : starts[number + 1]]
        sequences = state.sequences[slot, : len(own), prompt:length].tolist()
        lengths = state.hypothesis_lengths[slot].tolist()
        traces.append(
            BeamTrace(
                request_id=search.request_id,
                step=search.steps,
                group=layout.group,
                candidates=tuple(traced[: request.num_candidates]),
                beams=tuple(
                    TracedBeam(score, parent, tuple(sequence))
                    for score, parent, sequence in zip(
                        state.scores[slot, : len(own)].tolist(), own, sequences, strict=True
                    )
                ),
                hypotheses=tuple(
                    TracedHypothesis(
                        place,
                        float(state.hypothesis_scores[slot, place]),
                        tuple(
                            state.hypothesis_sequences[
                                slot, place, prompt : lengths[place]
                            ].tolist()
                        ),
                    )
                    for place, order in enumerate(state.hypothesis_numbers[slot].tolist())
                    if order >= 0
                ),
                done=bool(state.done[slot]),
                status=int(state.status[slot]),
            )
        )
    return traces


_WITH_PLACE = ("continued", "closed", "stopped")
