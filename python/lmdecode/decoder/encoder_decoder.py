"""The packed parts of an encoder-decoder model, with their weights in one memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.config import FORMATS, DecoderConfig
from lmdecode.decoder.encoder import EncoderConfig, PackedEncoder
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.linear import PackedLinear

__all__ = ["PackedEncoderDecoder"]

Part = PackedDecoder | PackedEncoder | PackedLinear

_ALIGNMENT = 64  # bytes
_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}  # uint8: of packed weights
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _tensors_of(part: Part) -> list[Tensor]:
    if isinstance(part, PackedLinear):
        return [
            part.packed,
            torch.empty(0, dtype=torch.float32, device="cpu") if part.bias is None else part.bias,
        ]
    return part.tensors


def _fields_of(part: Part) -> dict[str, Any]:
    if isinstance(part, PackedLinear):
        return {"in_features": part.in_features, "out_features": part.out_features}
    return dataclasses.asdict(part.config)


def _part_of(
    name: str, fields: Mapping[str, Any], weight_format: str, tensors: list[Tensor], memory: Tensor
) -> Part:
    """Return the part of what the two functions above return; they lie in a memory."""
    if name == "decoder":
        return PackedDecoder.of_packed(DecoderConfig(**fields), weight_format, tensors, memory)
    if name == "encoder":
        return PackedEncoder.of_packed(EncoderConfig(**fields), weight_format, tensors, memory)
    packed, bias = tensors
    return PackedLinear.from_packed(
        packed, bias if bias.numel() else None, dtype=weight_format, **fields
    )


def _check_decoder(decoder: PackedDecoder) -> None:
    """Raise ValueError where the ops refuse the weights: there is no search."""
    state, parameters = new_beam_state(0, 1, 1), beam_parameters(0, num_beams=1)
    searches = DecodingSearches(decoder, state, parameters, new_token_rules(0), 1, num_candidates=1)
    searches.run(0)
    searches.release()


def _check_encoder(encoder: PackedEncoder) -> None:
    """Raise ValueError where the op refuses the weights: no row is read."""
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    begins = torch.zeros(1, dtype=torch.int64, device="cpu")
    if encoder.config.vocab_size:
        encoder.forward(begins, nothing, tokens=nothing)
    else:
        inputs = torch.empty(0, encoder.config.model_size, dtype=torch.float32, device="cpu")
        encoder.forward(begins, nothing, inputs=inputs)


class PackedEncoderDecoder:
    """Packed parts of an encoder-decoder model, to save or as loaded.

    ``parts`` has the "decoder", optionally the "encoder", and linear layers by other names, all of
    one format. ``weight_format`` is the decoder's.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        decoder = self.parts["decoder"]
        assert isinstance(decoder, PackedDecoder)
        self.weight_format = decoder.weight_format
        self._fields = {name: _fields_of(part) for name, part in self.parts.items()}
        # Dtype, shape and offset of each tensor; tensors that parts share are stored once.
        self._tensors: dict[str, list[tuple[str, list[int], int]]] = {}
        self._size, places = 0, dict[tuple[int, torch.dtype, int], int]()
        for name, part in self.parts.items():
            entries = self._tensors[name] = []
            for tensor in _tensors_of(part):
                key = (tensor.data_ptr(), tensor.dtype, tensor.numel())
                at = places.get(key, self._size) if tensor.numel() else 0
                if tensor.numel() and key not in places:
                    places[key] = at
                    self._size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
                entries.append((_NAMES[tensor.dtype], list(tensor.shape), at))

    @classmethod
    def of_packed(
        cls, config: Mapping[str, Any], weight_format: str, facts: Mapping[str, Any]
    ) -> PackedEncoderDecoder:
        """See ``PackedCausalModel.of_packed``."""
        model = cls.__new__(cls)
        model.weight_format = check_format("Decoding", weight_format, FORMATS)
        model._fields, tensors = {**config}, facts["tensors"]
        if model._fields.keys() != tensors.keys() or "decoder" not in tensors:
            raise ValueError(
                f"tensors of {', '.join(tensors)}; expected {', '.join(model._fields)}, and of "
                "decoder"
            )
        model._tensors = {
            name: [(str(dtype), [int(size) for size in shape], int(at)) for dtype, shape, at in of]
            for name, of in tensors.items()
        }
        for name, of in model._tensors.items():
            for dtype, shape, at in of:
                if dtype not in _DTYPES or min(shape, default=0) < 0 or at < 0 or at % _ALIGNMENT:
                    raise ValueError(
                        f"a tensor of {name} is {dtype} {shape} at {at}; expected float32 or "
                        f"uint8, sizes, and a multiple of {_ALIGNMENT}"
                    )
        return model

    def take(self, memory: Tensor) -> None:
        """Take the weights, packed for this process; raises if they do not fit."""
        self.parts = {}
        for name, of in self._tensors.items():
            tensors = []
            for dtype, shape, at in of:
                size = math.prod(shape) * _DTYPES[dtype].itemsize
                tensors.append(memory[at : at + size].view(_DTYPES[dtype]).view(shape))
            self.parts[name] = part = _part_of(
                name, self._fields[name], self.weight_format, tensors, memory
            )
            if isinstance(part, PackedDecoder):
                _check_decoder(part)
            elif isinstance(part, PackedEncoder):
                _check_encoder(part)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the memory in consecutive parts."""
        at = 0
        for name, of in self._tensors.items():
            for tensor, (_, _, begin) in zip(_tensors_of(self.parts[name]), of, strict=True):
                if tensor.numel() and begin == at:
                    yield tensor
                    padding = -tensor.nbytes % _ALIGNMENT
                    yield torch.zeros(padding, dtype=torch.uint8, device="cpu")
                    at += tensor.nbytes + padding

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of each part's config."""
        return self._fields

    def facts(self) -> dict[str, Any]:
        """Return the metadata, beside config and format, that describes the memory's layout."""
        return {"tensors": self._tensors}

    def first_packed(self) -> int:
        """Return where the first packed weight begins in the memory."""
        return self._packed_places()[0][0]

    def packed_parts(self, memory: Tensor) -> list[tuple[int, int]]:
        """Return where each packed weight begins in the memory, and its bytes."""
        return self._packed_places()

    def _packed_places(self) -> list[tuple[int, int]]:
        return [
            (at, math.prod(shape))
            for of in self._tensors.values()
            for dtype, shape, at in of
            if dtype == "uint8" and math.prod(shape) > 0
        ]
