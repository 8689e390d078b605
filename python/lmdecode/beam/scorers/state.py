"""The tensors behind ``BeamSearchScorer``, and the ``BeamHypotheses`` that read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.scorers.hypotheses import BeamHypotheses, Hypothesis
from lmdecode.beam.state import BeamState, new_beam_state

__all__ = ["HypothesesView", "Searches"]


class Searches:
    """The state of the searches, which grows with the sequences."""

    def __init__(self, slots: int, num_beams: int, device: torch.device | str) -> None:
        self.state = new_beam_state(slots, num_beams, 0, device=device)
        # Of the hypotheses by slot and place, as the caller gave them: Python objects.
        self.beam_indices: dict[tuple[int, int], Any] = {}

    def keep_beam_indices(self, slot: int, place: int, indices: Any) -> None:
        """Note the beam indices of a new hypothesis; None: it has none."""
        if indices is None:
            self.beam_indices.pop((slot, place), None)
        else:
            self.beam_indices[slot, place] = indices

    def with_capacity(self, length: int) -> BeamState:
        """Return the state with room for sequences of this length."""
        old = self.state.hypothesis_sequences
        slots, num_beams, capacity = old.shape
        if length > capacity:
            # Tensors made under inference_mode could not be written to outside of it.
            with torch.inference_mode(False):
                new = old.new_zeros((slots, num_beams, max(length, 2 * capacity)))
                new[:, :, :capacity] = old
                sequences = torch.zeros_like(new)
            self.state = self.state._replace(sequences=sequences, hypothesis_sequences=new)
        return self.state

    def check_lengths(self, hypotheses: Sequence[BeamHypotheses], prompt_length: int) -> None:
        """Refuse a ``max_length`` within the prompt where it had to be looked at."""
        first = hypotheses[0]
        if (
            not isinstance(first.early_stopping, bool)
            and first.length_penalty > 0
            and (first.max_length or 0) <= prompt_length
            and (self.state.hypothesis_numbers >= 0).all(1).any()
        ):
            raise ValueError(
                f"max_length is {first.max_length} and decoder_prompt_len {prompt_length}; "
                "expected a max_length beyond the prompt"
            )


class HypothesesView(BeamHypotheses):
    """The hypotheses of one search in the state: read from it and written to it."""

    def __init__(
        self,
        searches: Searches,
        slot: int,
        length_penalty: float,
        early_stopping: bool | str,
        max_length: int | None,
    ) -> None:
        self._searches = searches
        self._slot = slot
        num_beams = searches.state.hypothesis_numbers.shape[1]
        super().__init__(num_beams, length_penalty, early_stopping, max_length)

    def _clear(self) -> None:
        """Leave the state as it is: it begins without hypotheses."""

    def _places(self) -> list[int]:
        """Return the taken places, the earliest hypothesis first."""
        numbers = self._searches.state.hypothesis_numbers[self._slot].tolist()
        taken = [place for place, number in enumerate(numbers) if number >= 0]
        return sorted(taken, key=numbers.__getitem__)

    def __len__(self) -> int:
        return len(self._places())

    @property
    def beams(self) -> list[Hypothesis]:  # type: ignore[override]
        """Score, tokens and beam indices of each hypothesis, in the order they came; a copy."""
        state, slot = self._searches.state, self._slot
        scores = state.hypothesis_scores[slot].tolist()
        lengths = state.hypothesis_lengths[slot].tolist()
        return [
            (
                scores[place],
                state.hypothesis_sequences[slot, place, : lengths[place]].clone(),
                self._searches.beam_indices.get((slot, place)),
            )
            for place in self._places()
        ]

    @property
    def worst_score(self) -> float:  # type: ignore[override]
        """The lowest score; 1e9 while there are none."""
        return self._searches.state.worst_scores[self._slot].item()

    def _store(self, score: float, hyp: Tensor, beam_indices: Any) -> None:
        state = self._searches.with_capacity(len(hyp))
        slot, places = self._slot, self._places()
        scores = state.hypothesis_scores[slot].tolist()
        number = int(state.hypothesis_numbers[slot].max()) + 1
        if len(places) < self.num_beams:
            place = min(set(range(self.num_beams)) - set(places))
        else:
            place = min(places, key=scores.__getitem__)
            places.remove(place)
        state.worst_scores[slot] = min([score, *(scores[other] for other in places)])
        state.hypothesis_scores[slot, place] = score
        state.hypothesis_numbers[slot, place] = number
        state.hypothesis_lengths[slot, place] = len(hyp)
        state.hypothesis_sequences[slot, place, : len(hyp)] = hyp
        self._searches.keep_beam_indices(slot, place, beam_indices)
