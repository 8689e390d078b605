"""``BeamSearchScorer``: transformers' class on ``beam_step`` and ``beam_finalize``."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.ops import beam_finalize, beam_step
from lmdecode.beam.scorers.hypotheses import BeamHypotheses, Hypothesis
from lmdecode.beam.scorers.rules import (
    BeamScorer,
    beam_index_rows,
    check_candidates,
    check_padding,
    check_rows,
    end_token_list,
    result_width,
)
from lmdecode.beam.state import (
    DECISIONS,
    BeamParameters,
    BeamState,
    beam_parameters,
    new_beam_state,
)

__all__ = ["BeamSearchScorer"]

_CLOSED = DECISIONS.index("closed")


class Searches:
    """The state of the searches, which grows with the sequences."""

    def __init__(self, slots: int, num_beams: int, device: torch.device | str) -> None:
        self.state = new_beam_state(slots, num_beams, 0, device=device)
        # By slot and place of the hypotheses; Python objects, as the caller gave them.
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


class BeamSearchScorer(BeamScorer):
    """The state of beam searches and the rules of their steps, as transformers 4.38.2 has them.

    A caller with logits takes the best ``max(2, 1 + number of end tokens) * num_beams`` candidates
    of each search (``log_softmax_top_k``), gives them to ``process``, appends the tokens that come
    back to the rows that come back, and ends with ``finalize``. The state lies in tensors, changed
    by one op a step. Candidates' scores are taken as float32.

    Parameters
    ----------
    batch_size : int
        Searches, at least 1.
    num_beams : int
        Beams of a search, at least 2.
    device : torch.device
        Of the state and of everything that is passed in.
    length_penalty : float
        A hypothesis scores ``sum of log-probabilities / length ** length_penalty``.
    do_early_stopping : bool or str
        When a search is done, see ``BeamHypotheses``.
    num_beam_hyps_to_keep : int
        Hypotheses of a search that ``finalize`` returns; may be changed before it is called.
    num_beam_groups : int
        Groups that the beams of a search are divided into, evenly; each is a search of its own
        until ``finalize``.
    max_length : int, optional
        The longest sequence, prompt included; needed where ``do_early_stopping`` is not a bool.

    Raises
    ------
    ValueError
        Names the argument, what came and what was expected.
    """

    def __init__(
        self,
        batch_size: int,
        num_beams: int,
        device: torch.device | str,
        length_penalty: float = 1.0,
        do_early_stopping: bool | str = False,
        num_beam_hyps_to_keep: int = 1,
        num_beam_groups: int = 1,
        max_length: int | None = None,
    ) -> None:
        super().__init__(
            batch_size,
            num_beams,
            device,
            length_penalty,
            do_early_stopping,
            num_beam_hyps_to_keep,
            num_beam_groups,
        )
        self._batch_size = batch_size
        self._searches = Searches(batch_size * num_beam_groups, self.group_size, device)
        self._beam_hyps = [
            HypothesesView(
                self._searches, slot, length_penalty, do_early_stopping, max_length
            )
            for slot in range(batch_size * num_beam_groups)
        ]  # fmt: skip
        first = torch.arange(batch_size, device=device) * num_beam_groups
        self._slots_of_group = [first + group for group in range(num_beam_groups)]
        self._parameters: dict[Any, BeamParameters] = {}

    @property
    def _done(self) -> Tensor:  # type: ignore[override]
        """[batch * groups] bool: which searches have ended, a request's groups side by side."""
        return self._searches.state.done.view(torch.bool)

    def process(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_scores: Tensor,
        next_tokens: Tensor,
        next_indices: Tensor,
        pad_token_id: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        beam_indices: Sequence[Any] | None = None,
        group_index: int = 0,
        decoder_prompt_len: int = 0,
    ) -> UserDict[str, Tensor]:
        """Turn the candidates of each search into its next beams.

        Parameters
        ----------
        input_ids : Tensor
            [batch * group_size, length] int64: the running beams, of one group.
        next_scores, next_tokens, next_indices : Tensor
            [batch, K] float, int64, int64: the candidates, best first. Indices are beams of the
            search, counted within the group.
        pad_token_id : int, optional
            What a search that is done emits; needed then.
        eos_token_id : int or list of int, optional
            The end tokens; needed when a search is done.
        beam_indices : sequence, optional
            For each row, a tuple of the beams that its tokens came from: stored with hypotheses,
            with the row that they end.
        group_index : int
            The group.
        decoder_prompt_len : int
            Tokens that do not count for the length penalty.

        Returns
        -------
        UserDict
            ``next_beam_scores``, ``next_beam_tokens`` and ``next_beam_indices`` (rows of
            ``input_ids``), each [batch * group_size]. Those of a search that is done are 0, the pad
            token and 0.

        Raises
        ------
        ValueError
            Names the argument, what came and what was expected. Where fewer than ``group_size``
            candidates of a search are not end tokens, the scorer is of no further use.
        """
        batch, width = self._batch_size, self.group_size
        check_rows("input_ids", input_ids, batch, width)
        check_candidates(next_scores, next_tokens, next_indices, batch)
        if not 0 <= group_index < self.num_beam_groups:
            raise ValueError(
                f"group_index is {group_index}; expected 0 to {self.num_beam_groups - 1}"
            )
        slots = self._slots_of_group[group_index]
        if (eos_token_id is None or pad_token_id is None) and self._done[slots].any():
            check_padding(eos_token_id, pad_token_id)
        length = input_ids.shape[1]
        end_tokens = end_token_list(eos_token_id)
        state = self._searches.with_capacity(length)
        step = beam_step(
            state,
            self._parameters_for(end_tokens, pad_token_id, decoder_prompt_len),
            next_scores.float(),
            next_tokens.long(),
            next_indices.long(),
            slots=slots if self.num_beam_groups > 1 else None,
            sequences=input_ids.long().reshape(batch, width, length),
            dialect="scorer",
        )
        if state.status.any():
            raise ValueError(
                f"next_tokens is {next_tokens.tolist()} with end tokens {end_tokens}; expected at "
                f"least {width} other tokens for each search, the beams that go on"
            )
        self._searches.check_lengths(self._beam_hyps, decoder_prompt_len)
        if beam_indices is not None or self._searches.beam_indices:
            self._note_beam_indices(step.decisions, next_indices, group_index, beam_indices)
        return UserDict(
            {
                "next_beam_scores": step.scores.to(next_scores.dtype),
                "next_beam_tokens": step.tokens.to(next_tokens.dtype),
                "next_beam_indices": step.parents.to(next_indices.dtype),
            }
        )

    def finalize(  # type: ignore[override]
        self,
        input_ids: Tensor,
        final_beam_scores: Tensor,
        final_beam_tokens: Tensor,
        final_beam_indices: Tensor,
        max_length: int | None,
        pad_token_id: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        beam_indices: Sequence[Any] | None = None,
        decoder_prompt_len: int = 0,
    ) -> UserDict[str, Tensor | None]:
        """Return the best hypotheses of each search.

        The open beams of a search that is not done become hypotheses first: they stay that, and are
        offered again by another call.

        Parameters
        ----------
        input_ids : Tensor
            [batch * num_beams, length] int64: the running beams, the groups of a search side by
            side.
        final_beam_scores : Tensor
            [batch * num_beams] float: their scores.
        final_beam_tokens, final_beam_indices : Tensor
            Not used.
        max_length : int, optional
            The longest sequence to return.
        pad_token_id : int, optional
            What follows the end; needed where results differ in length.
        eos_token_id : int or list of int, optional
            The first is appended where there is room; needed there.
        beam_indices : sequence, optional
            For each row, a tuple of the beams that its tokens came from.
        decoder_prompt_len : int
            Tokens that do not count for the length penalty.

        Returns
        -------
        UserDict
            ``sequences`` [batch * num_beam_hyps_to_keep, longest] int64; ``sequence_scores``
            float32; ``beam_indices`` like ``sequences``, -1 behind the end, or None where the first
            hypothesis has none.

        Raises
        ------
        ValueError
            Names the argument, what came and what was expected.
        """
        searches, keep = len(self._beam_hyps), self.num_beam_hyps_to_keep
        for name, tensor in (("input_ids", input_ids), ("final_beam_scores", final_beam_scores)):
            check_rows(name, tensor, searches, self.group_size)
        if not isinstance(keep, int) or not 1 <= keep <= self.num_beams:
            raise ValueError(
                f"num_beam_hyps_to_keep is {keep!r}; expected an int from 1 to {self.num_beams}"
            )
        length = input_ids.shape[1]
        generated = length - decoder_prompt_len
        if generated < 1 and self._beam_hyps[0].length_penalty and not self.is_done:
            raise ValueError(
                f"decoder_prompt_len is {decoder_prompt_len}; expected less than {length}, the "
                "length of input_ids"
            )
        end_tokens = end_token_list(eos_token_id)
        state = self._searches.with_capacity(length + 1)
        known = beam_indices is not None or bool(self._searches.beam_indices)
        if known:
            self._add_open_beams(input_ids, final_beam_scores, beam_indices, generated)
        final = beam_finalize(
            state,
            self._parameters_for(end_tokens, pad_token_id, decoder_prompt_len),
            keep,
            num_groups=self.num_beam_groups,
            sequences=input_ids.long().reshape(searches, self.group_size, length),
            scores=final_beam_scores.float().reshape(searches, self.group_size),
            add_open=not known,
            dialect="scorer",
        )
        lengths = final.lengths.reshape(-1)
        shortest, longest = torch.stack((lengths.min(), lengths.max())).tolist()
        width = result_width(shortest, longest, max_length, pad_token_id, end_tokens)
        sequences = final.sequences[:, :, :width].reshape(-1, width).to(input_ids.dtype)
        if end_tokens and end_tokens[0] < 0:  # which the op takes for none
            at_end = torch.arange(width, device=lengths.device) == lengths.unsqueeze(1)
            sequences[at_end] = end_tokens[0]
        indices = None
        if known:
            places = final.places.reshape(-1).tolist()
            indices = beam_index_rows(
                [self._indices_at(row // keep, place) for row, place in enumerate(places)],
                sequences,
            )
        return UserDict(
            {
                "sequences": sequences,
                "sequence_scores": final.scores.reshape(-1).float(),
                "beam_indices": indices,
            }
        )

    def _parameters_for(
        self, end_tokens: list[int], pad_token_id: int | None, prompt_length: int
    ) -> BeamParameters:
        key = (tuple(end_tokens), pad_token_id, prompt_length)
        if key not in self._parameters:
            hypotheses = self._beam_hyps[0]
            stopping = hypotheses.early_stopping
            self._parameters[key] = beam_parameters(
                len(self._beam_hyps),
                self.group_size,
                prompt_lengths=prompt_length,
                max_lengths=hypotheses.max_length or 0,
                length_penalty=hypotheses.length_penalty,
                early_stopping=stopping if isinstance(stopping, bool) else "never",
                end_tokens=[token for token in end_tokens if token >= 0],
                pad_tokens=0 if pad_token_id is None else pad_token_id,
                device=self.device,
            )
        return self._parameters[key]

    def _note_beam_indices(
        self,
        decisions: Tensor,
        next_indices: Tensor,
        group_index: int,
        beam_indices: Sequence[Any] | None,
    ) -> None:
        """Keep the beam indices of the hypotheses that a step has closed."""
        beams = next_indices.tolist()
        for request, row_decisions in enumerate(decisions.tolist()):
            slot = request * self.num_beam_groups + group_index
            for rank, decision in enumerate(row_decisions):
                if decision & 7 != _CLOSED:
                    continue
                row = request * self.group_size + beams[request][rank]
                indices = None if beam_indices is None else (*beam_indices[row], row)
                self._searches.keep_beam_indices(slot, decision >> 3, indices)

    def _add_open_beams(
        self,
        input_ids: Tensor,
        scores: Tensor,
        beam_indices: Sequence[Any] | None,
        generated: int,
    ) -> None:
        values, done = scores.tolist(), self._done.tolist()
        for slot, hypotheses in enumerate(self._beam_hyps):
            if done[slot]:
                continue
            for row in range(slot * self.group_size, (slot + 1) * self.group_size):
                indices = None if beam_indices is None else beam_indices[row]
                hypotheses.add(input_ids[row], values[row], indices, generated)

    def _indices_at(self, request: int, place: int) -> Any:
        """Return the beam indices of a hypothesis; `place` as in ``BeamFinal.places``."""
        group, place = divmod(place, self.group_size)
        return self._searches.beam_indices.get((request * self.num_beam_groups + group, place))
