"""``beam_step`` and ``beam_finalize`` in plain torch and Python numbers, a request at a time.

Three sets of rules, which differ in when a search is done, in how scores are rounded and in what
happens at the maximum length:

"generate"
    ``GenerationMixin._beam_search`` of transformers 4.50 and later. Scores of hypotheses are f32
    quotients. A hypothesis holds its end token. Reaching ``max_lengths`` finishes a candidate, like
    an end token. A search that is done goes on in lockstep, but closes nothing any more.
"scorer"
    ``BeamSearchScorer`` of transformers up to 4.49. Scores are f64 quotients. A hypothesis does not
    hold its end token. A search that is done emits pad tokens. ``max_lengths`` only serves
    ``early_stopping="never"``; ``beam_finalize`` adds the open beams of searches that are not done.
    Candidates and beams of score -inf are like any others.
"fairseq"
    Its ``SequenceGenerator``: as "generate", in f32, but a hypothesis, once in, is never evicted,
    and the search is done when the places are taken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmdecode.beam.state import (
    DECISIONS,
    EARLY_STOPPING,
    SEARCH_DIALECTS,
    BeamFinal,
    BeamParameters,
    BeamState,
    BeamStep,
    SearchDialect,
)
from lmdecode.beam.types import STATUS_CONTINUATIONS, UNUSED_BEAM_SCORE

_INF = math.inf


def _f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def _power(length: float, penalty: float) -> float:
    """``length ** penalty`` as C's pow has it: inf where Python has an error."""
    try:
        return math.pow(length, penalty)
    except (OverflowError, ValueError):  # too large; 0 to a negative power
        return _INF


def _quotient(score: float, divisor: float) -> float:
    """``score / divisor`` by IEEE rules."""
    return (torch.tensor(score, dtype=torch.float64) / divisor).item()


class _Slot:
    """One slot of the state, with the rules of its search."""

    def __init__(
        self, state: BeamState, parameters: BeamParameters, slot: int, dialect: int
    ) -> None:
        self.state, self.slot, self.dialect = state, slot, dialect
        self.num_beams = int(parameters.num_beams[slot])
        self.num_hypotheses = int(parameters.num_hypotheses[slot])
        self.prompt_length = int(parameters.prompt_lengths[slot])
        self.max_length = int(parameters.max_lengths[slot])
        self.length_penalty = float(parameters.length_penalty[slot])
        self.early_stopping = int(parameters.early_stopping[slot])
        self.end_tokens = [t for t in parameters.end_tokens[slot].tolist() if t >= 0]
        self.pad_token = int(parameters.pad_tokens[slot])

    @property
    def in_f32(self) -> bool:
        return self.dialect != SEARCH_DIALECTS["scorer"]

    def takes_part(self, score: float) -> bool:
        """Tell whether this is the score of a candidate or a beam at all."""
        return score > -_INF or (self.dialect == SEARCH_DIALECTS["scorer"] and score == -_INF)

    def normalised(self, score: float, length: float, bonus: float = 0.0) -> float:
        """Return the score of a hypothesis with `length` generated tokens."""
        divisor = _power(length, self.length_penalty)
        if not self.in_f32:
            return _quotient(score, divisor) + bonus
        return _f32(_f32(_quotient(score, _f32(divisor))) + bonus)

    # ---- hypotheses

    def places(self) -> list[int]:
        """Taken places, the earliest hypothesis first."""
        numbers = self.state.hypothesis_numbers[self.slot].tolist()
        taken = [p for p in range(self.num_hypotheses) if numbers[p] >= 0]
        return sorted(taken, key=lambda place: numbers[place])

    def score_at(self, place: int) -> float:
        return float(self.state.hypothesis_scores[self.slot, place])

    def add(self, score: float) -> int | None:
        """Take a place for a hypothesis of this score; None where it is not good enough."""
        state, slot = self.state, self.slot
        places = self.places()
        worst = float(state.worst_scores[slot])
        if math.isnan(score):
            return None
        score += 0.0  # no -0.0: which of two zeros is the lower one is not to matter
        if len(places) < self.num_hypotheses:
            if self.dialect == SEARCH_DIALECTS["generate"] and not score > UNUSED_BEAM_SCORE:
                return None
            place = min(set(range(self.num_hypotheses)) - set(places))
            state.worst_scores[slot] = min(score, worst)
        else:
            if self.dialect == SEARCH_DIALECTS["fairseq"] or not score > worst:
                return None
            # The lowest score goes: the earliest of equal ones ("scorer"), or the latest.
            order = places if self.dialect == SEARCH_DIALECTS["scorer"] else places[::-1]
            place = min(order, key=self.score_at)
            others = [self.score_at(p) for p in places if p != place]
            state.worst_scores[slot] = min([*others, score])
        last = max((int(state.hypothesis_numbers[slot, p]) for p in places), default=-1)
        state.hypothesis_numbers[slot, place] = last + 1
        state.hypothesis_scores[slot, place] = score
        return place

    def fill(self, place: int, tokens: Tensor, beam: int) -> None:
        """Store the tokens, with the log-probabilities and indices of running beam `beam`."""
        state, slot, length = self.state, self.slot, len(tokens)
        state.hypothesis_lengths[slot, place] = length
        state.hypothesis_sequences[slot, place, :length] = tokens
        for running, finished, nothing in (
            (state.log_probs, state.hypothesis_log_probs, 0.0),
            (state.beam_indices, state.hypothesis_beam_indices, -1),
        ):
            if running.shape[2]:
                finished[slot, place, :length] = running[slot, beam, :length]
                finished[slot, place, length:] = nothing

    # ---- the end of the search

    def is_done(self, best: float, length: float) -> bool:
        """Tell whether no running beam can better the hypotheses.

        best: the best candidate's score ("scorer") or the first running beam's; length: generated
        tokens, the coming one included.
        """
        full = len(self.places()) == self.num_hypotheses
        if self.dialect == SEARCH_DIALECTS["fairseq"]:
            return full
        if self.early_stopping == EARLY_STOPPING[True] and full:
            return True
        if self.early_stopping == EARLY_STOPPING["never"] and self.length_penalty > 0:
            length = max(self.max_length - self.prompt_length, 0) if self.max_length > 0 else _INF
        worst = float(self.state.worst_scores[self.slot])
        if self.dialect == SEARCH_DIALECTS["scorer"]:
            return full and worst >= self.normalised(best, length)
        return not self.normalised(best, length) > (worst if full else UNUSED_BEAM_SCORE)


def _advance(slot: _Slot, tokens: list[int], beams: list[int], log_probs: list[float]) -> None:
    """Make the next beams the running ones of the state."""
    state, at = slot.state, slot.slot
    length, width = int(state.lengths[at]), len(tokens)
    for part in (state.sequences, state.log_probs, state.beam_indices):
        if part.shape[2]:
            part[at, :width, :length] = part[at, beams, :length].clone()
    state.sequences[at, :width, length] = torch.tensor(tokens)
    if state.log_probs.shape[2]:
        state.log_probs[at, :width, length] = torch.tensor(log_probs)
    if state.beam_indices.shape[2]:
        state.beam_indices[at, :width, length] = torch.tensor(beams, dtype=torch.int32)
    state.lengths[at] = length + 1


def _step_request(
    slot: _Slot,
    candidates: list[tuple[int, float, int, int, float, bool]],
    num_candidates: int,
    sequences: Tensor,
    length: int,
    bonus: list[float],
) -> tuple[list[tuple[float, int, int, float]], list[int]]:
    """Decide about one request that has not failed.

    candidates: (rank, score, token, beam, log-prob, stopped), those that are some; sequences:
    [beams, >= length]. Returns the next beams as (score, token, beam, log-prob) and the decisions.
    """
    dialect, state, at = slot.dialect, slot.state, slot.slot
    was_done = bool(state.done[at])
    generated = length + 1 - slot.prompt_length
    at_end = dialect != SEARCH_DIALECTS["scorer"] and 0 < slot.max_length <= length + 1
    code = {name: number for number, name in enumerate(DECISIONS)}
    decisions = [code["unused"]] * num_candidates
    going: list[tuple[float, int, int, float]] = []
    stopped: list[tuple[int, float, int, int, float]] = []
    for rank, score, token, beam, log_prob, is_stopped in candidates:
        ends = token in slot.end_tokens or is_stopped or at_end
        if not ends:
            if len(going) < slot.num_beams:
                decisions[rank] = code["continued"] | len(going) << 3
                going.append((score, token, beam, log_prob))
        elif rank >= slot.num_beams:
            decisions[rank] = code["end_token_too_low"]
            stopped.append((rank, score, token, beam, log_prob))
        else:
            stopped.append((rank, score, token, beam, log_prob))
            final = slot.normalised(score, generated, bonus[beam])
            place = None if was_done else slot.add(final)
            if place is None:
                decisions[rank] = code["not_better"]
                continue
            decisions[rank] = code["closed"] | place << 3
            slot.fill(place, sequences[beam, :length], beam)
            _close(slot, place, token, beam, log_prob)
        if len(going) == slot.num_beams:
            break
    if dialect == SEARCH_DIALECTS["scorer"]:
        if len(going) < slot.num_beams:
            state.status[at] |= STATUS_CONTINUATIONS
            state.done[at] = 1
            return [], decisions
        best = max(score for _, score, *_ in candidates)
    else:
        # Where too few go on, those that have stopped do, far below.
        for rank, score, token, beam, log_prob in stopped[: slot.num_beams - len(going)]:
            if decisions[rank] in (code["end_token_too_low"], code["not_better"]):
                decisions[rank] = code["stopped"] | len(going) << 3
            going.append((_f32(score + UNUSED_BEAM_SCORE), token, beam, log_prob))
        while len(going) < slot.num_beams:
            going.append((-_INF, slot.pad_token, len(going), 0.0))
        best = going[0][0]
    if at_end or slot.is_done(best, generated):
        state.done[at] = 1
    return going, decisions


def _close(slot: _Slot, place: int, token: int, beam: int, log_prob: float) -> None:
    """Append the end token to the hypothesis; "scorer" leaves it to beam_finalize."""
    state, at = slot.state, slot.slot
    length = int(state.hypothesis_lengths[at, place])
    if slot.dialect != SEARCH_DIALECTS["scorer"]:
        state.hypothesis_sequences[at, place, length] = token
        state.hypothesis_lengths[at, place] = length + 1
    # These two are of the end token in any case.
    if state.log_probs.shape[2] > length:
        state.hypothesis_log_probs[at, place, length] = log_prob
    if state.beam_indices.shape[2] > length:
        state.hypothesis_beam_indices[at, place, length] = beam


def beam_step(
    state: BeamState,
    parameters: BeamParameters,
    scores: Tensor,
    tokens: Tensor,
    beams: Tensor,
    *,
    log_probs: Tensor | None = None,
    status: Tensor | None = None,
    slots: Tensor | None = None,
    row_offsets: Tensor | None = None,
    parent_offsets: Tensor | None = None,
    sequences: Tensor | None = None,
    stopped: Tensor | None = None,
    bonus: Tensor | None = None,
    rows: int | None = None,
    dialect: SearchDialect = "generate",
) -> BeamStep:
    """Turn each request's candidates into its next beams; see ``lmdecode.beam_step``."""
    requests, num_candidates = scores.shape
    which = list(range(requests)) if slots is None else slots.tolist()
    width = state.scores.shape[1]
    first = (
        [r * width for r in range(requests + 1)] if row_offsets is None else row_offsets.tolist()
    )
    parent_first = first if parent_offsets is None else parent_offsets.tolist()
    rows = first[-1] if rows is None else rows
    step = BeamStep(
        torch.full((rows,), -_INF),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros((requests, num_candidates), dtype=torch.int32),
    )
    for r, at in enumerate(which):
        slot = _Slot(state, parameters, at, SEARCH_DIALECTS[dialect])
        failed = 0 if status is None else int(status[r])
        if failed and not state.done[at]:
            state.status[at] |= failed
            state.done[at] = 1
        was_done = bool(state.done[at])
        length = int(state.lengths[at]) if sequences is None else sequences.shape[2]
        going: list[tuple[float, int, int, float]] = []
        lockstep = dialect != "scorer" and not failed and not int(state.status[at])
        if lockstep or not was_done:
            columns = (
                scores[r].tolist(),
                tokens[r].tolist(),
                beams[r].tolist(),
                [0.0] * num_candidates if log_probs is None else log_probs[r].tolist(),
                [False] * num_candidates if stopped is None else stopped[r].bool().tolist(),
            )
            candidates = [
                (rank, *candidate)
                for rank, candidate in enumerate(zip(*columns, strict=True))
                if slot.takes_part(candidate[0])
            ]
            going, decisions = _step_request(
                slot,
                candidates,
                num_candidates,
                state.sequences[at] if sequences is None else sequences[r],
                length,
                [0.0] * width if bonus is None else bonus[r].tolist(),
            )
            step.decisions[r] = torch.tensor(decisions, dtype=torch.int32)

        def own(beam: int, r: int = r) -> int:
            """Return the request's row of this beam, or its last one where it has fewer."""
            if r + 1 < len(parent_first):
                beam = min(beam, max(parent_first[r + 1] - parent_first[r] - 1, 0))
            return parent_first[r] + beam

        if going:
            parents = [parent_first[r] + beam for _, _, beam, _ in going]
        else:  # ended before, or just now by a failure
            going = [(0.0, slot.pad_token, beam, 0.0) for beam in range(slot.num_beams)]
            parents = [0 if dialect == "scorer" else own(beam) for beam in range(slot.num_beams)]
        # What the request does not use of its rows is the beam of no search.
        unused = range(slot.num_beams, first[r + 1] - first[r])
        here = slice(first[r], first[r + 1])
        step.scores[here] = torch.tensor([g[0] for g in going] + [-_INF for _ in unused])
        step.tokens[here] = torch.tensor([g[1] for g in going] + [slot.pad_token for _ in unused])
        step.parents[here] = torch.tensor(parents + [own(beam) for beam in unused])
        if sequences is None:
            state.scores[at, : slot.num_beams] = torch.tensor([g[0] for g in going])
            # A search that was done stays where its sequences are full.
            if not was_done or length < state.sequences.shape[2]:
                _advance(slot, [g[1] for g in going], [g[2] for g in going], [g[3] for g in going])
    return step


def _open_beams(slot: _Slot, sequences: Tensor, length: int, scores: Tensor) -> None:
    """Add the running beams of a search that is not done to its hypotheses."""
    for beam in range(slot.num_beams):
        score = float(scores[beam])
        if not slot.takes_part(score):
            continue
        place = slot.add(slot.normalised(score, length - slot.prompt_length))
        if place is not None:
            slot.fill(place, sequences[beam, :length], beam)


def beam_finalize(
    state: BeamState,
    parameters: BeamParameters,
    num_return_sequences: int,
    *,
    num_groups: int = 1,
    slots: Tensor | None = None,
    sequences: Tensor | None = None,
    scores: Tensor | None = None,
    add_open: bool | None = None,
    dialect: SearchDialect = "generate",
) -> BeamFinal:
    """Return each request's best hypotheses; see ``lmdecode.beam_finalize``."""
    which = list(range(len(state.lengths))) if slots is None else slots.tolist()
    if add_open is None:
        add_open = dialect == "scorer"
    requests, count = len(which) // num_groups, num_return_sequences
    num_hypotheses, capacity = state.hypothesis_sequences.shape[1:]
    final = BeamFinal(
        torch.zeros((requests, count, capacity), dtype=torch.int64),
        torch.zeros((requests, count), dtype=torch.int64),
        torch.full((requests, count), UNUSED_BEAM_SCORE, dtype=torch.float64),
        torch.zeros((requests, count, state.hypothesis_log_probs.shape[2])),
        torch.full(
            (requests, count, state.hypothesis_beam_indices.shape[2]), -1, dtype=torch.int32
        ),
        torch.full((requests, count), -1, dtype=torch.int64),
    )
    for r in range(requests):
        group = [
            _Slot(state, parameters, at, SEARCH_DIALECTS[dialect])
            for at in which[r * num_groups : (r + 1) * num_groups]
        ]
        final.sequences[r] = group[0].pad_token
        ranked: list[tuple[float, int, _Slot, int]] = []
        for number, slot in enumerate(group):
            if add_open and not state.done[slot.slot]:
                row = r * num_groups + number
                _open_beams(
                    slot,
                    state.sequences[slot.slot] if sequences is None else sequences[row],
                    int(state.lengths[slot.slot]) if sequences is None else sequences.shape[2],
                    state.scores[slot.slot] if scores is None else scores[row],
                )
            ranked += [(slot.score_at(place), number, slot, place) for place in slot.places()]
        # The latest of equal scores is the first ("scorer" pops from the end).
        if dialect == "scorer":
            ranked.reverse()
        ranked.sort(key=lambda entry: entry[0], reverse=True)
        for i, (score, number, slot, place) in enumerate(ranked[:count]):
            at, length = slot.slot, int(state.hypothesis_lengths[slot.slot, place])
            final.scores[r, i] = score
            final.lengths[r, i] = length
            final.places[r, i] = number * num_hypotheses + place
            final.sequences[r, i, :length] = state.hypothesis_sequences[at, place, :length]
            if dialect == "scorer" and slot.end_tokens and length < capacity:
                final.sequences[r, i, length] = slot.end_tokens[0]
            final.log_probs[r, i] = state.hypothesis_log_probs[at, place]
            final.beam_indices[r, i] = state.hypothesis_beam_indices[at, place]
    return final
