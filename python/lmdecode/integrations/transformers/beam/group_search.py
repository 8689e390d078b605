"""Diverse group beam search by the rules of transformers 4.38."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.types import MISSING_CANDIDATE_SCORE
from lmdecode.integrations.transformers.beam.candidates import (
    Candidates,
    accumulate,
    processed_log_probs,
    top_k_candidates,
)
from lmdecode.integrations.transformers.beam.diversity import HammingDiversityLogitsProcessor
from lmdecode.integrations.transformers.beam.fused_processors import FusedProcessors
from lmdecode.integrations.transformers.beam.search import NextBeams, StateSearch
from lmdecode.integrations.transformers.beam.settings import SearchSettings
from lmdecode.integrations.transformers.sampling.logits_process import as_op_logits

if TYPE_CHECKING:
    from lmdecode.integrations.transformers._recorder import Recorder


def _with_diversity(
    processors: LogitsProcessorList, diversity_penalty: float, num_beams: int, num_groups: int
) -> LogitsProcessorList:
    """Return the list with a ``HammingDiversityLogitsProcessor`` where transformers 4 had it.

    A list that has one already stays as it is.
    """
    if any(isinstance(p, HammingDiversityLogitsProcessor) for p in processors):
        return processors
    place = 1 if processors and type(processors[0]) is SequenceBiasLogitsProcessor else 0
    processors = copy.copy(processors)
    processors.insert(
        place, HammingDiversityLogitsProcessor(diversity_penalty, num_beams, num_groups)
    )
    return processors


def _for_rows(processors: LogitsProcessorList, rows: Tensor, group_size: int) -> Any:
    """Return the list for a part of the rows, changed if a processor depends on rows."""
    processors = copy.copy(processors)
    for number, processor in enumerate(processors):
        if type(processor) is RepetitionPenaltyLogitsProcessor:
            ignored = processor.prompt_ignore_length
            if isinstance(ignored, Tensor):
                processors[number] = RepetitionPenaltyLogitsProcessor(
                    processor.penalty, ignored[rows.to(ignored.device)]
                )
        elif type(processor) is PrefixConstrainedLogitsProcessor:
            processors[number] = PrefixConstrainedLogitsProcessor(
                processor._prefix_allowed_tokens_fn, group_size
            )
    return processors


class GroupSearch(StateSearch):
    """Diverse searches for each prompt: a group of beams avoids the tokens of earlier groups.

    ``num_groups`` divides ``num_beams``; ``diversity_penalty`` as
    ``HammingDiversityLogitsProcessor``; other arguments as ``SearchBase``.
    """

    dialect = "scorer"

    def __init__(
        self,
        settings: SearchSettings,
        num_groups: int,
        diversity_penalty: float,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        recorder: Recorder,
    ) -> None:
        processors = _with_diversity(processors, diversity_penalty, settings.num_beams, num_groups)
        super().__init__(
            settings,
            input_ids,
            processors,
            criteria,
            recorder,
            end_tokens=settings.end_tokens,
            num_groups=num_groups,
        )
        self.fused = FusedProcessors(processors)
        slots = torch.arange(len(self.state.done), device=input_ids.device)
        self.slots = slots.view(settings.batch, num_groups)  # as new_search orders them
        self.rows_of_group = self.rows.view(settings.batch, num_groups, self.group_size)
        self.processors_of_group = [
            _for_rows(processors, self.rows_of_group[:, group].flatten(), self.group_size)
            for group in range(num_groups)
        ]

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        settings, state, recorder = self.settings, self.state, self.recorder
        scores = None
        if recorder.scores is not None:
            scores = logits.new_empty(logits.shape, dtype=torch.float32)
        tokens, parents = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        for group in range(self.num_groups):
            candidates = self._candidates(group, logits, input_ids, tokens, scores)
            exists = candidates.scores > -torch.inf
            rows = self.rows_of_group[:, group]
            decided = beam_step(
                state,
                self.parameters,
                torch.where(exists, candidates.scores, MISSING_CANDIDATE_SCORE),
                torch.where(exists, candidates.tokens, settings.not_an_end),
                candidates.beams,
                status=candidates.status,
                slots=self.slots[:, group],
                parent_offsets=rows[:, 0],
                dialect=self.dialect,
            )
            tokens[rows.flatten()] = decided.tokens
            parents[rows.flatten()] = decided.parents
        recorder.record(scores, recorder.copy_of(logits))

        input_ids = self.sequences(input_ids.shape[1] + 1)
        stopped = self.criteria(input_ids, recorder.scores).all()
        return self.next_beams(input_ids, parents, stopped)

    def _candidates(
        self, group: int, logits: Tensor, input_ids: Tensor, tokens: Tensor, scores: Tensor | None
    ) -> Candidates:
        """Return a group's candidates, beams counted within it.

        ``tokens``, [rows], has the tokens of earlier groups in this step. If ``scores``, [rows, V],
        is given, the processed log-probabilities are written to the group's rows.
        """
        vocab_size, settings = logits.shape[1], self.settings
        beam_scores = self.state.scores[self.slots[:, group]]
        # The op leaves out unused beams, but these rules continue them.
        held = self.fused.prefix_tokens is not None
        if scores is None and not held and self.fused.fits(vocab_size):
            start = group * self.group_size
            # Beams of score -inf take no part, so the other groups' logits are not read.
            all_scores = beam_scores.new_full((settings.batch, settings.num_beams), -torch.inf)
            all_scores[:, start : start + self.group_size] = beam_scores
            earlier = tokens.view(settings.batch, -1)[:, :start]
            best = log_softmax_top_k(
                as_op_logits(logits),
                all_scores,
                self.num_candidates,
                num_beams=settings.num_beams,
                **self.fused.arguments(input_ids, vocab_size, earlier),
            )
            beams = (best.beams - start).clamp(min=0)
            return Candidates(best.scores, best.tokens, beams, best.status)
        rows = self.rows_of_group[:, group].flatten()
        log_probs = processed_log_probs(
            logits[rows],
            input_ids[rows],
            self.processors_of_group[group],
            current_tokens=tokens,
            beam_group_idx=group,
        )
        if scores is not None:
            scores[rows] = log_probs
        return top_k_candidates(accumulate(log_probs, beam_scores), self.num_candidates, vocab_size)
