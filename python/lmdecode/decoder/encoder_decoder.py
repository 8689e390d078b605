"""The packed parts of an encoder-decoder model, with their weights in one memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.encoder import PackedEncoder
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
    return [part.embedding, part.memory]


_STACKS: dict[str, type[PackedDecoder] | type[PackedEncoder]] = {
    "decoder": PackedDecoder,
    "encoder": PackedEncoder,
}


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
    one format.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        self._linear: dict[str, tuple[Tensor, Tensor, Mapping[str, int]]] = {}
        # Dtype, shape and offset of each tensor; tensors that parts share are stored once.
        self._places: dict[str, list[tuple[str, list[int], int]]] = {}
        size, places = 0, dict[tuple[int, torch.dtype, int], int]()
        for name, part in self.parts.items():
            entries = self._places[name] = []
            for tensor in _tensors_of(part):
                key = (tensor.data_ptr(), tensor.dtype, tensor.numel())
                at = places.get(key, size) if tensor.numel() else 0
                if tensor.numel() and key not in places:
                    places[key] = at
                    size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
                entries.append((_NAMES[tensor.dtype], list(tensor.shape), at))

    @classmethod
    def of_memory(cls, memory: Tensor, facts: Mapping[str, Any]) -> PackedEncoderDecoder:
        """See ``PackedCausalModel.of_memory``."""
        model = cls.__new__(cls)
        model.parts, model._places, model._linear = {}, {}, {}
        for name, of in facts["places"].items():
            tensors = []
            for dtype, shape, at in of:
                if dtype not in _DTYPES or min(shape, default=0) < 0 or at < 0 or at % _ALIGNMENT:
                    raise ValueError(
                        f"a tensor of {name} is {dtype} {shape} at {at}; expected float32 or "
                        f"uint8, sizes, and a multiple of {_ALIGNMENT}"
                    )
                size = math.prod(shape) * _DTYPES[dtype].itemsize
                tensors.append(memory[at : at + size].view(_DTYPES[dtype]).view(shape))
            first, second = tensors
            if name in _STACKS:
                model.parts[name] = _STACKS[name].of_memory(first, second)
            else:
                model._linear[name] = (first, second, facts["sizes"][name])
            model._places[name] = of
        if "decoder" not in model.parts:
            raise ValueError(f"parts are {', '.join(model.parts)}; expected a decoder")
        return model

    @property
    def weight_format(self) -> str:
        """The decoder's format."""
        return self.parts["decoder"].weight_format  # type: ignore[union-attr]

    def check(self) -> None:
        """Add the linear layers; raises ValueError where the ops refuse any weights."""
        for name, (packed, bias, sizes) in self._linear.items():
            self.parts[name] = PackedLinear.from_packed(
                packed, bias if bias.numel() else None, dtype=self.weight_format, **sizes
            )
        for part in self.parts.values():
            if isinstance(part, PackedDecoder):
                _check_decoder(part)
            elif isinstance(part, PackedEncoder):
                _check_encoder(part)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the memory in consecutive parts."""
        at = 0
        for name, of in self._places.items():
            for tensor, (_, _, begin) in zip(_tensors_of(self.parts[name]), of, strict=True):
                if tensor.numel() and begin == at:
                    yield tensor
                    padding = -tensor.nbytes % _ALIGNMENT
                    yield torch.zeros(padding, dtype=torch.uint8, device="cpu")
                    at += tensor.nbytes + padding

    def facts(self) -> dict[str, Any]:
        """Return what describes the memory, beside the records in it."""
        sizes = {
            name: {"in_features": part.in_features, "out_features": part.out_features}
            for name, part in self.parts.items()
            if isinstance(part, PackedLinear)
        }
        return {"places": self._places, "sizes": sizes}

    def first_packed(self) -> int:
        """Return where a packed weight begins in the memory."""
        return self.packed_parts()[0][0]

    def packed_parts(self) -> list[tuple[int, int]]:
        """Return where each packed weight begins in the memory, and its bytes."""
        parts = []
        for name, ((_, shape, first), (_, _, second)) in self._places.items():
            part = self.parts.get(name)
            if isinstance(part, PackedDecoder | PackedEncoder):
                parts += [(second + at, size) for at, size in part.packed_parts()]
            else:
                parts.append((first, math.prod(shape)))
        return parts
