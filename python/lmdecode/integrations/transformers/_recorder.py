"""The optional outputs of ``generate()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from lmdecode.integrations.transformers.generate_call import CACHE

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel


class SearchResult(NamedTuple):
    """The best sequences, [batch * num_return_sequences, length] int64, and their scores.

    ``beam_indices``, [n, generated tokens] int32, is the row of each step's scores that a token
    comes from, -1 after the end.
    """

    sequences: Tensor
    scores: Tensor
    beam_indices: Tensor | None


class Recorder:
    """Collects the fields of ``return_dict_in_generate`` over the steps."""

    def __init__(
        self,
        model: GenerativePreTrainedModel,
        config: GenerationConfig,
        encoder_outputs: Any = None,
    ) -> None:
        self.is_encoder_decoder = model.config.is_encoder_decoder
        self.returns_dict = bool(config.return_dict_in_generate)
        self.keeps_sequences_scores = bool(config.output_scores)

        def wanted(flag: bool | None) -> tuple | None:
            return () if self.returns_dict and flag else None

        self.scores = wanted(config.output_scores)
        self.logits = wanted(config.output_logits)
        self.attentions = wanted(config.output_attentions)
        self.cross_attentions = wanted(config.output_attentions and self.is_encoder_decoder)
        self.hidden_states = wanted(config.output_hidden_states)
        self.encoder: dict[str, Any] = {}
        if self.returns_dict and encoder_outputs is not None:
            if config.output_attentions:
                self.encoder["encoder_attentions"] = encoder_outputs.get("attentions")
            if config.output_hidden_states:
                self.encoder["encoder_hidden_states"] = encoder_outputs.get("hidden_states")

    def copy_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return logits [B, V] for ``record``, None if they are not requested.

        It is a copy, as a view would keep the logits of a whole prompt alive.
        """
        return None if self.logits is None else logits.to(torch.float32, copy=True)

    def record(self, scores: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """Add one step; scores and logits are [B, V] float32, used if requested."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def record_outputs(self, outputs: Any) -> None:
        """Add a step's other outputs of the model."""
        prefix = "decoder_" if self.is_encoder_decoder else ""
        if self.attentions is not None:
            self.attentions += (getattr(outputs, f"{prefix}attentions"),)
        if self.cross_attentions is not None:
            self.cross_attentions += (outputs.cross_attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (getattr(outputs, f"{prefix}hidden_states"),)

    def result(
        self, sequences: torch.Tensor, cache: Any = None
    ) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        """Return the result of ``generate()``; ``sequences`` is [B, length] int64.

        cache: the result's ``past_key_values``, since transformers 5.24 its ``cache``.
        """
        if not self.returns_dict:
            return sequences
        fields = {"sequences": sequences, **self._common(cache)}
        if self.is_encoder_decoder:
            return GenerateEncoderDecoderOutput(**fields)
        return GenerateDecoderOnlyOutput(**fields)

    def beam_result(
        self, result: SearchResult, cache: Any = None
    ) -> torch.Tensor | GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput:
        """Return the result of ``generate()`` for beam search."""
        if not self.returns_dict:
            return result.sequences
        fields = {
            "sequences": result.sequences,
            "sequences_scores": result.scores if self.keeps_sequences_scores else None,
            "beam_indices": result.beam_indices,
            **self._common(cache),
        }
        if self.is_encoder_decoder:
            return GenerateBeamEncoderDecoderOutput(**fields)
        return GenerateBeamDecoderOnlyOutput(**fields)

    def _common(self, cache: Any) -> dict[str, Any]:
        """Return the fields that every kind of output has."""
        common: dict[str, Any] = {
            "scores": self.scores,
            "logits": self.logits,
            CACHE: cache,
        }
        if not self.is_encoder_decoder:
            return common | {"attentions": self.attentions, "hidden_states": self.hidden_states}
        return common | {
            **self.encoder,
            "decoder_attentions": self.attentions,
            "cross_attentions": self.cross_attentions,
            "decoder_hidden_states": self.hidden_states,
        }
