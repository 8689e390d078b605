"""Sampling from the decoder of an encoder-decoder model in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.integrations.transformers._recorder import Recorder
from lmdecode.integrations.transformers.beam.settings import new_search
from lmdecode.integrations.transformers.decoding.prompt_padding import leave_out
from lmdecode.integrations.transformers.decoding.search_call import SearchCall
from lmdecode.integrations.transformers.sampling.loop import noise_of_rows, sample_tokens

__all__ = ["decode_by_sampling"]


class _Decoder:
    """The decoder as ``StepwiseModel``, without reordering of rows."""

    def __init__(self, searches: DecodingSearches) -> None:
        self._searches = searches
        self._vocab_size = searches.decoder.config.vocab_size

    def read_prompts(self, input_ids: Tensor) -> Tensor:
        return self._searches.read_tokens()

    def read(self, input_ids: Tensor) -> Tensor:
        state = self._searches.state
        # A finished row continues with padding, which may be outside the vocabulary.
        state.sequences[:, 0, input_ids.shape[1] - 1] = input_ids[:, -1].clamp(
            0, self._vocab_size - 1
        )
        state.lengths.fill_(input_ids.shape[1])
        return self._searches.read_tokens()

    def reorder(self, parents: Tensor) -> None:
        raise NotImplementedError


def decode_by_sampling(decoder: PackedDecoder, call: SearchCall, seed: Any) -> Any:
    """Run the decoder in C++ and draw tokens as ``sample`` does; each step returns to Python.

    The call has one beam. The result is on the CPU.
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
    searches.read_memory(call.memory, call.lengths, torch.arange(call.settings.batch, device="cpu"))
    if call.no_speech is not None:
        call.no_speech.read(searches)
    recorder = Recorder(call.model, call.config, {})
    sequences = sample_tokens(
        _Decoder(searches), call.input_ids, call.processors, call.criteria, call.config, recorder,
        noise=noise_of_rows(seed, call.input_ids, call.config),
        mask=None if call.padding is None else ~call.padding,
    )  # fmt: skip
    searches.release()
    return recorder.result(sequences)
