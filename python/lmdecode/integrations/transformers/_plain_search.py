"""Beam search and beam sampling by the rules of transformers 5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lmdecode.beam import beam_finalize, beam_step, log_softmax_top_k
from lmdecode.beam_state import EarlyStopping, beam_parameters, new_beam_state
from lmdecode.integrations.transformers._beam_candidates import (
    STATUS_NAN,
    STATUS_NO_CANDIDATE,
    STATUS_SCORE,
    Candidates,
    accumulate,
    drawn_candidates,
    processed_log_probs,
    rank_drawn,
    take,
    top_k_candidates,
)
from lmdecode.integrations.transformers._beam_loop import BeamResult, Step
from lmdecode.integrations.transformers._status import raise_for_status
from lmdecode.integrations.transformers.logits_process import as_op_logits

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from lmdecode.integrations.transformers._recorder import Recorder

# The score of all beams but one at the beginning, when they are equal.
UNUSED = -1.0e9

_STATUS_TEXT = {
    STATUS_NAN: "NaN in its logits",
    STATUS_NO_CANDIDATE: "no candidate above -inf",
    STATUS_SCORE: "a score of +inf or NaN",
    8: "fewer continuations than beams",
}


def end_tokens_of(config: GenerationConfig) -> list[int]:
    """Return the end tokens that ``generate()`` prepared; none: an empty list."""
    tokens = config._eos_token_tensor
    return [] if tokens is None else tokens.reshape(-1).tolist()


def candidates_per_beam(config: GenerationConfig) -> int:
    """Return how many candidates each beam has: enough that one of them does not end."""
    return max(2, 1 + len(end_tokens_of(config)))


def early_stopping_of(config: GenerationConfig) -> EarlyStopping:
    """Return what ``early_stopping`` means in transformers: only True itself is True."""
    value = config.early_stopping
    return "never" if value == "never" else value is True


def raise_for_requests(status: Tensor, step: int) -> None:
    """Raise RuntimeError; status [requests] uint8 is not 0 for all."""
    raise_for_status(status.tolist(), step, noun="prompt", text=_STATUS_TEXT)


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
    input_ids
        [batch * num_beams, S] int64.
    config
        As ``generate()`` prepares it.
    processors, criteria
        As ``generate()`` prepares them.
    recorder
        Gets every step's scores.
    """

    def __init__(
        self,
        input_ids: Tensor,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        recorder: Recorder,
    ) -> None:
        self.num_beams, self.max_length = config.num_beams, config.max_length
        self.num_return_sequences = config.num_return_sequences
        self.do_sample = bool(config.do_sample)
        self.recorder, self.processors = recorder, processors
        rows, self.prompt_length = input_ids.shape
        batch, device = rows // self.num_beams, input_ids.device
        self.prompts = input_ids.view(batch, self.num_beams, -1)
        end_tokens = end_tokens_of(config)
        self.num_candidates = candidates_per_beam(config) * self.num_beams
        pad_token = config._pad_token_tensor
        pad_token = 0 if pad_token is None else int(pad_token)
        # What transformers fills with: a pad token of 0 counts as none.
        self.fill = (pad_token or end_tokens[0]) if end_tokens else -1
        ending = _end_tokens_of_criteria(criteria, self.max_length)
        self.criteria = criteria if ending is None else None
        self.end_tokens = torch.tensor(ending or [], dtype=torch.int64, device=device)
        self.rows = torch.arange(rows, device=device)

        self.parameters = beam_parameters(
            batch,
            self.num_beams,
            prompt_lengths=self.prompt_length,
            max_lengths=self.max_length,
            length_penalty=config.length_penalty,
            early_stopping=early_stopping_of(config),
            end_tokens=ending or [],
            pad_tokens=pad_token,
            device=device,
        )
        self.state = new_beam_state(
            batch,
            self.num_beams,
            self.max_length,
            keep_beam_indices=recorder.returns_dict,
            device=device,
        )
        self.state.sequences[:, :, : self.prompt_length] = self.prompts
        self.state.lengths.fill_(self.prompt_length)
        self.state.scores[:, 1:] = UNUSED

    def step(self, outputs: Any, logits: Tensor, input_ids: Tensor) -> Step:
        length = input_ids.shape[1]
        candidates = self._candidates(outputs, logits, input_ids)
        stopped, all_stopped = None, False
        if self.criteria is not None:
            stopped = self.criteria(self._sequences_of(candidates, input_ids), self.recorder.scores)  # type: ignore[arg-type]
            stopped = stopped.view_as(candidates.tokens)
            all_stopped = bool(stopped.all())
        if self.do_sample:
            ends = torch.isin(candidates.tokens, self.end_tokens) if stopped is None else stopped
            if length + 1 >= self.max_length:
                ends = torch.ones_like(ends)
            order = rank_drawn(candidates, ends, self.num_beams)
            candidates = take(candidates, order)
            stopped = None if stopped is None else stopped.gather(1, order)

        scores, tokens, beams, status = candidates
        decided = beam_step(
            self.state, self.parameters, scores, tokens, beams, status=status, stopped=stopped
        )
        state = self.state
        moved = (decided.parents != self.rows).any().to(torch.uint8)
        # The one point of a step at which the host waits for the device.
        failed, done, moved = torch.stack((state.status.max(), state.done.min(), moved)).tolist()
        if failed:
            raise_for_requests(state.status, length - self.prompt_length)
        return Step(
            state.sequences[:, :, : length + 1].flatten(0, 1),
            decided.parents if moved else None,
            bool(done) or all_stopped,
        )

    def _candidates(self, outputs: Any, logits: Tensor, input_ids: Tensor) -> Candidates:
        keep_logits = self.recorder.logits is not None
        kept_logits = logits.to(torch.float32, copy=True) if keep_logits else None
        if not (self.processors or self.do_sample or self.recorder.scores is not None):
            self.recorder.record(outputs, None, kept_logits)
            best = log_softmax_top_k(
                as_op_logits(logits),
                self.state.scores,
                self.num_candidates,
                num_beams=self.num_beams,
            )
            return Candidates(best.scores, best.tokens, best.beams, best.status)
        log_probs = processed_log_probs(logits, input_ids, self.processors)
        keep_scores = self.recorder.scores is not None
        self.recorder.record(outputs, log_probs if keep_scores else None, kept_logits)
        accumulated = accumulate(log_probs, self.state.scores)
        if self.do_sample:
            return drawn_candidates(
                accumulated, self.num_candidates, log_probs.shape[1], self.state.done
            )
        return top_k_candidates(accumulated, self.num_candidates, log_probs.shape[1])

    def _sequences_of(self, candidates: Candidates, input_ids: Tensor) -> Tensor:
        """Return what the candidates would make of their beams: [batch * K, length + 1]."""
        first = torch.arange(len(candidates.beams), device=input_ids.device) * self.num_beams
        rows = (candidates.beams + first[:, None]).flatten()
        return torch.cat((input_ids[rows], candidates.tokens.flatten()[:, None]), dim=1)

    def finish(self, input_ids: Tensor) -> BeamResult:
        final = beam_finalize(self.state, self.parameters, self.num_return_sequences)
        start = self.prompt_length
        lengths = final.lengths.clamp(min=start)
        length = int(lengths.max())
        positions = torch.arange(length, device=lengths.device)
        sequences = torch.where(
            positions < lengths[..., None], final.sequences[..., :length], self.fill
        )
        sequences[..., :start] = self.prompts[:, :1]  # also where fewer were found
        beam_indices = None
        if self.recorder.returns_dict:
            first = self.rows[:: self.num_beams].to(torch.int32)[:, None, None]
            beams = final.beam_indices[..., start:length]
            beam_indices = torch.where(beams < 0, beams, beams + first).flatten(0, 1)
        return BeamResult(
            sequences.flatten(0, 1), final.scores.flatten().to(torch.float32), beam_indices
        )
