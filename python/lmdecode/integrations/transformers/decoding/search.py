"""Searches of ``Decoding`` in Python, for processors that the loop in C++ does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmdecode._ops import ops
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.beam.types import STATUS_EMPTY, STATUS_NAN
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers.beam.group_search import GroupSearch
from lmdecode.integrations.transformers.beam.loop import NextBeams, SearchResult
from lmdecode.integrations.transformers.beam.plain_search import PlainSearch
from lmdecode.integrations.transformers.beam.search import StateSearch
from lmdecode.integrations.transformers.beam.settings import SearchSettings, raise_for_prompts
from lmdecode.integrations.transformers.decoding.prompt_padding import leave_out
from lmdecode.integrations.transformers.decoding.search_call import SearchCall

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, StoppingCriteriaList

    from lmdecode.decoder.weights import PackedDecoder

__all__ = ["decode_with_any_rules"]


class GreedySearch(StateSearch):
    """Greedy search with any processors and any stopping criteria; see ``SearchBase``."""

    def __init__(
        self,
        settings: SearchSettings,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        recorder: Recorder,
    ) -> None:
        ends = settings.end_tokens
        super().__init__(settings, input_ids, processors, criteria, recorder, end_tokens=ends)
        self.ended = torch.zeros(len(input_ids), dtype=torch.bool, device="cpu")
        # As in transformers: without end tokens, prompts continue until all have ended.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        state, length, raw = self.state, input_ids.shape[1], self.recorder.copy_of(logits)
        scores: Tensor = self.processors(input_ids, logits)  # type: ignore[arg-type]
        self.recorder.record(scores, raw)
        best, tokens = scores.max(dim=1)
        failed = (best.isnan() * STATUS_NAN + (best == -torch.inf) * STATUS_EMPTY) * ~self.ended
        if bool(failed.any()):
            raise_for_prompts(failed, length - self.settings.prompt_length)
        if self.pads:
            tokens = tokens.masked_fill(self.ended, self.settings.pad_token)
        state.sequences[:, 0, length] = tokens
        state.lengths.add_(1)
        input_ids = torch.cat((input_ids, tokens[:, None]), dim=1)
        self.ended |= self.criteria(input_ids, self.recorder.scores)
        if self.pads:
            state.done[self.ended] = 1
        return NextBeams(input_ids, None, bool(self.ended.all()))

    def finish(self, input_ids: Tensor) -> SearchResult:
        scores = torch.zeros(len(input_ids), dtype=torch.float32, device="cpu")
        return SearchResult(input_ids, scores, None)


def decode_with_any_rules(decoder: PackedDecoder, call: SearchCall) -> Any:
    """Run the decoder in C++ and choose tokens as ``beam_search`` does, in Python.

    The result is on the CPU. Raises RuntimeError if a prompt has NaN in its logits, or no candidate
    above -inf.
    """
    config, settings, prompts = call.config, call.settings, call.input_ids
    groups, greedy = config.num_beam_groups or 1, settings.num_beams == 1
    recorder = Recorder(call.model, config, {})
    common = (prompts, call.processors, call.criteria, recorder)
    search: GreedySearch | PlainSearch | GroupSearch
    if greedy:
        search = GreedySearch(settings, *common)
    elif groups > 1:
        search = GroupSearch(settings, groups, config.diversity_penalty or 0.0, *common)
    else:
        plain = getattr(call.processors, "search", PlainSearch)  # of other rules
        search = plain(settings, bool(config.do_sample), *common)
    leave_out(search.state, call.padding)
    searches = DecodingSearches(
        decoder,
        search.state,
        search.parameters,
        new_token_rules(len(search.state.done)),
        call.memory.shape[1],
        num_groups=groups,
        num_candidates=1,
    )
    searches.read_memory(call.memory, call.lengths, torch.arange(settings.batch, device="cpu"))
    if call.no_speech is not None:
        call.no_speech.read(searches)
    input_ids, finished = prompts, False
    beams = search.state.scores.shape[1]
    while not finished:
        length, had_ended = input_ids.shape[1], (search.state.done != 0).repeat_interleave(beams)
        input_ids, parents, finished = search.step(searches.read_tokens(), input_ids)
        input_ids[:, : prompts.shape[1]] = prompts  # with the padding
        if recorder.scores is not None:
            recorder.scores[-1][had_ended] = 0.0
        if parents is not None:
            ops.update_beam_indirection_(searches.caches.table, parents, length, None)
    result = search.finish(input_ids)
    searches.release()
    return recorder.result(result.sequences) if greedy else recorder.beam_result(result)
