"""``generate()`` of a decoder-only model with its forward pass in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.rows import LoopRows
from lmdecode.decoder.engine.steps import causal_rows
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers.beam.generate_beam_search import search_of_call
from lmdecode.integrations.transformers.beam.loop import run_search
from lmdecode.integrations.transformers.beam.plain_search import end_tokens
from lmdecode.integrations.transformers.decoding.causal_call import CausalCall
from lmdecode.integrations.transformers.decoding.engine_call import (
    rules_of_drafts,
    search_on_engine,
    write_on_engine,
)
from lmdecode.integrations.transformers.generate_call import ending
from lmdecode.integrations.transformers.sampling.loop import noise_of_rows, sample_tokens

if TYPE_CHECKING:
    from lmdecode.integrations.transformers.decoding.causal_store import StoredCall

__all__ = ["decode_causal"]


def decode_causal(decoding: Any, call: CausalCall, stored: StoredCall | None = None) -> Any:
    """Decode by the arguments of ``generate()``: greedily, by sampling, or with any beam search.

    With ``stored`` the prompt is looked up in a store. Returns what ``sample`` and ``beam_search``
    do, without ``past_key_values``, and raises as they do.
    """
    result: Any
    with ending(call.streamer):
        result = None
        if stored is None and call.fits_engine:
            write = search_on_engine if call.has_beams else write_on_engine
            result = write(decoding, call)
        if result is None:
            result = _decode_by_steps(decoding.decoder, decoding.cache_dtype, call, stored)
    if call.streamer is not None:
        call.streamer.end()
    if isinstance(result, Tensor):
        return result.to(call.device)
    return result


def _rows_of_call(
    packed: PackedCausalModel,
    cache_dtype: str,
    call: CausalCall,
    noise: int | Tensor | None,
    stored: StoredCall | None,
) -> LoopRows:
    """Return the rows of a call, whose prompts have no padding."""
    input_ids = call.input_ids
    if call.mask is None:
        prompts = input_ids.tolist()
    else:
        mask = call.mask.to(input_ids.device) != 0
        prompts = [row[seen].tolist() for row, seen in zip(input_ids, mask, strict=True)]
    of_drafts: dict[str, Any] = {}
    if call.drafting is not None:
        of_drafts = {
            "drafting": call.drafting,
            "rules": rules_of_drafts(packed, call, noise),
            "end_tokens": end_tokens(call.criteria),
        }
    return causal_rows(
        packed,
        cache_dtype,
        prompts,
        max(1, call.config.max_length - input_ids.shape[1]),
        **of_drafts,
        stored=None if stored is None else stored.prompts,
        on_read=None if stored is None else stored.saw,
    )


def _decode_by_steps(
    packed: PackedCausalModel, cache_dtype: str, call: CausalCall, stored: StoredCall | None
) -> Any:
    """Return the result of ``generate()``; each step returns to Python."""
    config, input_ids = call.config, call.input_ids
    recorder = Recorder(call.model, config)
    noise = None if call.has_beams else noise_of_rows(call.seed, input_ids, config)
    model = _rows_of_call(packed, cache_dtype, call, noise, stored)
    if call.has_beams:
        search = search_of_call(
            input_ids, call.processors, call.criteria, config, recorder,
            vocab_size=call.model.config.get_text_config(decoder=True).vocab_size,
            constraints=call.constraints,
            force_words_ids=call.force_words_ids,
        )  # fmt: skip
        return recorder.beam_result(search.finish(run_search(model, search, input_ids)))
    sequences = sample_tokens(
        model, input_ids, call.processors, call.criteria, config, recorder,
        noise=noise, mask=call.mask, streamer=call.streamer,
    )  # fmt: skip
    return recorder.result(sequences)
