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

from lmdecode.beam.ops import beam_finalize, beam_step, log_softmax_top_k
from lmdecode.integrations.transformers.beam.candidates import (
    Candidates,
    accumulate,
    processed_log_probs,
    top_k_candidates,
)
from lmdecode.integrations.transformers.beam.diversity import HammingDiversityLogitsProcessor
from lmdecode.integrations.transformers.beam.loop import SearchResult, Step
from lmdecode.integrations.transformers.beam.processor_plan import ProcessorPlan
from lmdecode.integrations.transformers.beam.settings import (
    SearchSettings,
    new_search,
    raise_for_prompts,
    rows_of_beams,
)
from lmdecode.integrations.transformers.sampling.logits_process import as_op_logits

if TYPE_CHECKING:
    from lmdecode.integrations.transformers._recorder import Recorder

# transformers goes on with beams of score -inf where there are no others, for beam_step they do not
# exist. This score is far below all others, and no log-probability changes it.
_LOWEST = -3.0e38
_NOT_REAL = -1.0e25


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
    """Return the list for a part of the rows, where one of its members knows about rows."""
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


class GroupSearch:
    """Searches of several groups of beams for each prompt; a group avoids the earlier ones' tokens.

    Parameters
    ----------
    settings
        Of the search.
    num_groups
        Groups of a prompt; a divisor of ``num_beams``.
    diversity_penalty
        See ``HammingDiversityLogitsProcessor``.
    input_ids
        [batch * num_beams, prompt length] int64.
    processors, criteria
        As ``generate()`` prepares them.
    recorder
        Gets every step's scores.
    """

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
        self.settings, self.num_groups, self.recorder = settings, num_groups, recorder
        processors = _with_diversity(processors, diversity_penalty, settings.num_beams, num_groups)
        self.criteria, self.plan = criteria, ProcessorPlan(processors)
        self.group_size = settings.num_beams // num_groups
        self.num_candidates = settings.candidates_per_beam * self.group_size
        device, slots = input_ids.device, settings.batch * num_groups
        # As new_search orders them.
        self.slots = torch.arange(slots, device=device).view(settings.batch, num_groups)
        self.rows = torch.arange(len(input_ids), device=device)
        self.rows_of_group = self.rows.view(settings.batch, num_groups, self.group_size)
        self.processors = [
            _for_rows(processors, self.rows_of_group[:, group].flatten(), self.group_size)
            for group in range(num_groups)
        ]
        self.parameters, self.state = new_search(
            settings,
            input_ids,
            num_groups=num_groups,
            end_tokens=settings.end_tokens,
            keep_beam_indices=recorder.returns_dict,
        )

    def step(self, outputs: Any, logits: Tensor, input_ids: Tensor) -> Step:
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
                torch.where(exists, candidates.scores, _LOWEST),
                torch.where(exists, candidates.tokens, settings.not_an_end),
                candidates.beams,
                status=candidates.status,
                slots=self.slots[:, group],
                parent_offsets=rows[:, 0],
                rules="scorer",
            )
            tokens[rows.flatten()] = decided.tokens
            parents[rows.flatten()] = decided.parents
        recorder.record(outputs, scores, recorder.copy_of(logits))

        length = input_ids.shape[1]
        # A copy: whoever was given sequences must not see them change.
        input_ids = state.sequences[:, :, : length + 1].flatten(0, 1).clone()
        stopped = self.criteria(input_ids, recorder.scores)
        # The one point of a step at which the host waits for the device.
        failed, moved, *finished = torch.stack(
            [
                state.status.any(),
                (parents != self.rows).any(),
                state.done.all(),
                stopped.all(),
            ]
        ).tolist()
        if failed:
            status = state.status.view(self.slots.shape).amax(dim=1)
            raise_for_prompts(status, length - settings.prompt_length)
        return Step(input_ids, parents if moved else None, any(finished))

    def _candidates(
        self, group: int, logits: Tensor, input_ids: Tensor, tokens: Tensor, scores: Tensor | None
    ) -> Candidates:
        """Return a group's candidates, beams counted within it.

        tokens: [rows], those of earlier groups in this step. The processed log-probabilities are
        written to the group's rows of scores, [rows, V], where that is given.
        """
        vocab_size, settings = logits.shape[1], self.settings
        beam_scores = self.state.scores[self.slots[:, group]]
        if scores is None and self.plan.fits(vocab_size):
            start = group * self.group_size
            # Beams of score -inf take no part: the other groups' logits are not looked at.
            all_scores = beam_scores.new_full((settings.batch, settings.num_beams), -torch.inf)
            all_scores[:, start : start + self.group_size] = beam_scores
            earlier = tokens.view(settings.batch, -1)[:, :start]
            best = log_softmax_top_k(
                as_op_logits(logits),
                all_scores,
                self.num_candidates,
                num_beams=settings.num_beams,
                **self.plan.arguments(input_ids, vocab_size, earlier),
            )
            beams = (best.beams - start).clamp(min=0)
            return Candidates(best.scores, best.tokens, beams, best.status)
        rows = self.rows_of_group[:, group].flatten()
        log_probs = processed_log_probs(
            logits[rows],
            input_ids[rows],
            self.processors[group],
            current_tokens=tokens,
            beam_group_idx=group,
        )
        if scores is not None:
            scores[rows] = log_probs
        return top_k_candidates(accumulate(log_probs, beam_scores), self.num_candidates, vocab_size)

    def finish(self, input_ids: Tensor) -> SearchResult:
        settings = self.settings
        final = beam_finalize(
            self.state,
            self.parameters,
            settings.num_return_sequences,
            num_groups=self.num_groups,
            rules="scorer",
        )
        length = int(final.lengths.max())
        if settings.end_tokens:  # the first of them follows where there is room
            length = min(length + 1, settings.max_length)
        beam_indices = None
        if self.recorder.returns_dict:
            groups = torch.div(final.places, self.group_size, rounding_mode="floor")
            first_rows = self.rows[:: settings.num_beams, None] + groups * self.group_size
            beams = final.beam_indices[..., settings.prompt_length : length]
            beam_indices = rows_of_beams(beams, first_rows[..., None]).flatten(0, 1)
        scores = final.scores.masked_fill(final.scores < _NOT_REAL, -torch.inf)
        return SearchResult(
            final.sequences[..., :length].flatten(0, 1),
            scores.flatten().to(torch.float32),
            beam_indices,
        )
