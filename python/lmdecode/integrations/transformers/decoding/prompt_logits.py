"""Logits after a prompt, by which Whisper's ``generate()`` detects the language."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import Seq2SeqLMOutput

from lmdecode.decoder.engine.loop_rows import memory_rows
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
        rows = memory_rows(self._decoder, memory, lengths, decoder_input_ids.tolist(), 2)
        logits = rows.read_prompts(decoder_input_ids)
        rows.release()
        return Seq2SeqLMOutput(logits=logits[:, None])
