"""Base of the kinds of beam search: settings, state and result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmdecode.beam.engine.results import final_columns
from lmdecode.beam.ops import beam_finalize
from lmdecode.beam.state import BeamParameters, BeamState, SearchDialect
from lmdecode.beam.types import REAL_CANDIDATE_SCORE_BOUND
from lmdecode.integrations.transformers.beam.candidates import accumulate, processed_log_probs
from lmdecode.integrations.transformers.beam.loop import NextBeams, SearchResult
from lmdecode.integrations.transformers.beam.settings import (
    SearchSettings,
    new_search,
    raise_for_prompts,
    rows_of_beams,
)

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, StoppingCriteriaList

    from lmdecode.integrations.transformers._recorder import Recorder


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
