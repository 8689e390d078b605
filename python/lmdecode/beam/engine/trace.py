"""Human-readable trace of the decisions of ``BeamSearch`` in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lmdecode.beam.state import DECISIONS
from lmdecode.beam.types import BeamCandidates

if TYPE_CHECKING:
    from torch import Tensor

    from lmdecode.beam.engine.slots import BeamSlots
    from lmdecode.beam.engine.step import BeamPlan, PlannedSearch, StepChoice

__all__ = ["BeamTrace", "TracedBeam", "TracedCandidate", "TracedHypothesis", "format_trace"]


class TracedCandidate(NamedTuple):
    """A candidate and its fate.

    ``score`` includes the beam's, and ``beam`` counts within the group. ``decision`` is one of
    ``DECISIONS``: "continued", "closed", "end_token_too_low" (ranked below the beams), "not_better"
    (than the hypotheses), "stopped" (it continues, far below, for want of others) or "unused".
    ``place`` is the next beam that it became, or its place among the hypotheses.
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
        After the step, beams of score -inf included.
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


def trace_searches(store: BeamSlots, plan: BeamPlan, choice: StepChoice) -> list[BeamTrace]:
    """Return the traces of a step, before its searches count it; waits."""
    return [
        _trace(store, entry, choice.parents, _candidates(candidates, decisions, entry))
        for entry, (candidates, decisions) in zip(plan.entries, choice.traced, strict=True)
    ]


def _candidates(
    candidates: BeamCandidates, decisions: Tensor, entry: PlannedSearch
) -> tuple[TracedCandidate, ...]:
    """Return one search's candidates: as many as it would have alone, in any batch."""
    count = entry.search.request.num_candidates
    columns = (candidates.scores, candidates.log_probs, candidates.tokens, candidates.beams)
    traced = []
    for score, log_prob, token, beam, decision in zip(
        *(column[:count].tolist() for column in (*columns, decisions)), strict=True
    ):
        if score == -math.inf:
            break
        name = DECISIONS[decision & 7]
        place = decision >> 3 if name in ("continued", "closed", "stopped") else None
        traced.append(TracedCandidate(score, log_prob, token, beam, name, place))
    return tuple(traced)


def _trace(
    store: BeamSlots,
    entry: PlannedSearch,
    all_parents: Tensor,
    candidates: tuple[TracedCandidate, ...],
) -> BeamTrace:
    state, search, slot = store.state, entry.search, entry.slot
    parents = (all_parents[entry.next_row :][: entry.size] - entry.first_row).tolist()
    prompt = len(search.request.prompt_ids)
    length = int(state.lengths[slot])
    sequences = state.sequences[slot, : len(parents), prompt:length].tolist()
    scores = state.scores[slot, : len(parents)].tolist()
    ended = state.hypothesis_sequences[slot, :, prompt:].tolist()
    lengths = state.hypothesis_lengths[slot].tolist()
    ended_scores = state.hypothesis_scores[slot].tolist()
    taken = [n >= 0 for n in state.hypothesis_numbers[slot].tolist()]
    return BeamTrace(
        request_id=search.request_id,
        step=search.steps,
        group=entry.group,
        candidates=candidates,
        beams=tuple(
            TracedBeam(score, parent, tuple(tokens))
            for score, parent, tokens in zip(scores, parents, sequences, strict=True)
        ),
        hypotheses=tuple(
            TracedHypothesis(
                place, ended_scores[place], tuple(ended[place][: lengths[place] - prompt])
            )
            for place, is_taken in enumerate(taken)
            if is_taken
        ),
        done=bool(state.done[slot]),
        status=int(state.status[slot]),
    )


def format_trace(trace: BeamTrace, decode: Callable[[list[int]], str] | None = None) -> str:
    """Write a step as a table: the candidates with what became of each, beams and hypotheses.

    Parameters
    ----------
    trace
        Of one step.
    decode
        Of tokens to text, a tokenizer's ``decode`` for one; the numbers by default.

    Returns
    -------
    str
        Lines without a newline at the end.
    """

    def text(tokens: Sequence[int]) -> str:
        numbers = " ".join(map(str, tokens))
        return numbers if decode is None else repr(decode(list(tokens)))

    ends = {0: "goes on", 1: "done"}[trace.done] + (
        f", status {trace.status}" if trace.status else ""
    )
    lines = [f"request {trace.request_id}, step {trace.step}, group {trace.group}: {ends}"]
    lines.append("  rank  beam    token     log-prob        score  decision")
    for rank, item in enumerate(trace.candidates):
        decision = item.decision.replace("_", " ")
        if item.place is not None:
            to = "place" if item.decision == "closed" else "beam"
            decision += f", {to} {item.place}"
        shown = "" if decode is None else "  " + text([item.token])
        lines.append(
            f"  {rank:4d}  {item.beam:4d}  {item.token:7d}  {item.log_prob:11.6f}  "
            f"{item.score:11.6f}  {decision}{shown}"
        )
    for number, beam in enumerate(trace.beams):
        lines.append(
            f"  beam  {number:4d}  {beam.score:11.6f}  from {beam.parent}: {text(beam.tokens)}"
        )
    for ended in trace.hypotheses:
        lines.append(f"  ended {ended.place:4d}  {ended.score:11.6f}: {text(ended.tokens)}")
    return "\n".join(lines)
