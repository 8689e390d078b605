"""Where ``BeamSearch`` keeps its searches: slots of a state that grows and is used again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode._upload import uploaded
from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.state import (
    EARLY_STOPPING,
    BeamParameters,
    BeamState,
    beam_parameters,
    new_beam_state,
)
from lmdecode.beam.types import NO_WORST_SCORE, UNUSED_BEAM_SCORE

__all__ = ["BeamSlots", "begin_search"]


def begin_search(
    state: BeamState, parameters: BeamParameters, slot: int | slice, request: BeamRequest
) -> None:
    """Begin the search of a request, or of one of its groups, in a slot that has room for it.

    A slice begins a search by the same request in each of its slots. Nothing of the slot's last
    search is left that could be read.
    """

    def integers(values: Sequence[int]) -> Tensor:
        return uploaded(values, torch.int64, state.done.device)

    prompt, ends = len(request.prompt_ids), request.eos_token_id
    state.sequences[slot, :, :prompt] = integers(request.prompt_ids)
    state.log_probs[slot, :, :prompt] = 0.0
    state.beam_indices[slot, :, :prompt] = -1
    state.scores[slot] = UNUSED_BEAM_SCORE
    state.scores[slot, 0] = 0.0
    state.hypothesis_numbers[slot] = -1
    for part, value in (
        (state.lengths, prompt),
        (state.worst_scores, NO_WORST_SCORE),
        (state.done, 0),
        (state.status, 0),
        (parameters.num_beams, request.group_size),
        (parameters.num_hypotheses, request.num_hypotheses),
        (parameters.prompt_lengths, prompt),
        (parameters.max_lengths, request.max_length),
        (parameters.length_penalty, request.length_penalty),
        (parameters.early_stopping, EARLY_STOPPING[request.early_stopping]),
        (parameters.end_tokens, -1),
        (parameters.pad_tokens, request.pad_token),
    ):
        part[slot] = value
    parameters.end_tokens[slot, : len(ends)] = integers(ends)


def _grown(old: Tensor, sizes: Sequence[int], fill: float) -> Tensor:
    """Return a tensor of at least these sizes that begins with the old one."""
    if all(size <= have for size, have in zip(sizes, old.shape, strict=True)):
        return old
    # A tensor made under inference_mode could not be written to outside of it.
    with torch.inference_mode(False):
        new = old.new_full([max(pair) for pair in zip(sizes, old.shape, strict=True)], fill)
        new[tuple(slice(size) for size in old.shape)] = old
    return new


def _larger(have: int, need: int) -> int:
    """Return a size that is enough and, where more is needed, at least twice what there was."""
    return have if need <= have else max(need, 2 * have)


class BeamSlots:
    """The state and parameters of all slots; a slot is one search or one group.

    ``coverage`` [slots, beams, source] float32 is the attention that each source position has had,
    and ``nodes`` [slots, beams] int32 the node of the search's trie that each beam is at.
    """

    def __init__(self, slots: int, num_beams: int, capacity: int, device: torch.device) -> None:
        self.device = device
        self.state: BeamState = new_beam_state(
            slots, num_beams, capacity, keep_log_probs=True, keep_beam_indices=True, device=device
        )
        self.parameters: BeamParameters = beam_parameters(slots, 1, device=device)
        with torch.inference_mode(False):
            self.coverage = torch.zeros(slots, num_beams, 0, device=device, dtype=torch.float32)
            self.nodes = torch.zeros(slots, num_beams, dtype=torch.int32, device=device)
        self._free = list(range(slots))[::-1]

    @property
    def num_beams(self) -> int:
        """The widest search that there is room for."""
        return self.state.scores.shape[1]

    def integers(self, values: Sequence[object]) -> Tensor:
        """Return int64 numbers on the device."""
        with torch.inference_mode(False):
            return uploaded(values, torch.int64, self.device)

    def acquire(self, request: BeamRequest) -> list[int]:
        """Take a slot for each group of a request, and write it there; if that fails, none."""
        self._make_room(request)
        slots = self._free[: -request.num_beam_groups - 1 : -1]
        for slot in slots:
            self._write(slot, request)
        del self._free[-request.num_beam_groups :]
        return slots

    def _write(self, slot: int, request: BeamRequest) -> None:
        begin_search(self.state, self.parameters, slot, request)
        self.coverage[slot] = 0.0
        self.nodes[slot] = 0

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        self._free += reversed(slots)

    def cover(self, source_length: int) -> None:
        """Make room for the attention to this many source positions."""
        slots, beams, have = self.coverage.shape
        self.coverage = _grown(self.coverage, (slots, beams, _larger(have, source_length)), 0.0)

    def _make_room(self, request: BeamRequest) -> None:
        """Grow to what a request needs; everything or, if memory is short, nothing."""
        state = self.state
        have, beams, capacity = state.sequences.shape
        slots = _larger(have, have - len(self._free) + request.num_beam_groups)
        beams = _larger(beams, request.group_size)
        capacity = _larger(capacity, request.max_length)
        hypotheses = _larger(state.hypothesis_scores.shape[1], request.num_hypotheses)
        ends = max(self.parameters.end_tokens.shape[1], len(request.eos_token_id))
        if (slots, beams, capacity) != tuple(state.sequences.shape) or (
            hypotheses != state.hypothesis_scores.shape[1]
        ):
            blank = new_beam_state(
                slots, beams, capacity, num_hypotheses=hypotheses,
                keep_log_probs=True, keep_beam_indices=True, device=self.device,
            )  # fmt: skip
            for new, old in zip(blank, state, strict=True):
                new[tuple(slice(size) for size in old.shape)] = old
            state = blank
        parameters = {
            name: _grown(old, (slots, ends) if name == "end_tokens" else (slots,), -1)
            for name, old in self.parameters._asdict().items()
        }
        coverage = _grown(self.coverage, (slots, beams, self.coverage.shape[2]), 0.0)
        nodes = _grown(self.nodes, (slots, beams), 0)
        # From here on nothing is allocated on the device, and nothing fails.
        self.state, self.coverage, self.nodes = state, coverage, nodes
        self.parameters = BeamParameters(**parameters)
        self._free = list(range(have, slots))[::-1] + self._free
