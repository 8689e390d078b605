"""What ``generate()`` of a Whisper model calls beside its loop: encoder, language, alignment."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.weights import PackedDecoder

__all__ = ["CallEncoder", "cross_attentions", "with_first_logits"]


class CallEncoder:
    """The encoder of one call of ``generate()``, which runs once for an audio.

    ``generate()`` asks for the same windows again: to detect the language, and with each
    temperature.

    Parameters
    ----------
    encoder
        Takes features, [B, channels, frames].
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._features: list[Tensor] = []
        self._memories: list[Tensor] = []

    def forward(self, input_features: Tensor, **options: Any) -> Any:
        """Return a ``BaseModelOutput``; attentions are not among it."""
        options.pop("output_attentions", None)  # asked for with those of the decoder
        places = [self._place_of(features) for features in input_features]
        new = [number for number, place in enumerate(places) if place is None]
        if len(new) == len(places):
            found = self._encoder(input_features=input_features, **options)
            self._features, self._memories = list(input_features), list(found[0])
            return found
        memories = [None if place is None else self._memories[place] for place in places]
        if new:
            found = self._encoder(input_features=input_features[new], **options)
            for number, memory in zip(new, found[0], strict=True):
                memories[number] = memory
        rows = [memory for memory in memories if memory is not None]
        self._features, self._memories = list(input_features), rows
        return BaseModelOutput(last_hidden_state=torch.stack(rows))

    __call__ = forward

    def _place_of(self, features: Tensor) -> int | None:
        for place, known in enumerate(self._features):
            if known.shape == features.shape and torch.equal(known, features):
                return place
        return None


def with_first_logits(runner: Any, decoder: Any, encoder: Any) -> None:
    """Let a model, which nobody else has, say in C++ what follows the first token.

    ``detect_language`` calls the model itself. All other calls are the model's own.

    Parameters
    ----------
    runner
        Of transformers; its ``forward`` is replaced.
    decoder
        A ``PackedDecoder``, or another.
    encoder
        See ``CallEncoder``.
    """
    own = runner.forward

    @functools.wraps(own)
    def forward(
        input_features: Tensor | None = None,
        *,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        use_cache: bool | None = None,
        **others: Any,
    ) -> Any:
        ids = decoder_input_ids
        if isinstance(decoder, PackedDecoder) and not others and ids is not None:
            if ids.shape[1] == 1 and ids.device.type == "cpu":
                if encoder_outputs is None:
                    encoder_outputs = encoder(input_features=input_features)
                memory = encoder_outputs[0].detach().float()
                return Seq2SeqLMOutput(logits=_first_logits(decoder, memory, ids)[:, None])
        return own(
            input_features,
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=encoder_outputs,
            use_cache=use_cache,
            **others,
        )

    runner.__dict__["forward"] = forward


def _first_logits(decoder: PackedDecoder, memory: Tensor, ids: Tensor) -> Tensor:
    """Return [B, V] behind one token each, [B, 1], of memories [B, S, M]."""
    batch, source = memory.shape[:2]
    state = new_beam_state(batch, 1, 2, keep_beam_indices=False)
    state.sequences[:, 0, :1] = ids
    state.lengths.fill_(1)
    parameters = beam_parameters(
        batch, 1, prompt_lengths=1, max_lengths=2, end_tokens=[], pad_tokens=0
    )
    searches = DecodingSearches(
        decoder, state, parameters, new_token_rules(batch), source, num_candidates=1
    )
    searches.read_memory(memory, torch.full((batch,), source), torch.arange(batch))
    logits = searches.read_tokens()
    searches.release()
    return logits


def cross_attentions(
    model: Any, sequences: Tensor, memory: Tensor, padding: Tensor | None, num_beams: int
) -> tuple[tuple[Tensor, ...]]:
    """Return what the decoder's layers attend to in a memory, by one pass over found tokens.

    Parameters
    ----------
    model
        Whisper, whose attention is the eager one.
    sequences : Tensor
        [B, length] int64; the last token is not read.
    memory : Tensor
        [B, S, M].
    padding : Tensor, optional
        [B * num_beams, prompt] bool: what of the prompts is padding.
    num_beams
        Of an audio: each gets the attentions of what was found.

    Returns
    -------
    tuple of one tuple of Tensor
        As the only step of all: of each layer [B * num_beams, heads, length - 1, S].
    """
    inputs = sequences[:, :-1]
    options: dict[str, Any] = {}
    if padding is not None:
        seen = ~padding[::num_beams]
        mask = torch.cat([seen, seen.new_ones(len(seen), inputs.shape[1] - seen.shape[1])], dim=1)
        mask = mask.long()
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        options = {"attention_mask": mask, "position_ids": places}
    found = model.get_decoder()(
        input_ids=inputs,
        encoder_hidden_states=memory.to(model.dtype),
        output_attentions=True,
        use_cache=False,
        **options,
    )
    return (tuple(layer.repeat_interleave(num_beams, 0) for layer in found.cross_attentions),)
