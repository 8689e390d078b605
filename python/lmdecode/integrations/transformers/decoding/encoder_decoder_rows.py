"""Loops in Python over an encoder-decoder model, for what the loop in C++ does not choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode.beam.state import BeamState
from lmdecode.beam.types import STATUS_EMPTY, STATUS_NAN
from lmdecode.decoder.engine.steps import MemoryRows, memory_rows
from lmdecode.integrations.transformers._recorder import Recorder, SearchResult
from lmdecode.integrations.transformers.beam.group_search import GroupSearch
from lmdecode.integrations.transformers.beam.search import (
    NextBeams,
    PlainSearch,
    StateSearch,
    run_search,
)
from lmdecode.integrations.transformers.beam.settings import SearchSettings, raise_for_prompts
from lmdecode.integrations.transformers.decoding.whisper import NoSpeech
from lmdecode.integrations.transformers.generate_call import noise_of_rows
from lmdecode.integrations.transformers.sampling.loop import sample_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    from lmdecode.models.packed_stack import PackedDecoder

__all__ = [
    "SearchCall",
    "decode_by_sampling",
    "decode_with_any_rules",
    "leave_out",
    "prompt_padding",
]


class SearchCall(NamedTuple):
    """Arguments of one call of the loop by ``generate()``; only the memory may be on a device.

    ``input_ids`` and ``padding`` (bool, True for padding) are [batch * num_beams, length].
    ``memory`` is [batch, S, M] float32 with ``lengths`` [batch] int64. The config belongs to this
    call. ``no_speech`` runs on the prompts.
    """

    model: Any
    settings: SearchSettings
    input_ids: Tensor
    padding: Tensor | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    memory: Tensor
    lengths: Tensor
    no_speech: NoSpeech | None


_PADDING = torch.iinfo(torch.int64).min  # kPadding of csrc/decoder/decoding.h


def prompt_padding(model: Any, model_kwargs: dict[str, Any], input_ids: Tensor) -> Tensor | None:
    """Return the mask of padding tokens, [rows, length] bool; None if there is no padding.

    Raises ValueError if the mask does not fit the prompts, or the model is not Whisper: only
    Whisper's positions do not count padding.
    """
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is None or bool(mask.all()):
        return None
    name = "decoder_attention_mask"
    if model.config.model_type != "whisper":
        raise ValueError(f"{name}: expected ones, prompts of the decoder are not padded")
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"{name}: expected shape {list(input_ids.shape)}, that of the prompts, got "
            f"{list(mask.shape)}"
        )
    padding = mask.cpu() == 0
    if bool(padding[:, -1].any()):
        raise ValueError(f"{name}: expected 1 for the last token of each prompt, got 0")
    return padding


def leave_out(state: BeamState, padding: Tensor | None) -> None:
    """Remove padding from the prompts at the start of a search."""
    if padding is None:
        return
    slots, width, _ = state.sequences.shape
    prompts = state.sequences[:, :, : padding.shape[1]]
    padding = padding.view(slots, width, -1)
    # Attention skips it anywhere, and positions do not count it.
    order = torch.argsort((~padding).to(torch.uint8), dim=-1, stable=True)
    prompts.copy_(prompts.masked_fill(padding, _PADDING).gather(-1, order))


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


class _WithoutEnded:
    """A search whose ended rows have scores of 0."""

    def __init__(self, search: GreedySearch | PlainSearch | GroupSearch) -> None:
        self._search, self._beams = search, search.state.scores.shape[1]
        self._ended: Tensor | None = None

    def ended(self) -> Tensor | None:
        """Return [rows] bool: the rows of ended searches; None before the first has ended."""
        return self._ended

    def step(self, logits: Tensor, input_ids: Tensor) -> NextBeams:
        beams = self._search.step(logits, input_ids)
        prompts = self._search.prompts  # a processor may have changed them
        beams.sequences[:, : prompts.shape[1]] = prompts
        scores, done = self._search.recorder.scores, self._search.state.done
        if self._ended is not None and scores is not None:
            scores[-1][self._ended] = 0.0
        if any(done.tolist()):
            self._ended = (done != 0).repeat_interleave(self._beams)
        return beams

    def finish(self, input_ids: Tensor) -> SearchResult:
        return self._search.finish(input_ids)


def _rows_of_call(
    decoder: PackedDecoder, call: SearchCall, has_ended: Callable[[], Tensor | None] | None = None
) -> MemoryRows:
    batch, prompts = call.settings.batch, call.input_ids.tolist()
    if len(call.memory) != batch:
        raise ValueError(
            f"encoder_outputs: expected the memories of {batch} inputs, as there are so many "
            f"prompts, got {len(call.memory)}"
        )
    if call.padding is not None:
        seen = ~call.padding
        prompts = [row[of].tolist() for row, of in zip(call.input_ids, seen, strict=True)]
    rows = memory_rows(
        decoder, call.memory, call.lengths, prompts, call.settings.max_length, has_ended
    )
    if call.no_speech is not None:
        call.no_speech.read(rows.steps.searches)
    return rows


def decode_by_sampling(decoder: PackedDecoder, call: SearchCall, seed: Any) -> Any:
    """Run the decoder in C++ and draw tokens as ``sample`` does; each step returns to Python.

    The call has one beam. The result is on the CPU.
    """
    model, recorder = _rows_of_call(decoder, call), Recorder(call.model, call.config, {})
    sequences = sample_tokens(
        model, call.input_ids, call.processors, call.criteria, call.config, recorder,
        noise=noise_of_rows(seed, call.input_ids, call.config),
        mask=None if call.padding is None else ~call.padding,
    )  # fmt: skip
    model.release()
    return recorder.result(sequences)


def decode_with_any_rules(decoder: PackedDecoder, call: SearchCall) -> Any:
    """Run the decoder in C++ and choose tokens as ``beam_search`` does, in Python.

    The result is on the CPU. Raises RuntimeError if a prompt has NaN in its logits, or no candidate
    above -inf.
    """
    config, settings, prompts = call.config, call.settings, call.input_ids
    groups, greedy = config.num_beam_groups or 1, settings.num_beams == 1
    recorder = Recorder(call.model, config, {})
    common = (prompts, call.processors, call.criteria, recorder)
    found: GreedySearch | PlainSearch | GroupSearch
    if greedy:
        found = GreedySearch(settings, *common)
    elif groups > 1:
        found = GroupSearch(settings, groups, config.diversity_penalty or 0.0, *common)
    else:
        plain = getattr(call.processors, "search", PlainSearch)  # of other rules
        found = plain(settings, bool(config.do_sample), *common)
    search = _WithoutEnded(found)
    model = _rows_of_call(decoder, call, search.ended)
    result = search.finish(run_search(model, search, prompts))
    model.release()
    return recorder.result(result.sequences) if greedy else recorder.beam_result(result)
