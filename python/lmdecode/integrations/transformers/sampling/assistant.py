"""Drafts of an assistant model, drawn with the noise of the assisted model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import AssistedCandidateGenerator

from lmdecode.integrations.transformers.sampling.fusion import keeps_no_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig
    from transformers._typing import GenerativePreTrainedModel

__all__ = ["SpeculativeAssistant"]


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


class SpeculativeAssistant:
    """Draft tokens of an assistant model.

    transformers' ``AssistedCandidateGenerator`` runs the assistant, keeps its cache, and decides
    how many tokens it drafts. Stateful processors are not called for drafts. ``inputs_tensor`` is
    the input of ``generate()``: the tokens, or the input of the encoder; None: not known. ``draw``
    is the assistant's decoding loop, for its ``generate(custom_generate=...)``. Raises ValueError
    if the vocabularies differ, the prompt is embeddings, or the input of an encoder is unknown.
    """

    def __init__(
        self,
        model: GenerativePreTrainedModel,
        assistant: Any,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        inputs_tensor: torch.Tensor | None,
        draw: Callable[..., Any],
    ) -> None:
        sizes = _vocab_size(model), _vocab_size(assistant)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"assistant_model: expected the vocabulary of the model, {sizes[0]} tokens, got "
                f"{sizes[1]}"
            )
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "assistant_model: expected None for inputs_embeds, which are of the model alone"
            )
        if assistant.config.is_encoder_decoder and inputs_tensor is None:
            raise ValueError(
                "assistant_model: expected it as an argument of generate(), which hands on the "
                "input of the encoder"
            )
        self._assistant, self._config, self._draw = assistant, generation_config, draw
        self._processors = LogitsProcessorList(filter(keeps_no_state, logits_processor))
        self._inputs_tensor = inputs_tensor
        self._generator: Any = None

    def propose(
        self, input_ids: torch.Tensor, most: int, model_kwargs: dict[str, Any]
    ) -> list[int]:
        """Return at most ``most`` draft tokens that may follow ``input_ids``, [1, S] int64."""
        if self._generator is None:  # It expects the arguments of its first text.
            self._generator = AssistedCandidateGenerator(
                input_ids,  # type: ignore[arg-type]
                self._assistant,
                self._config,
                model_kwargs,
                self._inputs_tensor,
                self._processors,
            )
            self._generator.assistant_kwargs["custom_generate"] = self._draw
        candidates = self._generator.get_candidates(input_ids)[0]
        drafted: list[int] = candidates[0, input_ids.shape[1] :].tolist()
        return drafted[:most]

    def judge(self, input_ids: torch.Tensor, num_read: int, num_right: int) -> None:
        """Learn how many tokens of the last proposal were right."""
        # Only its length is read.
        counted = torch.empty(1, num_read + 1, 0, dtype=torch.float32, device="cpu")
        self._generator.update_candidate_strategy(input_ids, counted, num_right)

    def close(self) -> None:
        """Store the learned settings in the assistant's config, if the config says so."""
        config = self._assistant.generation_config
        if self._generator is not None and config.num_assistant_tokens_schedule == "heuristic":
            config.num_assistant_tokens = self._generator.num_assistant_tokens
