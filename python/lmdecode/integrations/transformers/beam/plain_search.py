"""Beam search and beam sampling by the rules of transformers 5."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.trie import Trie
from lmdecode.beam.types import REAL_BEAM_SCORE_BOUND, STATUS_EMPTY
from lmdecode.integrations.transformers.beam.candidates import (
    Candidates,
    drawn_candidates,
    rank_drawn,
    take,
    top_k_candidates,
)
from lmdecode.integrations.transformers.beam.fused_processors import FusedProcessors
from lmdecode.integrations.transformers.beam.loop import NextBeams
from lmdecode.integrations.transformers.beam.search import StateSearch
from lmdecode.integrations.transformers.beam.settings import SearchSettings
from lmdecode.integrations.transformers.sampling.logits_process import as_op_logits

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

    from lmdecode.integrations.transformers._recorder import Recorder


def end_tokens(criteria: Iterable[Any]) -> list[int]:
    """Return the tokens of criteria that end a row; other criteria are left out."""
    ends: list[int] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends += criterion.eos_token_id.flatten().tolist()
    return ends


def end_tokens_of_criteria(criteria: StoppingCriteriaList, max_length: int) -> list[int] | None:
    """Return the end tokens; None if there are criteria other than these and the length."""
    if type(criteria) is not StoppingCriteriaList:  # its __call__ may do more
        return None
    for criterion in criteria:
        if type(criterion) is not EosTokenCriteria and (
            type(criterion) is not MaxLengthCriteria or criterion.max_length != max_length
        ):
            return None
    return end_tokens(criteria)


class PlainSearch(StateSearch):
    """One search for each prompt, all in step; ``do_sample`` draws the candidates.

    Other arguments as ``SearchBase``.
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
        ends = end_tokens_of_criteria(criteria, settings.max_length)
        super().__init__(settings, input_ids, processors, criteria, recorder, end_tokens=ends or [])
        self.do_sample, self.fused = do_sample, FusedProcessors(processors)
        prefix_tokens = self.fused.prefix_tokens
        self.trie = None if prefix_tokens is None else prefix_tokens.trie
        if prefix_tokens is not None:
            of = "the device of input_ids"
            prefix_tokens.trie.check_device("prefix_allowed_tokens_fn", input_ids.device, of)
            self.nodes = prefix_tokens.trie.nodes_of(input_ids[:, prefix_tokens.prompt_length :])
        self.calls_criteria = ends is None
        self.end_tokens = torch.tensor(ends or [], dtype=torch.int64, device=input_ids.device)

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        length = input_ids.shape[1]
        candidates = self._candidates(logits, input_ids)
        stopped = None
        if self.calls_criteria:
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
        if self.trie is not None:
            self.nodes = self.trie.step(self.nodes[decided.parents], decided.tokens)
        return self.next_beams(self.sequences(length + 1), decided.parents)

    def _candidates(self, logits: Tensor, input_ids: Tensor) -> Candidates:
        recorder, vocab_size = self.recorder, logits.shape[1]
        if not self.do_sample and recorder.scores is None and self.fused.fits(vocab_size):
            recorder.record(None, recorder.copy_of(logits))
            arguments = self.fused.arguments(input_ids, vocab_size)
            if self.trie is not None:
                arguments.update(trie=self.trie, nodes=self.nodes)
            best = log_softmax_top_k(
                as_op_logits(logits),
                self.state.scores,
                self.num_candidates,
                num_beams=self.settings.num_beams,
                **arguments,
            )
            return Candidates(best.scores, best.tokens, best.beams, best.status)
        accumulated = self.accumulated_scores(logits, input_ids, self.state.scores)
        if self.trie is not None:
            accumulated = self._without_idle_beams(self.trie, accumulated, vocab_size)
        if self.do_sample:
            found = drawn_candidates(accumulated, self.num_candidates, vocab_size, self.state.done)
        else:
            found = top_k_candidates(accumulated, self.num_candidates, vocab_size)
        if self.trie is None:
            return found
        # A search without candidates has not failed.
        nothing = found.status == STATUS_EMPTY
        return found._replace(
            scores=found.scores.masked_fill(nothing[:, None], -torch.inf),
            status=found.status.masked_fill(nothing, 0),
        )

    def _without_idle_beams(self, trie: Trie, accumulated: Tensor, vocab_size: int) -> Tensor:
        """Leave out the same beams as the op: unused ones, and those that cannot continue.

        The trie's processor bans tokens, but allows one if no token may follow.
        """
        is_idle = (self.state.scores <= REAL_BEAM_SCORE_BOUND).flatten() | ~trie.goes_on(self.nodes)
        by_beam = accumulated.view(len(is_idle), vocab_size)
        return by_beam.masked_fill(is_idle[:, None], -torch.inf).view_as(accumulated)

    def _sequences_of(self, candidates: Candidates, input_ids: Tensor) -> Tensor:
        """Return each candidate's beam with its token appended: [batch * K, length + 1]."""
        first = (
            torch.arange(len(candidates.beams), device=input_ids.device) * self.settings.num_beams
        )
        rows = (candidates.beams + first[:, None]).flatten()
        return torch.cat((input_ids[rows], candidates.tokens.flatten()[:, None]), dim=1)
