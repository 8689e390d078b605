"""Constrained beam search by the rules of transformers 4.38."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmdecode.beam.scorers.constrained_beam_scorer import ConstrainedBeamSearchScorer
from lmdecode.beam.scorers.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
from lmdecode.beam.types import UNUSED_BEAM_SCORE
from lmdecode.integrations.transformers._recorder import SearchResult
from lmdecode.integrations.transformers.beam.candidates import top_k_candidates
from lmdecode.integrations.transformers.beam.search import NextBeams, SearchBase
from lmdecode.integrations.transformers.beam.settings import (
    SearchSettings,
    raise_for_prompts,
)

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, StoppingCriteriaList

    from lmdecode.integrations.transformers._recorder import Recorder


def as_constraints(constraints: object) -> list[Constraint]:
    """Return a list of constraints; raise TypeError if they are not a list or tuple."""
    if not isinstance(constraints, (list, tuple)) or not all(
        isinstance(constraint, Constraint) for constraint in constraints
    ):
        raise TypeError(
            "constraints: expected a list of PhrasalConstraint, DisjunctiveConstraint or other "
            f"lmdecode.Constraint, got {constraints!r}"
        )
    return list(constraints)


def check_tokens(constraints: Sequence[Constraint], vocab_size: int) -> None:
    """Raise ValueError if a phrase has a token that the model's vocabulary does not have."""
    for constraint in constraints:
        phrases = getattr(constraint, "token_ids", [])
        for token in _flat(phrases):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    "constraints, force_words_ids: expected token ids of the vocabulary, 0 to "
                    f"{vocab_size - 1}, got {token}"
                )


def _flat(phrases: Any) -> list[int]:
    if isinstance(phrases, (list, tuple)):
        return [token for phrase in phrases for token in _flat(phrase)]
    return [phrases] if isinstance(phrases, int) else []


def _is_words(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and token >= 0 for token in value)
    )


def constraints_of(force_words_ids: Sequence[Any]) -> list[Constraint]:
    """Return a constraint for each entry: a list of tokens, or of such lists to choose from.

    Raises ValueError for any other entry.
    """
    constraints: list[Constraint] = []
    for words in force_words_ids if isinstance(force_words_ids, list) else ():
        if _is_words(words):
            constraints.append(PhrasalConstraint(words))
        elif isinstance(words, list) and words and all(map(_is_words, words)):
            constraints.append(DisjunctiveConstraint(words))
        else:
            break
    else:
        if constraints:
            return constraints
    raise ValueError(
        "force_words_ids: expected a list whose entries are lists of token ids, or lists of such "
        f"lists, none of them empty and no id below 0, got {force_words_ids!r}"
    )


class ConstrainedSearch(SearchBase):
    """One search for each prompt, all in step; results contain the given constraints.

    Takes at least one constraint; other arguments as ``SearchBase``.
    """

    def __init__(
        self,
        settings: SearchSettings,
        constraints: list[Constraint],
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        recorder: Recorder,
    ) -> None:
        super().__init__(settings, input_ids, processors, criteria, recorder)
        self.num_candidates = settings.candidates_per_beam * settings.num_beams
        device = input_ids.device
        self.beam_scores = torch.zeros(
            (settings.batch, settings.num_beams), device=device, dtype=torch.float32
        )
        self.beam_scores[:, 1:] = UNUSED_BEAM_SCORE
        self.beam_indices: tuple[tuple[int, ...], ...] = tuple(() for _ in input_ids)
        self.scorer = ConstrainedBeamSearchScorer(
            settings.batch,
            settings.num_beams,
            constraints,
            device,
            length_penalty=settings.length_penalty,
            do_early_stopping=settings.early_stopping,
            num_beam_hyps_to_keep=settings.num_return_sequences,
            max_length=settings.max_length,
            keep_all_beam_indices=True,  # compute_transition_scores() needs them for every result
        )
        self.token_ids: dict[str, Any] = {
            "pad_token_id": settings.pad_token,
            "eos_token_id": settings.end_tokens or None,
            "decoder_prompt_len": settings.prompt_length,
        }

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        settings, recorder, vocab_size = self.settings, self.recorder, logits.shape[1]
        accumulated = self.accumulated_scores(logits, input_ids, self.beam_scores)
        candidates = top_k_candidates(accumulated, self.num_candidates, vocab_size)
        status = candidates.status.masked_fill(self.scorer._done, 0)
        if status.any():
            raise_for_prompts(status, input_ids.shape[1] - settings.prompt_length)
        # A token at a place without a candidate must not count as an end.
        exists = candidates.scores > -torch.inf
        following = self.scorer.process(
            input_ids,
            candidates.scores,
            torch.where(exists, candidates.tokens, settings.not_an_end),
            candidates.beams,
            accumulated.view(-1, vocab_size),
            beam_indices=self.beam_indices,
            **self.token_ids,
        )
        self.beam_scores = following["next_beam_scores"].view_as(self.beam_scores)
        parents = following["next_beam_indices"]
        input_ids = torch.cat((input_ids[parents], following["next_beam_tokens"][:, None]), dim=1)
        if recorder.returns_dict:
            self.beam_indices = tuple((*self.beam_indices[p], p) for p in parents.tolist())
        stopped = self.criteria(input_ids, recorder.scores).all()
        moved = (parents != self.rows).any()
        return NextBeams(
            input_ids, parents if moved else None, bool(self.scorer.is_done) or bool(stopped)
        )

    def finish(self, input_ids: Tensor) -> SearchResult:
        nothing = torch.zeros((self.settings.batch, 0), dtype=torch.int64, device="cpu")
        result: Any = self.scorer.finalize(
            input_ids,
            self.beam_scores.flatten(),
            nothing,
            nothing,
            max_length=self.settings.max_length,
            beam_indices=self.beam_indices if self.recorder.returns_dict else None,
            **self.token_ids,
        )
        sequences, beam_indices = result["sequences"], result["beam_indices"]
        if beam_indices is not None:
            generated = sequences.shape[1] - self.settings.prompt_length
            beam_indices = beam_indices[:, :generated].to(torch.int32)
        return SearchResult(sequences, result["sequence_scores"], beam_indices)
