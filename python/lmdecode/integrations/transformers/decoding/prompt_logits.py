"""Logits after a prompt, by which Whisper's ``generate()`` detects the language."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import Seq2SeqLMOutput

from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.integrations.transformers.decoding.encoder_decoder_generation import memory_of
from lmdecode.integrations.transformers.stand_in import ForwardOf

__all__ = ["PromptLogits"]


class PromptLogits(ForwardOf):
    """The ``forward`` of a Whisper model on packed weights, for a prompt of one token."""

    def __init__(self, kind: type, encoder: Any, decoder: PackedDecoder) -> None:
        super().__init__(kind)
        self._encoder, self._decoder = encoder, decoder

    def __call__(
        self,
        input_features: Tensor | None = None,
        *,
        encoder_outputs: Any = None,
        decoder_input_ids: Tensor,
        use_cache: bool | None = None,
    ) -> Seq2SeqLMOutput:
        """Return logits [B, 1, V] float32 at [B, 1] tokens; ``use_cache`` has no effect."""
        if encoder_outputs is None:
            encoder_outputs = self._encoder(input_features=input_features)
        memory, lengths = memory_of(encoder_outputs, None)
        batch, decoder = len(memory), self._decoder
        state = new_beam_state(batch, 1, 2)
        state.sequences[:, 0, :1] = decoder_input_ids
        state.lengths.fill_(1)
        searches = DecodingSearches(
            decoder,
            state,
            beam_parameters(batch, num_beams=1, prompt_lengths=1),
            new_token_rules(batch),
            memory.shape[1],
            num_candidates=1,
        )
        searches.read_memory(memory, lengths, torch.arange(batch, device="cpu"))
        logits = searches.read_tokens()
        searches.release()
        return Seq2SeqLMOutput(logits=logits[:, None])
