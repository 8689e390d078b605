"""Beam search by the rules of transformers: the loop of all searches, and the plain one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from lmdecode.beam.engine.results import final_columns
from lmdecode.beam.ops import beam_finalize, beam_step, log_softmax_top_k
from lmdecode.beam.state import BeamParameters, BeamState, SearchDialect
from lmdecode.beam.trie import Trie
from lmdecode.beam.types import REAL_BEAM_SCORE_BOUND, REAL_CANDIDATE_SCORE_BOUND, STATUS_EMPTY
from lmdecode.decoder.stepwise import StepwiseModel
from lmdecode.integrations.transformers._recorder import Recorder, SearchResult
from lmdecode.integrations.transformers.beam.candidates import (
    Candidates,
    accumulate,
    drawn_candidates,
    processed_log_probs,
    rank_drawn,
    take,
    top_k_candidates,
)
from lmdecode.integrations.transformers.beam.fused_processors import FusedProcessors
from lmdecode.integrations.transformers.beam.settings import (
    SearchSettings,
    new_search,
    raise_for_prompts,
    rows_of_beams,
)
from lmdecode.integrations.transformers.generate_call import end_tokens_of_criteria
from lmdecode.integrations.transformers.sampling.logits_process import as_op_logits

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


class NextBeams(NamedTuple):
    """Beams after a step: [rows, length + 1] int64.

    ``parents``, [rows] int64, is the row that each beam continues; None if each continues its own.
    ``finished``: every search has ended.
    """

    sequences: Tensor
    parents: Tensor | None
    finished: bool


class Search(Protocol):
    """One kind of beam search."""

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        """Choose the next beams for beams of [rows, length] int64.

        ``logits``, [rows, V], is a view of the model's in its dtype.
        """

    def finish(self, input_ids: Tensor) -> SearchResult:
        """Return the result; input_ids are the beams, [rows, length], after the last step."""


def run_search(model: StepwiseModel, search: Search, input_ids: Tensor) -> Tensor:
    """Run the model and the search in turns until the search has finished.

    ``input_ids``, [rows, S] int64, are the prompts, once for each beam. Returns the beams after the
    last step, [rows, length], for ``search.finish``.
    """
    logits = model.read_prompts(input_ids)
    while True:
        input_ids, parents, finished = search.step(logits, input_ids)
        del logits  # frees the logits of a long prompt
        if parents is not None:
            model.reorder(parents)
        if finished:
            return input_ids
        logits = model.read(input_ids)


# --- States of ``beam_step`` ----------------------------------------------------------------------


class SearchBase:
    """Searches of all prompts, in step.

    ``input_ids`` are [batch * num_beams, prompt length] int64; processors and criteria are as
    ``generate()`` prepares them; ``recorder`` receives the scores of every step.
    """

    def __init__(
        self,
        settings: SearchSettings,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        recorder: Recorder,
    ) -> None:
        self.settings, self.recorder = settings, recorder
        self.processors, self.criteria = processors, criteria
        self.rows = torch.arange(len(input_ids), device=input_ids.device)

    def accumulated_scores(self, logits: Tensor, input_ids: Tensor, beam_scores: Tensor) -> Tensor:
        """Return the scores of all candidates, [batch, num_beams * V], and record the step."""
        log_probs = processed_log_probs(logits, input_ids, self.processors)
        self.recorder.record(log_probs, self.recorder.copy_of(logits))
        return accumulate(log_probs, beam_scores)


class StateSearch(SearchBase):
    """Searches by ``beam_step``, in ``state``, with ``parameters``.

    ``end_tokens`` are those for ``beam_step``, ``num_groups`` counts a prompt's groups; other
    arguments as ``SearchBase``.
    """

    dialect: SearchDialect = "generate"

    def __init__(
        self,
        settings: SearchSettings,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        recorder: Recorder,
        *,
        end_tokens: list[int],
        num_groups: int = 1,
    ) -> None:
        super().__init__(settings, input_ids, processors, criteria, recorder)
        self.num_groups, self.group_size = num_groups, settings.num_beams // num_groups
        self.num_candidates = settings.candidates_per_beam * self.group_size
        self.prompts = input_ids
        self.parameters, self.state = new_search(
            settings,
            input_ids,
            num_groups=num_groups,
            end_tokens=end_tokens,
            keep_beam_indices=recorder.returns_dict,
        )

    def sequences(self, length: int) -> Tensor:
        """Return the beams, [rows, length].

        A copy, as returned sequences must not change.
        """
        return self.state.sequences[:, :, :length].flatten(0, 1).clone()

    def next_beams(self, input_ids: Tensor, parents: Tensor, *stopped: Tensor) -> NextBeams:
        """Return the beams after a step; only this method synchronises with the device.

        Takes the next beams, [rows, length], and their parents, [rows], both int64. Each of
        ``stopped`` is bool and ends the search if true. Raises RuntimeError where the search of a
        prompt failed.
        """
        state, settings = self.state, self.settings
        failed, moved, *finished = torch.stack(
            [state.status.any(), (parents != self.rows).any(), state.done.all(), *stopped]
        ).tolist()
        if failed:
            status = state.status.view(settings.batch, self.num_groups).amax(dim=1)
            raise_for_prompts(status, input_ids.shape[1] - 1 - settings.prompt_length)
        return NextBeams(input_ids, parents if moved else None, any(finished))

    def finish(self, input_ids: Tensor) -> SearchResult:
        return search_result(
            self.settings,
            self.parameters,
            self.state,
            self.prompts,
            num_groups=self.num_groups,
            dialect=self.dialect,
        )


def search_result(
    settings: SearchSettings,
    parameters: BeamParameters,
    state: BeamState,
    prompts: Tensor,
    *,
    num_groups: int = 1,
    dialect: SearchDialect = "generate",
) -> SearchResult:
    """Return the best sequences of a search that ``new_search`` began.

    ``prompts`` are [batch * num_beams, prompt length] int64.
    """
    final = beam_finalize(
        state, parameters, settings.num_return_sequences, num_groups=num_groups, dialect=dialect
    )
    start, is_scorer = settings.prompt_length, dialect == "scorer"
    room_for_end = is_scorer and bool(settings.end_tokens)  # the first of them follows
    length = final_columns(final.lengths, start, settings.max_length, room_for_end=room_for_end)
    sequences, scores = final.sequences[..., :length], final.scores
    if is_scorer:
        scores = scores.masked_fill(scores < REAL_CANDIDATE_SCORE_BOUND, -torch.inf)
    else:
        positions = torch.arange(length, device=sequences.device)
        is_token = positions < final.lengths.clamp(min=start)[..., None]
        sequences = torch.where(is_token, sequences, settings.fill)
        # Also if fewer were found.
        sequences[..., :start] = prompts.view(settings.batch, settings.num_beams, -1)[:, :1]
    beam_indices = None
    if state.beam_indices.shape[2]:
        group_size = settings.num_beams // num_groups
        groups = torch.div(final.places, group_size, rounding_mode="floor")
        first_rows = torch.arange(0, len(prompts), settings.num_beams, device=groups.device)
        beam_indices = rows_of_beams(
            final.beam_indices[..., start:length],
            (first_rows[:, None] + groups * group_size)[..., None],
        ).flatten(0, 1)
    return SearchResult(sequences.flatten(0, 1), scores.flatten().to(torch.float32), beam_indices)


# --- Beam search and beam sampling ----------------------------------------------------------------


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
