"""Beam search and beam sampling by the rules of transformers 5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lmdecode.beam.ops import beam_finalize, beam_step, log_softmax_top_k
from lmdecode.integrations.transformers.beam.candidates import (
    Candidates,
    accumulate,
    drawn_candidates,
    processed_log_probs,
    rank_drawn,
    take,
    top_k_candidates,
)
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
    from transformers import LogitsProcessorList

    from lmdecode.integrations.transformers._recorder import Recorder


def _end_tokens_of_criteria(criteria: StoppingCriteriaList, max_length: int) -> list[int] | None:
    """Return the end tokens where there are no other criteria than these and the length."""
    if type(criteria) is not StoppingCriteriaList:  # its __call__ may do more
        return None
    tokens: list[int] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            tokens += criterion.eos_token_id.reshape(-1).tolist()
        elif type(criterion) is not MaxLengthCriteria or criterion.max_length != max_length:
            return None
    return tokens


class PlainSearch:
    """One search for each prompt, all in step.

    Parameters
    ----------
    settings
        Of the search.
    do_sample
        Draw the candidates.
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
        do_sample: bool,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        recorder: Recorder,
    ) -> None:
        self.settings, self.do_sample, self.recorder = settings, do_sample, recorder
        self.processors, self.plan = processors, ProcessorPlan(processors)
        self.num_candidates = settings.candidates_per_beam * settings.num_beams
        device = input_ids.device
        self.rows = torch.arange(len(input_ids), device=device)
        self.prompts = input_ids.view(settings.batch, settings.num_beams, -1)

        end_tokens = _end_tokens_of_criteria(criteria, settings.max_length)
        self.criteria = criteria if end_tokens is None else None
        self.end_tokens = torch.tensor(end_tokens or [], dtype=torch.int64, device=device)
        self.parameters, self.state = new_search(
            settings,
            input_ids,
            end_tokens=end_tokens or [],
            keep_beam_indices=recorder.returns_dict,
        )

    def step(self, outputs: Any, logits: Tensor, input_ids: Tensor) -> Step:
        length = input_ids.shape[1]
        candidates = self._candidates(outputs, logits, input_ids)
        stopped = None
        if self.criteria is not None:
            stopped = self.criteria(self._sequences_of(candidates, input_ids), self.recorder.scores)
            stopped = stopped.view_as(candidates.tokens)
        if self.do_sample:
            ends = torch.isin(candidates.tokens, self.end_tokens) if stopped is None else stopped
            if length + 1 >= self.settings.max_length:
                ends = torch.ones_like(ends)
            order = rank_drawn(candidates, ends, self.settings.num_beams)
            candidates = take(candidates, order)
            stopped = None if stopped is None else stopped.gather(1, order)

        scores, tokens, beams, status = candidates
        decided = beam_step(
            self.state, self.parameters, scores, tokens, beams, status=status, stopped=stopped
        )
        state = self.state
        # The one point of a step at which the host waits for the device.
        failed, moved, finished = torch.stack(
            [state.status.any(), (decided.parents != self.rows).any(), state.done.all()]
        ).tolist()
        if failed:
            raise_for_prompts(state.status, length - self.settings.prompt_length)
        # A copy: whoever was given sequences must not see them change.
        input_ids = state.sequences[:, :, : length + 1].flatten(0, 1).clone()
        return Step(input_ids, decided.parents if moved else None, bool(finished))

    def _candidates(self, outputs: Any, logits: Tensor, input_ids: Tensor) -> Candidates:
        recorder, vocab_size = self.recorder, logits.shape[1]
        if not self.do_sample and recorder.scores is None and self.plan.fits(vocab_size):
            recorder.record(outputs, None, recorder.copy_of(logits))
            best = log_softmax_top_k(
                as_op_logits(logits),
                self.state.scores,
                self.num_candidates,
                num_beams=self.settings.num_beams,
                **self.plan.arguments(input_ids, vocab_size),
            )
            return Candidates(best.scores, best.tokens, best.beams, best.status)
        log_probs = processed_log_probs(logits, input_ids, self.processors)
        recorder.record(outputs, log_probs, recorder.copy_of(logits))
        accumulated = accumulate(log_probs, self.state.scores)
        if self.do_sample:
            return drawn_candidates(accumulated, self.num_candidates, vocab_size, self.state.done)
        return top_k_candidates(accumulated, self.num_candidates, vocab_size)

    def _sequences_of(self, candidates: Candidates, input_ids: Tensor) -> Tensor:
        """Return what the candidates would make of their beams: [batch * K, length + 1]."""
        first = (
            torch.arange(len(candidates.beams), device=input_ids.device) * self.settings.num_beams
        )
        rows = (candidates.beams + first[:, None]).flatten()
        return torch.cat((input_ids[rows], candidates.tokens.flatten()[:, None]), dim=1)

    def finish(self, input_ids: Tensor) -> SearchResult:
        settings = self.settings
        final = beam_finalize(self.state, self.parameters, settings.num_return_sequences)
        start = settings.prompt_length
        lengths = final.lengths.clamp(min=start)
        length = int(lengths.max())
        positions = torch.arange(length, device=lengths.device)
        sequences = torch.where(
            positions < lengths[..., None], final.sequences[..., :length], settings.fill
        )
        sequences[..., :start] = self.prompts[:, :1]  # also where fewer were found
        beam_indices = None
        if self.recorder.returns_dict:
            first_rows = self.rows[:: settings.num_beams, None, None]
            beam_indices = rows_of_beams(final.beam_indices[..., start:length], first_rows)
            beam_indices = beam_indices.flatten(0, 1)
        return SearchResult(
            sequences.flatten(0, 1), final.scores.flatten().to(torch.float32), beam_indices
        )
