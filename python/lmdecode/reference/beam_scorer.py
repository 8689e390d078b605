"""``BeamSearchScorer`` of transformers 4.38.2 in plain Python, a candidate at a time.

``lmdecode.BeamSearchScorer`` calls ``beam_step`` and ``beam_finalize`` (dialect "scorer"). Here
``BeamHypotheses`` objects do the same.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

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


class BeamSearchScorer(BeamScorer):
    """The state and the rules of beam searches; see ``lmdecode.BeamSearchScorer``."""

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
        searches = batch_size * num_beam_groups
        self._beam_hyps = [
            BeamHypotheses(self.group_size, length_penalty, do_early_stopping, max_length)
            for _ in range(searches)
        ]
        self._done = torch.zeros(searches, dtype=torch.bool, device=device)

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
        """Turn the candidates of each search into its next beams."""
        batch_size = len(self._beam_hyps) // self.num_beam_groups
        check_rows("input_ids", input_ids, batch_size, self.group_size)
        check_candidates(next_scores, next_tokens, next_indices, batch_size)
        end_tokens = end_token_list(eos_token_id)
        length = input_ids.shape[1] + 1
        beam_scores = next_scores.new_zeros((batch_size, self.group_size))
        beam_tokens = next_tokens.new_zeros((batch_size, self.group_size))
        beam_rows = next_indices.new_zeros((batch_size, self.group_size))
        for request in range(batch_size):
            slot = request * self.num_beam_groups + group_index
            hypotheses = self._beam_hyps[slot]
            if self._done[slot]:
                check_padding(eos_token_id, pad_token_id)
                beam_tokens[request] = pad_token_id or 0
                continue
            closing, going = split_candidates(
                next_tokens[request].tolist(), end_tokens, self.group_size
            )
            rows = next_indices[request] + request * self.group_size
            for rank in closing:
                row = int(rows[rank])
                hypotheses.add(
                    input_ids[row].clone(),
                    float(next_scores[request, rank]),
                    None if beam_indices is None else (*beam_indices[row], row),
                    length - decoder_prompt_len,
                )
            beam_scores[request] = next_scores[request, going]
            beam_tokens[request] = next_tokens[request, going]
            beam_rows[request] = rows[going]
            self._done[slot] = hypotheses.is_done(
                float(next_scores[request].max()), length, decoder_prompt_len
            )
        return UserDict(
            {
                "next_beam_scores": beam_scores.view(-1),
                "next_beam_tokens": beam_tokens.view(-1),
                "next_beam_indices": beam_rows.view(-1),
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
        """Add the open beams to the hypotheses and return the best."""
        for name, tensor in (("input_ids", input_ids), ("final_beam_scores", final_beam_scores)):
            check_rows(name, tensor, len(self._beam_hyps), self.group_size)
        for slot, hypotheses in enumerate(self._beam_hyps):
            if self._done[slot]:
                continue
            for row in range(slot * self.group_size, (slot + 1) * self.group_size):
                hypotheses.add(
                    input_ids[row],
                    float(final_beam_scores[row]),
                    None if beam_indices is None else beam_indices[row],
                    input_ids.shape[1] - decoder_prompt_len,
                )
        best = []
        for first in range(0, len(self._beam_hyps), self.num_beam_groups):
            groups = self._beam_hyps[first : first + self.num_beam_groups]
            together = [hypothesis for group in groups for hypothesis in group.beams]
            best += best_hypotheses(together, self.num_beam_hyps_to_keep)
        return assemble_result(
            best, input_ids, max_length, pad_token_id, end_token_list(eos_token_id), self.device
        )
