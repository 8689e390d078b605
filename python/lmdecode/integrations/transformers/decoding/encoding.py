"""Stand-in for a model's encoder in ``generate()``, which runs the encoder in C++."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from lmdecode.decoder.encoder import CONVOLUTIONS, AudioEncoder, pack_convolution
from lmdecode.models.packed_stack import PackedEncoder
from lmdecode.readers.transformers.encoder_decoder import encoder_of
from lmdecode.readers.transformers.stand_in import is_stand_in

__all__ = ["ModelEncoder", "memory_of", "with_encoder"]


class ModelEncoder:
    """A model's encoder on packed weights.

    For unsupported inputs (embeddings, states of all layers, masks other than runs of ones) the
    model's own encoder runs, if the model has its weights. ``embedding`` is the decoder's [V, D]
    float32, if the model shares it with the encoder.
    """

    def __init__(self, model: Any, dtype: str, embedding: Tensor | None = None) -> None:
        own = model.get_encoder()
        config, weights = encoder_of(model)
        if embedding is not None and weights.embedding is model.get_decoder().embed_tokens.weight:
            weights = weights._replace(embedding=embedding)
        parts: dict[str, Any] = {"encoder": PackedEncoder(config, weights, dtype)}
        for name in CONVOLUTIONS:
            if hasattr(own, name):
                convolution = getattr(own, name)
                parts[name] = pack_convolution(convolution.weight, convolution.bias, dtype)
        self._take(model, parts)

    @classmethod
    def of_parts(cls, model: Any, parts: Mapping[str, Any]) -> ModelEncoder:
        """Return the encoder of a packed model, from its ``parts``."""
        encoder = cls.__new__(cls)
        encoder._take(model, parts)
        return encoder

    def _take(self, model: Any, parts: Mapping[str, Any]) -> None:
        self._own, self._kind = model.get_encoder(), model.config.model_type
        self._padding = model.config.pad_token_id
        around = getattr(model.config, "ctranslate2", None) or {}
        self._before, self._behind = around.get("before", []), around.get("behind", [])
        self.parts = {name: parts[name] for name in ("encoder", *CONVOLUTIONS) if name in parts}
        self._packed: PackedEncoder = self.parts["encoder"]
        is_audio = all(name in parts for name in CONVOLUTIONS)
        if is_audio != all(hasattr(self._own, name) for name in CONVOLUTIONS):
            kind = f"a model of type {self._kind!r}"
            raise ValueError(f"{kind} with parts {', '.join(parts)}; expected its own parts")
        self._audio = AudioEncoder(self.parts) if is_audio else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return a ``BaseModelOutput``; masked positions are 0."""
        found = None
        if inputs_embeds is None and not output_attentions and not output_hidden_states:
            if input_features is not None:
                found = self._of_features(input_features)
            elif input_ids is not None:
                found = self._of_tokens(input_ids, attention_mask)
        if found is not None:
            return BaseModelOutput(last_hidden_state=found)
        given: dict[str, Any] = {
            "input_ids": input_ids,
            "input_features": input_features,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
        }
        given = {name: value for name, value in given.items() if value is not None}
        outputs = {
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        if is_stand_in(self._own):
            raise ValueError(self._what_is_not_packed(given, outputs))
        return self._own(**given, **outputs, return_dict=return_dict)

    __call__ = forward

    def _what_is_not_packed(self, given: Mapping[str, Any], outputs: Mapping[str, Any]) -> str:
        """Return the error for an input that needs the weights of the model's own encoder."""
        asked = [name for name, value in outputs.items() if value]
        if asked:
            what = f"{asked[0]} is True; expected False"
        elif "inputs_embeds" in given:
            what = "inputs_embeds is given; expected input_ids"
        elif "input_features" in given:
            size, longest = self._features_shape
            what = (
                f"input_features has shape {list(given['input_features'].shape)} on "
                f"{given['input_features'].device}; expected [batch, {size}, {longest}] on cpu"
            )
        elif "attention_mask" in given:
            what = (
                f"attention_mask of shape {list(given['attention_mask'].shape)} is not one run of "
                "ones in each row of input_ids; expected such a mask"
            )
            if self._kind == "m2m_100":
                what += ", with 0 for every padding token"
        else:
            what = "input_ids is None or not [batch, length] on cpu; expected such"
        return (
            f"Decoding.generate: {what}, as decoding.model has no weights for its own encoder; "
            "with Decoding.from_pretrained(..., keep_model=True) it has"
        )

    @property
    def takes_tokens(self) -> bool:
        """True if the input is tokens, not features."""
        return self._audio is None

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens of a source, None if unlimited."""
        return self._packed.longest

    @property
    def _features_shape(self) -> list[int]:
        """Channels and frames of the features."""
        assert self._audio is not None
        return [self._audio.channels, self._audio.frames]

    def whole_source(self, source: Sequence[int]) -> Sequence[int]:
        """Return a source with the tokens that a folder of CTranslate2 puts around each."""
        return [*self._before, *source, *self._behind]

    def whole_sources(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return rows, [B, S] with a mask or None, as ``whole_source``, padded on the right."""
        padding = 0 if self._padding is None else self._padding
        seen = mask != 0 if mask is not None else ids != (-1 if self._padding is None else padding)
        rows = [
            ids.new_tensor(self.whole_source(row[of_row].tolist()))
            for row, of_row in zip(ids, seen, strict=True)
        ]
        pad, ones = torch.nn.utils.rnn.pad_sequence, [torch.ones_like(row) for row in rows]
        return pad(rows, True, padding), pad(ones, True, 0)

    def check_source(self, name: str, source: Sequence[int]) -> None:
        """Raise ValueError for tokens that the model does not accept."""
        most, tokens = self.longest, self._packed.config.vocab_size
        if not source or (most is not None and len(source) > most):
            expected = "at least 1" if most is None else f"1 to {most}"
            raise ValueError(f"{name} has {len(source)} tokens; expected {expected}")
        if min(source) < 0 or max(source) >= tokens:
            i = next(i for i, token in enumerate(source) if not 0 <= token < tokens)
            raise ValueError(f"{name}: tokens[{i}] is {source[i]}; expected 0 to {tokens - 1}")
        if self._kind == "m2m_100" and self._padding in source:
            i = source.index(self._padding)
            raise ValueError(
                f"{name}: tokens[{i}] is {source[i]}; expected no padding, which has no position"
            )

    def check_features(self, name: str, features: Tensor) -> None:
        """Raise ValueError for features, [channels, frames], that the model does not accept."""
        shape = list(features.shape)
        if shape != self._features_shape:
            raise ValueError(f"{name} has shape {shape}; expected {self._features_shape}")

    def memory_of_tokens(self, source: Sequence[int]) -> Tensor:
        """Return [S, D] float32 of one source."""
        return self.memories([source])[0][0]

    def memory_of_features(self, features: Tensor) -> Tensor:
        """Return [S, D] float32 of [channels, 2 S]."""
        memory: Tensor = self(input_features=features[None]).last_hidden_state[0]
        return memory

    def memories(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return [n, S, D] float32 of sources of tokens, and their lengths, [n] int64.

        Rows after the end of a source are 0.
        """
        counts = [len(source) for source in sources]
        lengths, longest = torch.tensor(counts, device="cpu"), max(counts)
        begins = torch.tensor([0, *accumulate(counts)], device="cpu")
        places = torch.tensor([*chain.from_iterable(map(range, counts))], device="cpu")
        tokens = torch.tensor([*chain.from_iterable(sources)], device="cpu")
        rows = self._packed.forward(begins, places, tokens=tokens)
        return _placed(rows, torch.arange(longest, device="cpu") < lengths[:, None]), lengths

    def _of_tokens(self, ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Return [B, S, D], or None if the mask has several runs of ones in a row."""
        if ids.dim() != 2 or ids.device.type != "cpu":
            return None
        places = torch.arange(ids.shape[1], device="cpu").expand(ids.shape)
        if attention_mask is None:
            mask = torch.ones(ids.shape, dtype=torch.bool, device="cpu")
        elif attention_mask.shape != ids.shape:
            return None
        else:
            mask = attention_mask.bool()
        lengths, first = mask.sum(dim=1), mask.int().argmax(dim=1)
        within = places - first[:, None]
        if not torch.equal(mask, (within >= 0) & (within < lengths[:, None])):
            return None
        if self._kind == "m2m_100":  # positions do not count padding
            if not torch.equal(ids != self._padding, mask):
                return None
            places = within
        begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        rows = self._packed.forward(begins, places[mask], tokens=ids[mask].long())
        return _placed(rows, mask)

    def _of_features(self, features: Tensor) -> Tensor | None:
        """Return [B, S, D] of [B, channels, 2 S]: Whisper's."""
        if self._audio is None or features.dim() != 3 or features.device.type != "cpu":
            return None
        if list(features.shape[1:]) != self._features_shape:
            return None  # the model's own encoder raises the error
        return self._audio.forward(features)


def _placed(rows: Tensor, mask: Tensor) -> Tensor:
    """Return [B, S, D]: rows [n, D] where the mask [B, S] is true, one after the other, else 0."""
    if len(rows) == mask.numel():
        return rows.view(*mask.shape, -1)
    states = rows.new_zeros(*mask.shape, rows.shape[1])
    states[mask] = rows
    return states


def with_encoder(model: Any, encoder: Any) -> Any:
    """Return a copy of the model whose ``get_encoder()`` returns ``encoder``."""
    runner = copy.copy(model)  # a shallow copy: modules and weights are shared
    runner.__dict__["get_encoder"] = lambda modality=None: encoder
    return runner


def memory_of(
    encoder_outputs: Any,
    attention_mask: Tensor | None,
    device: torch.device = torch.device("cpu"),  # noqa: B008  a constant
) -> tuple[Tensor, Tensor]:
    """Return the memories, [B, S, M] float32, and their lengths, [B] int64, on a device.

    Masked positions are removed: attention to a memory does not depend on its order.
    """
    memory = encoder_outputs[0].detach().to(device=device, dtype=torch.float32)
    if attention_mask is None:
        full = torch.full((len(memory),), memory.shape[1], dtype=torch.int64, device=device)
        return memory, full
    mask = attention_mask.to(device).bool()
    lengths = mask.sum(dim=1)
    places = torch.arange(mask.shape[1], device=device)
    if not torch.equal(mask, places < lengths[:, None]):
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
        memory = memory.gather(1, order[..., None].expand_as(memory))
    return memory, lengths
