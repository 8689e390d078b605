"""Where ``BeamSearch`` keeps its searches: slots of a state that grows and is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.beam.state import (
    EARLY_STOPPING,
    BeamParameters,
    BeamState,
    beam_parameters,
    new_beam_state,
)

__all__ = ["BeamSlots"]


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
    """The state, parameters and processors of all slots; a slot is one search or one group.

    Attributes
    ----------
    state : BeamState
        See there; with log-probabilities and beam indices.
    parameters : BeamParameters
        See there.
    columns : dict of str to Tensor
        [slots] or [slots, n]: what processors need of each slot, under the names that
        ``log_softmax_top_k`` has for them; -1 where a list of tokens is shorter.
    coverage : Tensor
        [slots, beams, source] float32: how much attention each source position has had.
    """

    def __init__(self, slots: int, num_beams: int, capacity: int, device: torch.device) -> None:
        self.device = device
        self.state: BeamState = new_beam_state(
            slots, num_beams, capacity, keep_log_probs=True, keep_beam_indices=True, device=device
        )
        self.parameters: BeamParameters = beam_parameters(slots, 1, device=device)

        def column(value: float, dtype: torch.dtype, *sizes: int) -> Tensor:
            with torch.inference_mode(False):
                return torch.full((slots, *sizes), value, dtype=dtype, device=device)

        self.columns = {
            "min_lengths": column(0, torch.int64),
            "repetition_penalty": column(1.0, torch.float32),
            "no_repeat_ngram_size": column(0, torch.int64),
            "suppressed_tokens": column(-1, torch.int64, 0),
            "diversity_penalty": column(0.0, torch.float32),
            "forced_bos": column(-1, torch.int64),
            "forced_eos": column(-1, torch.int64),
        }
        self.coverage = column(0.0, torch.float32, num_beams, 0)
        self._free = list(range(slots))[::-1]

    @property
    def num_beams(self) -> int:
        """The widest search that there is room for."""
        return self.state.scores.shape[1]

    def integers(self, values: Sequence[object]) -> Tensor:
        """Return int64 numbers on the device."""
        with torch.inference_mode(False):
            return torch.tensor(values, dtype=torch.int64, device=self.device)

    def acquire(self, request: BeamRequest) -> list[int]:
        """Take a slot for each group of a request, and write it there; if that fails, none."""
        self._make_room(request)
        slots = self._free[: -request.num_beam_groups - 1 : -1]
        for slot in slots:
            self._write(slot, request)
        del self._free[-request.num_beam_groups :]
        return slots

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
        suppressed = max(self.columns["suppressed_tokens"].shape[1], len(request.suppress_tokens))
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
        sizes = {"end_tokens": ends, "suppressed_tokens": suppressed}

        def grown(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: _grown(old, (slots, sizes[name]) if name in sizes else (slots,), -1)
                for name, old in columns.items()
            }

        parameters, columns = grown(self.parameters._asdict()), grown(self.columns)
        coverage = _grown(self.coverage, (slots, beams, self.coverage.shape[2]), 0.0)
        # From here on nothing is allocated on the device, and nothing fails.
        self.state, self.columns, self.coverage = state, columns, coverage
        self.parameters = BeamParameters(**parameters)
        self._free = list(range(have, slots))[::-1] + self._free

    def _write(self, slot: int, request: BeamRequest) -> None:
        """Begin a search: nothing of the slot's last one is left that could be read."""
        state, prompt = self.state, request.prompt_ids
        state.sequences[slot, :, : len(prompt)] = self.integers(prompt)
        state.log_probs[slot, :, : len(prompt)] = 0.0
        state.beam_indices[slot, :, : len(prompt)] = -1
        state.lengths[slot] = len(prompt)
        for part, value in (
            (state.scores, 0.0),
            (state.hypothesis_numbers, -1),
            (state.worst_scores, 1e9),
            (state.done, 0),
            (state.status, 0),
            (self.coverage, 0.0),
        ):
            part[slot] = value
        ends = request.eos_token_id
        values: dict[str, Any] = {
            "num_beams": request.group_size,
            "num_hypotheses": request.num_hypotheses,
            "prompt_lengths": len(prompt),
            "max_lengths": request.max_length,
            "length_penalty": request.length_penalty,
            "early_stopping": EARLY_STOPPING[request.early_stopping],
            "end_tokens": ends,
            "pad_tokens": request.pad_token,
            "min_lengths": len(prompt) + request.min_new_tokens,
            "repetition_penalty": request.repetition_penalty,
            "no_repeat_ngram_size": request.no_repeat_ngram_size,
            "suppressed_tokens": request.suppress_tokens,
            "diversity_penalty": request.diversity_penalty,
            "forced_bos": -1
            if request.forced_bos_token_id is None
            else request.forced_bos_token_id,
            "forced_eos": -1
            if request.forced_eos_token_id is None
            else request.forced_eos_token_id,
        }
        for name, column in {**self.parameters._asdict(), **self.columns}.items():
            value = values[name]
            if isinstance(value, tuple):
                column[slot] = -1
                column[slot, : len(value)] = self.integers(value)
            else:
                column[slot] = value
