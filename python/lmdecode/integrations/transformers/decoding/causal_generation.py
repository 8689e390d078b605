"""``generate()`` of a decoder-only model with its forward pass in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers.beam.generate_beam_search import search_of_call
from lmdecode.integrations.transformers.beam.loop import run_search
from lmdecode.integrations.transformers.beam.plain_search import end_tokens
from lmdecode.integrations.transformers.decoding.causal_call import CausalCall
from lmdecode.integrations.transformers.decoding.causal_model import CausalModel, LoopDrafts
from lmdecode.integrations.transformers.decoding.engine_call import (
    rules_of_drafts,
    search_on_engine,
    write_on_engine,
)
from lmdecode.integrations.transformers.generate_call import ending
from lmdecode.integrations.transformers.sampling.loop import noise_of_rows, sample_tokens

__all__ = ["decode_causal"]


def decode_causal(
    packed: PackedCausalModel,
    cache_dtype: str,
    call: CausalCall,
    new_model: Callable[..., CausalModel] | None = None,
) -> Any:
    """Decode by the arguments of ``generate()``: greedily, by sampling, or with any beam search.

    ``packed`` and ``cache_dtype`` are as in ``CausalModel``, in whose place ``new_model`` is called
    if it is given. Returns what ``sample`` and ``beam_search`` do, without ``past_key_values``, and
    raises as they do.
    """
    result: Any
    with ending(call.streamer):
        result = None
        if new_model is None and call.fits_engine:
            write = search_on_engine if call.has_beams else write_on_engine
            result = write(packed, cache_dtype, call)
        if result is None:
            result = _decode_by_steps(packed, cache_dtype, call, new_model or CausalModel)
    if call.streamer is not None:
        call.streamer.end()
    if isinstance(result, Tensor):
        return result.to(call.device)
    return result


def _decode_by_steps(
    packed: PackedCausalModel,
    cache_dtype: str,
    call: CausalCall,
    new_model: Callable[..., CausalModel],
) -> Any:
    """Return the result of ``generate()``; each step returns to Python."""
    config, input_ids = call.config, call.input_ids
    recorder = Recorder(call.model, config)
    noise = None if call.has_beams else noise_of_rows(call.seed, input_ids, config)
    drafts = None
    if call.drafting is not None:
        drafts = LoopDrafts(
            call.drafting, rules_of_drafts(packed, call, noise), end_tokens(call.criteria)
        )
    model = new_model(packed, input_ids, call.mask, config.max_length, cache_dtype, drafts)
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
