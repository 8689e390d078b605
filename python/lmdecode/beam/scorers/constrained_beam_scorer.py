"""``ConstrainedBeamSearchScorer``: beam search whose results contain given phrases."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.scorers.constraint_progress import ConstraintProgress, constraint_progress
from lmdecode.beam.scorers.constraints import Constraint, ConstraintListState
from lmdecode.beam.scorers.hypotheses import BeamHypotheses
from lmdecode.beam.scorers.rules import (
    BeamScorer,
    assemble_result,
    best_hypotheses,
    check_candidates,
    check_padding,
    check_rows,
    end_token_list,
    split_candidates,
)

__all__ = ["ConstrainedBeamSearchScorer"]


class ConstrainedBeamSearchScorer(BeamScorer):
    """Beam search that is pushed to fulfil constraints, with the results of transformers 4.38.2.

    In each step, tokens that make progress with the constraints join the candidates, and beams are
    taken in turn from those that have come equally far. A hypothesis is finished only when all
    constraints are fulfilled. Where candidates have equal scores, the first stays first;
    transformers leaves their order to an unstable sort.

    Parameters
    ----------
    batch_size : int
        Searches, at least 1.
    num_beams : int
        Beams of a search, at least 2.
    constraints : list of Constraint
        At least one. Phrasal and disjunctive ones are followed a token at a time; others, and
        subclasses of these, are run over each whole sequence.
    device : torch.device
        Of the results.
    length_penalty, do_early_stopping, num_beam_hyps_to_keep, max_length
        As in ``BeamSearchScorer``.
    num_beam_groups : int
        As in ``BeamSearchScorer``, though transformers uses it for nothing but the row count that
        ``process`` expects: 1 is what works.
    keep_all_beam_indices : bool
        Keep the beam indices of hypotheses that fulfil too little as well; transformers drops them.

    Raises
    ------
    ValueError
        Names the argument, what came and what was expected.
    """

    def __init__(
        self,
        batch_size: int,
        num_beams: int,
        constraints: list[Constraint],
        device: torch.device | str,
        length_penalty: float = 1.0,
        do_early_stopping: bool | str = False,
        num_beam_hyps_to_keep: int = 1,
        num_beam_groups: int = 1,
        max_length: int | None = None,
        *,
        keep_all_beam_indices: bool = False,
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
        if not constraints:
            raise ValueError(
                "ConstrainedBeamSearchScorer: constraints is empty; expected at least one"
            )
        self.constraints = constraints
        self._beam_hyps = [
            BeamHypotheses(num_beams, length_penalty, do_early_stopping, max_length)
            for _ in range(batch_size)
        ]
        self.keep_all_beam_indices = keep_all_beam_indices
        self._done = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self._followed: list[Constraint] = []
        self._progress: ConstraintProgress | None = None

    def make_constraint_states(self, n: int) -> list[ConstraintListState]:
        """Return ``n`` states of the constraints, at their beginning."""
        return [ConstraintListState([c.copy() for c in self.constraints]) for _ in range(n)]

    def check_completes_constraints(self, sequence: Sequence[int]) -> bool:
        """Tell whether a sequence of tokens fulfils all constraints."""
        return self._constraint_progress().position(tuple(sequence)).completed

    def _constraint_progress(self) -> ConstraintProgress:
        """Return the progress of ``self.constraints``; a new one if these were replaced."""
        if self._progress is None or [*map(id, self._followed)] != [*map(id, self.constraints)]:
            if not self.constraints:
                raise ValueError("constraints is empty; expected at least one")
            self._followed = list(self.constraints)
            self._progress = constraint_progress(self._followed)
        return self._progress

    def process(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_scores: Tensor,
        next_tokens: Tensor,
        next_indices: Tensor,
        scores_for_all_vocab: Tensor,
        pad_token_id: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        beam_indices: Sequence[Any] | None = None,
        decoder_prompt_len: int = 0,
    ) -> UserDict[str, Tensor]:
        """Turn the candidates of each search into its next beams.

        Parameters
        ----------
        input_ids : Tensor
            [batch * num_beams, length] int64, the running beams.
        next_scores, next_tokens, next_indices : Tensor
            [batch, K] float, int64, int64: the candidates, best first; indices are beams of the
            search.
        scores_for_all_vocab : Tensor
            [batch * num_beams, vocab] float: the score of every token after every beam.
        pad_token_id : int, optional
            What a search that is done emits; needed then.
        eos_token_id : int or list of int, optional
            The end tokens; needed when a search is done.
        beam_indices : sequence, optional
            A tuple of beam indices for each row.
        decoder_prompt_len : int
            Tokens that do not count for the length penalty.

        Returns
        -------
        UserDict
            ``next_beam_scores``, ``next_beam_tokens`` and ``next_beam_indices`` (rows of
            ``input_ids``), each [batch * num_beams].

        Raises
        ------
        ValueError
            Also if fewer than ``num_beams`` candidates of a search are not end tokens. Nothing has
            been changed then.
        """
        batch_size = len(self._beam_hyps)
        check_rows("input_ids", input_ids, batch_size, self.group_size)
        check_candidates(next_scores, next_tokens, next_indices, batch_size)
        check_rows("scores_for_all_vocab", scores_for_all_vocab, batch_size, self.group_size)
        end_tokens = end_token_list(eos_token_id)
        done = self._done.tolist()
        if any(done):
            check_padding(eos_token_id, pad_token_id)
        decisions = [
            ([], []) if ended else split_candidates(tokens, end_tokens, self.group_size)
            for ended, tokens in zip(done, next_tokens.tolist(), strict=True)
        ]
        rows = [tuple(row) for row in input_ids.tolist()]
        length = input_ids.shape[1] + 1
        scores, best_scores = next_scores.tolist(), next_scores.amax(1).tolist()
        beam_scores = next_scores.new_zeros((batch_size, self.group_size))
        beam_tokens = next_tokens.new_zeros((batch_size, self.group_size))
        beam_rows = next_indices.new_zeros((batch_size, self.group_size))
        for request, (closing, going) in enumerate(decisions):
            if done[request]:
                beam_tokens[request] = pad_token_id or 0
                continue
            hypotheses = self._beam_hyps[request]
            candidate_rows = next_indices[request] + request * self.group_size
            for rank in closing:
                row = int(candidate_rows[rank])
                if self._constraint_progress().position(rows[row]).completed:
                    hypotheses.add(
                        input_ids[row].clone(),
                        scores[request][rank],
                        None if beam_indices is None else (*beam_indices[row], row),
                        length - decoder_prompt_len,
                    )
            beam_scores[request], beam_tokens[request], beam_rows[request] = self._choose_beams(
                request,
                rows,
                scores_for_all_vocab,
                next_scores[request, going],
                next_tokens[request, going],
                candidate_rows[going],
            )
            done[request] = hypotheses.is_done(best_scores[request], length, decoder_prompt_len)
        self._done.copy_(torch.tensor(done, device="cpu"))
        return UserDict(
            {
                "next_beam_scores": beam_scores.view(-1),
                "next_beam_tokens": beam_tokens.view(-1),
                "next_beam_indices": beam_rows.view(-1),
            }
        )

    def step_sentence_constraint(
        self,
        batch_idx: int,
        input_ids: Tensor,
        vocab_scores: Tensor,
        sent_beam_scores: Tensor,
        sent_beam_tokens: Tensor,
        sent_beam_indices: Tensor,
        push_progress: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the next beams of one search, with regard to the constraints.

        Parameters
        ----------
        batch_idx : int
            The search.
        input_ids : Tensor
            [rows, length] int64, the running beams of all searches.
        vocab_scores : Tensor
            [rows, vocab] float.
        sent_beam_scores, sent_beam_tokens, sent_beam_indices : Tensor
            [num_beams]: the beams that would come next without constraints; indices are rows.
        push_progress : bool
            Whether beams with nothing left to fulfil stay among the candidates, with their best
            token. ``process`` does not ask for it. As in transformers, they have bank 0, and their
            index is the beam of the search, not the row.

        Returns
        -------
        tuple of Tensor
            Scores, tokens and rows of the next beams, [num_beams] each.
        """
        rows = [tuple(row) for row in input_ids.tolist()]
        return self._choose_beams(
            batch_idx,
            rows,
            vocab_scores,
            sent_beam_scores,
            sent_beam_tokens,
            sent_beam_indices,
            push_progress,
        )

    def _choose_beams(
        self,
        request: int,
        rows: list[tuple[int, ...]],
        vocab_scores: Tensor,
        scores: Tensor,
        tokens: Tensor,
        indices: Tensor,
        push_progress: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        progress = self._constraint_progress()
        size = len(indices)
        own_rows = range(request * size, (request + 1) * size)
        # Two candidates are the same if their tokens and the sequences before them are.
        seen = set()
        banks = []
        for row, token in zip(indices.tolist(), tokens.tolist(), strict=True):
            seen.add((rows[row], token))
            banks.append(progress.position(rows[row]).bank_after(token))
        new_rows, new_tokens, new_indices = [], [], []

        def propose(row: int, token: int, bank: int, index: int) -> None:
            if (rows[row], token) not in seen:
                seen.add((rows[row], token))
                new_rows.append(row)
                new_tokens.append(token)
                new_indices.append(index)
                banks.append(bank)

        for beam, row in enumerate(own_rows):
            position = progress.position(rows[row])
            if not position.completed:
                for token, bank in position.proposals():
                    propose(row, token, bank, row)
            elif push_progress:
                propose(row, int(vocab_scores[row].max(0).indices), 0, beam)
        if not new_rows:
            return scores, tokens, indices

        device = indices.device
        scores = torch.cat((scores, vocab_scores[new_rows, new_tokens]))
        tokens = torch.cat((tokens, torch.tensor(new_tokens, device=device)))
        indices = torch.cat((indices, torch.tensor(new_indices, device=device)))
        order = _bank_order(banks, scores)[:size]
        return scores[order], tokens[order], indices[order]

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

        Of a search that is not done, the open beams that fulfil the constraints become hypotheses
        first; where these are fewer than ``num_beam_hyps_to_keep``, the others too, without beam
        indices.

        Parameters
        ----------
        input_ids, final_beam_scores : Tensor
            [batch * num_beams, length] int64 and [batch * num_beams] float: the open beams.
        final_beam_tokens, final_beam_indices : Tensor
            Not used.
        max_length : int, optional
            The longest sequence to return.
        pad_token_id, eos_token_id, beam_indices, decoder_prompt_len
            As in ``process``.

        Returns
        -------
        UserDict
            As in ``BeamSearchScorer.finalize``.
        """
        for name, tensor in (("input_ids", input_ids), ("final_beam_scores", final_beam_scores)):
            check_rows(name, tensor, len(self._beam_hyps), self.num_beams)
        rows = [tuple(row) for row in input_ids.tolist()]
        scores = final_beam_scores.tolist()
        generated_len = input_ids.shape[-1] - decoder_prompt_len
        progress = self._constraint_progress()
        for request, hypotheses in enumerate(self._beam_hyps):
            if self._done[request]:
                continue
            own_rows = range(request * self.num_beams, (request + 1) * self.num_beams)
            fulfilled = [row for row in own_rows if progress.position(rows[row]).completed]
            for row in fulfilled:
                indices = None if beam_indices is None else beam_indices[row]
                hypotheses.add(input_ids[row], scores[row], indices, generated_len)
            if len(fulfilled) < self.num_beam_hyps_to_keep:
                for row in own_rows:
                    if row not in fulfilled:
                        indices = None
                        if self.keep_all_beam_indices and beam_indices is not None:
                            indices = beam_indices[row]
                        hypotheses.add(input_ids[row], scores[row], indices, generated_len)
        best = []
        for hypotheses in self._beam_hyps:
            best += best_hypotheses(hypotheses.beams, self.num_beam_hyps_to_keep)
        return assemble_result(
            best, input_ids, max_length, pad_token_id, end_token_list(eos_token_id), self.device
        )


def _bank_order(banks: list[int], scores: Tensor) -> list[int]:
    """Return the order in which candidates are taken: the best of each bank, then the second, ...

    Within one round the highest bank is first.
    """
    rank = torch.tensor(banks, device=scores.device) * 100 + scores
    ranked = rank.sort(descending=True, stable=True).indices.tolist()
    rounds = []
    bank, number = None, 0
    for candidate in ranked:
        number = number + 1 if banks[candidate] == bank else 0
        bank = banks[candidate]
        rounds.append(number)
    places = sorted(range(len(ranked)), key=rounds.__getitem__)
    return [ranked[place] for place in places]
