"""Sampling from the decoder of an encoder-decoder model in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.integrations.transformers.beam.settings import new_search
from lmdecode.integrations.transformers.decoding.prompt_padding import leave_out
from lmdecode.integrations.transformers.decoding.search_call import SearchCall
from lmdecode.integrations.transformers.decoding.step_model import StepModel, StepOutputs
from lmdecode.integrations.transformers.sampling.generation import sample

__all__ = ["decode_by_sampling"]


class _Decoder(StepModel):
    """The decoder to the loop of ``sample``."""

    def __init__(self, model: Any, searches: DecodingSearches) -> None:
        self.config, self._searches = model.config, searches
        self._vocab_size = searches.decoder.config.vocab_size

    def _prefill(self, *arguments: Any, **options: Any) -> StepOutputs:
        return StepOutputs(self._searches.read_tokens()[:, None])

    def __call__(self, input_ids: Tensor, **options: Any) -> StepOutputs:
        state = self._searches.state
        # A row that has ended goes on with padding, which may be no token.
        state.sequences[:, 0, input_ids.shape[1] - 1] = input_ids[:, -1].clamp(
            0, self._vocab_size - 1
        )
        state.lengths.fill_(input_ids.shape[1])
        return self._prefill()


def decode_by_sampling(decoder: PackedDecoder, call: SearchCall, seed: Any) -> Any:
    """Run the decoder in C++ and draw as ``sample`` does: each step returns to Python.

    Parameters
    ----------
    decoder, call
        Of one beam.
    seed
        See ``sample``.

    Returns
    -------
    Tensor or GenerateEncoderDecoderOutput
        On the CPU.
    """
    parameters, state = new_search(
        call.settings, call.input_ids, end_tokens=[], keep_beam_indices=False
    )
    parameters.pad_tokens.clamp_(0, decoder.config.vocab_size - 1)
    leave_out(state, call.padding)
    searches = DecodingSearches(
        decoder,
        state,
        parameters,
        new_token_rules(len(state.done)),
        call.memory.shape[1],
        num_candidates=1,
    )
    searches.read_memory(call.memory, call.lengths, torch.arange(call.settings.batch))
    if call.no_speech is not None:
        call.no_speech.read(searches)
    runner: Any = _Decoder(call.model, searches)
    options: dict[str, Any] = {"seed": seed, "use_cache": True, "encoder_outputs": {}}
    if call.padding is not None:  # the noise of a row is that of its own positions
        options["decoder_attention_mask"] = ~call.padding
    result: Any = sample(
        runner, call.input_ids, call.processors, call.criteria, call.config, False, None, **options
    )
    searches.release()
    return result
