"""The state of beam searches, in tensors: what beam_step and beam_finalize read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import MAX_INT, check_int, is_int
from lmdecode._upload import uploaded
from lmdecode.beam.types import NO_WORST_SCORE

__all__ = [
    "DECISIONS",
    "EARLY_STOPPING",
    "SEARCH_DIALECTS",
    "BeamFinal",
    "BeamParameters",
    "BeamState",
    "BeamStep",
    "beam_parameters",
    "new_beam_state",
]

SearchDialect = Literal["generate", "scorer", "fairseq"]
EarlyStopping = bool | Literal["never"]

SEARCH_DIALECTS: dict[str, int] = {"generate": 0, "scorer": 1, "fairseq": 2}
EARLY_STOPPING: dict[EarlyStopping, int] = {False: 0, True: 1, "never": 2}
# The low three bits of BeamStep.decisions; the rest is the index that comes with it.
DECISIONS = ("unused", "continued", "closed", "end_token_too_low", "not_better", "stopped")


class BeamParameters(NamedTuple):
    """How each slot is searched; tensors on the device of the state.

    Attributes
    ----------
    num_beams : Tensor
        [slots] int64, 1 to the ``beams`` of the state.
    num_hypotheses : Tensor
        [slots] int64, 1 to the ``hypotheses`` of the state: how many finished sequences are kept.
        ``num_beams`` in transformers; ``round(num_beams * patience)`` in CTranslate2.
    prompt_lengths : Tensor
        [slots] int64: tokens that do not count for the length penalty.
    max_lengths : Tensor
        [slots] int64, prompt included; 0: none.
    length_penalty : Tensor
        [slots] float64: a hypothesis scores ``sum of log-probs / length ** length_penalty``.
    early_stopping : Tensor
        [slots] int64, a value of ``EARLY_STOPPING``.
    end_tokens : Tensor
        [slots, E] int64, -1 where there are fewer; E >= 0.
    pad_tokens : Tensor
        [slots] int64: the token that a finished search emits, and that pads results.
    """

    num_beams: Tensor
    num_hypotheses: Tensor
    prompt_lengths: Tensor
    max_lengths: Tensor
    length_penalty: Tensor
    early_stopping: Tensor
    end_tokens: Tensor
    pad_tokens: Tensor


class BeamState(NamedTuple):
    """The searches; a slot is one search, or one group of a diverse search.

    ``capacity`` is the longest sequence. A part that is not wanted has capacity 0: ``log_probs``,
    ``beam_indices`` and their hypotheses.

    Attributes
    ----------
    sequences : Tensor
        [slots, beams, capacity] int64: the running beams' tokens, prompt first.
    log_probs : Tensor
        [slots, beams, capacity or 0] float32: the log-probability of each token, 0 in the prompt.
    beam_indices : Tensor
        [slots, beams, capacity or 0] int32: the beam which the token at this place was added to,
        counted within the slot; -1 in the prompt.
    scores : Tensor
        [slots, beams] float32: the running beams' sums of log-probabilities.
    lengths : Tensor
        [slots] int64: tokens in each of the slot's running sequences.
    hypothesis_sequences, hypothesis_log_probs, hypothesis_beam_indices : Tensor
        [slots, hypotheses, capacity (or 0)]: the same of finished sequences.
    hypothesis_lengths : Tensor
        [slots, hypotheses] int64.
    hypothesis_scores : Tensor
        [slots, hypotheses] float64.
    hypothesis_numbers : Tensor
        [slots, hypotheses] int64: in what order they came, from 0; -1: a free place.
    worst_scores : Tensor
        [slots] float64: the lowest score of a finished sequence; 1e9 before the first.
    done : Tensor
        [slots] uint8: 1 where the search has ended.
    status : Tensor
        [slots] uint8: 0, or why the search ended early: the bits of ``log_softmax_top_k``; 8: fewer
        candidates went on than there are beams; 16: its sequences were full (CUDA alone).
    """

    sequences: Tensor
    log_probs: Tensor
    beam_indices: Tensor
    scores: Tensor
    lengths: Tensor
    hypothesis_sequences: Tensor
    hypothesis_log_probs: Tensor
    hypothesis_beam_indices: Tensor
    hypothesis_lengths: Tensor
    hypothesis_scores: Tensor
    hypothesis_numbers: Tensor
    worst_scores: Tensor
    done: Tensor
    status: Tensor


class BeamStep(NamedTuple):
    """Result of one ``beam_step``.

    Attributes
    ----------
    scores : Tensor
        [rows] float32: the next beams' scores; the rows of a request are neighbours.
    tokens : Tensor
        [rows] int64: the tokens that they end in.
    parents : Tensor
        [rows] int64: the row of the step's logits that each beam continues.
    decisions : Tensor
        [requests, K] int32: the outcome of each candidate, ``DECISIONS[value & 7]``. ``value >> 3``
        is the next beam (continued) or the index among the hypotheses (closed).
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    decisions: Tensor


class BeamFinal(NamedTuple):
    """The best finished sequences of each request, best first.

    Attributes
    ----------
    sequences : Tensor
        [requests, n, capacity] int64, pad tokens after the end.
    lengths : Tensor
        [requests, n] int64.
    scores : Tensor
        [requests, n] float64.
    log_probs : Tensor
        [requests, n, capacity or 0] float32, 0 after the end and in the prompt.
    beam_indices : Tensor
        [requests, n, capacity or 0] int32, -1 after the end and in the prompt.
    places : Tensor
        [requests, n] int64: ``group * hypotheses + place`` in the state; -1 where there is none,
        whose sequence is all padding, length 0 and score -1e9.
    """

    sequences: Tensor
    lengths: Tensor
    scores: Tensor
    log_probs: Tensor
    beam_indices: Tensor
    places: Tensor


def _for_each_slot(op: str, name: str, value: Any, slots: int) -> list[Any]:
    """Return a sequence as a list, of one entry for each slot."""
    try:
        values = list(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{op}: {name} is of type {kind}; expected one value or {slots}") from None
    if len(values) != slots:
        raise ValueError(
            f"{op}: {name} has {len(values)} entries; expected one for each slot: {slots}"
        )
    return values


def new_beam_state(
    slots: int,
    num_beams: int,
    capacity: int,
    *,
    num_hypotheses: int | None = None,
    keep_log_probs: bool = False,
    keep_beam_indices: bool = False,
    device: torch.device | str = "cpu",
) -> BeamState:
    """Return the state of ``slots`` searches that have not begun.

    Parameters
    ----------
    slots, num_beams, capacity
        Sizes; ``num_beams`` is the widest search, ``capacity`` the longest sequence.
        ``capacity`` may be 0, for a state that gets its sequences later.
    num_hypotheses
        Finished sequences that can be kept; ``num_beams`` by default.
    keep_log_probs, keep_beam_indices
        Whether each token's log-probability, and the beam that it was added to, are kept.
    device
        Of every tensor.

    Returns
    -------
    BeamState
        Lengths and scores 0.

    Raises
    ------
    ValueError, TypeError
        A size is no int, or below 1, ``slots`` and ``capacity`` below 0.
    """
    op = "new_beam_state"
    slots, capacity = check_int(op, "slots", slots, 0), check_int(op, "capacity", capacity, 0)
    num_beams = check_int(op, "num_beams", num_beams, 1)
    if num_hypotheses is None:
        num_hypotheses = num_beams
    num_hypotheses = check_int(op, "num_hypotheses", num_hypotheses, 1)

    def full(shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        # A tensor made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.full(tuple(shape), value, dtype=dtype, device=device)

    log_prob_capacity = capacity if keep_log_probs else 0
    index_capacity = capacity if keep_beam_indices else 0
    return BeamState(
        sequences=full((slots, num_beams, capacity), 0, torch.int64),
        log_probs=full((slots, num_beams, log_prob_capacity), 0.0, torch.float32),
        beam_indices=full((slots, num_beams, index_capacity), -1, torch.int32),
        scores=full((slots, num_beams), 0.0, torch.float32),
        lengths=full((slots,), 0, torch.int64),
        hypothesis_sequences=full((slots, num_hypotheses, capacity), 0, torch.int64),
        hypothesis_log_probs=full((slots, num_hypotheses, log_prob_capacity), 0.0, torch.float32),
        hypothesis_beam_indices=full((slots, num_hypotheses, index_capacity), -1, torch.int32),
        hypothesis_lengths=full((slots, num_hypotheses), 0, torch.int64),
        hypothesis_scores=full((slots, num_hypotheses), 0.0, torch.float64),
        hypothesis_numbers=full((slots, num_hypotheses), -1, torch.int64),
        worst_scores=full((slots,), NO_WORST_SCORE, torch.float64),
        done=full((slots,), 0, torch.uint8),
        status=full((slots,), 0, torch.uint8),
    )


def beam_parameters(
    slots: int,
    num_beams: int | Sequence[int],
    *,
    num_hypotheses: int | Sequence[int] | None = None,
    prompt_lengths: int | Sequence[int] = 0,
    max_lengths: int | Sequence[int] = 0,
    length_penalty: float | Sequence[float] = 1.0,
    early_stopping: EarlyStopping | Sequence[EarlyStopping] = False,
    end_tokens: int | Sequence[int] | Sequence[Sequence[int]] = (),
    pad_tokens: int | Sequence[int] = 0,
    device: torch.device | str = "cpu",
) -> BeamParameters:
    """Return the parameters of ``slots`` searches: one value for all, or one for each.

    ``end_tokens`` are one token or those of all slots, or one sequence for each. See
    ``BeamParameters``.

    Raises
    ------
    ValueError, TypeError
        Names the argument: ``slots`` below 0, ``num_beams`` or ``num_hypotheses`` below 1, lengths
        below 0, an ``early_stopping`` that is not one of ``EARLY_STOPPING``, a sequence that has
        not one entry for each slot, or entries that are no numbers.
    """
    op = "beam_parameters"
    slots = check_int(op, "slots", slots, 0)

    def integers(name: str, value: Any, at_least: int = ~MAX_INT) -> list[int]:
        if is_int(value):
            return [check_int(op, name, value, at_least)] * slots
        return [
            check_int(op, name, entry, at_least) for entry in _for_each_slot(op, name, value, slots)
        ]

    def tensor(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        # A tensor made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            return uploaded(values, dtype, device)

    def mode(value: Any) -> int:
        if not isinstance(value, (bool, str)) or value not in EARLY_STOPPING:
            raise ValueError(f'{op}: early_stopping is {value!r}; expected True, False or "never"')
        return EARLY_STOPPING[value]

    def number(value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise TypeError(f"{op}: length_penalty is of type {kind}; expected a number") from None

    if isinstance(early_stopping, (bool, str)):
        early_stopping = [early_stopping] * slots
    modes = _for_each_slot(op, "early_stopping", early_stopping, slots)
    penalties: Any = length_penalty
    if isinstance(penalties, (int, float)):
        penalties = [penalties] * slots
    penalties = _for_each_slot(op, "length_penalty", penalties, slots)
    ends: Any = [end_tokens] if is_int(end_tokens) else end_tokens
    if not hasattr(ends, "__iter__") or isinstance(ends, str):
        kind = type(ends).__name__
        raise TypeError(f"{op}: end_tokens is of type {kind}; expected token ids")
    if all(is_int(token) for token in ends):
        ends = [ends] * slots
    lists = []
    for tokens in _for_each_slot(op, "end_tokens", ends, slots):
        if not hasattr(tokens, "__iter__") or isinstance(tokens, str):
            kind = type(tokens).__name__
            raise TypeError(f"{op}: end_tokens has an entry of type {kind}; expected token ids")
        lists.append([check_int(op, "an entry of end_tokens", token) for token in tokens])
    longest = max(map(len, lists), default=0)
    padded = [tokens + [-1] * (longest - len(tokens)) for tokens in lists]
    beams = integers("num_beams", num_beams, 1)
    return BeamParameters(
        num_beams=tensor(beams),
        num_hypotheses=tensor(
            beams if num_hypotheses is None else integers("num_hypotheses", num_hypotheses, 1)
        ),
        prompt_lengths=tensor(integers("prompt_lengths", prompt_lengths, 0)),
        max_lengths=tensor(integers("max_lengths", max_lengths, 0)),
        length_penalty=tensor([number(value) for value in penalties], torch.float64),
        early_stopping=tensor([mode(value) for value in modes]),
        end_tokens=tensor(padded).reshape(slots, longest),
        pad_tokens=tensor(integers("pad_tokens", pad_tokens)),
    )
