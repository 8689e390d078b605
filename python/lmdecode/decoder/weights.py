"""Decoder weights as the ops take them: linear ones packed, the others float32, in one memory."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode.decoder.checks import check_fields, check_layer, check_weights
from lmdecode.decoder.config import (
    FORMATS,
    LINEAR_FIELDS,
    DecoderConfig,
    DecoderWeights,
    LayerWeights,
    float32,
)
from lmdecode.decoder.huge_memory import SpareMemory, gather
from lmdecode.linear.formats import format_of_head, pack_weight

__all__ = ["PackedDecoder", "PackedStack", "packed_layer"]

_NO_PART = -1  # in a layout


def _pack(weight: Tensor | None, weight_format: str) -> Tensor:
    if weight is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return pack_weight(weight, weight_format)


def _norm_gamma(config: Any, gamma: Tensor | None) -> Tensor | None:
    """Layers have all of their norms; a gamma of None is 1."""
    if gamma is None:
        return torch.ones(config.model_size, dtype=torch.float32, device="cpu")
    return gamma


def pack_layer(config: Any, layer: Any, weight_format: str) -> list[Tensor]:
    """Return the 22 tensors of a decoder's layer, or the 14 of an encoder's, which are checked."""
    check_layer(config, layer)
    packed = []
    for name, tensor in layer._asdict().items():
        if name in LINEAR_FIELDS:
            packed.append(_pack(tensor, weight_format))
        elif name.endswith("_gamma"):
            packed.append(float32(_norm_gamma(config, tensor)))
        else:
            packed.append(float32(tensor))
    return packed


class PackedStack:
    """The layers of a decoder or an encoder, with the weights around them, packed once.

    ``tensors`` are float32, or uint8 if packed; missing ones are empty. The first is the embedding,
    which is not copied if it is float32 already; the others are views of ``memory``, uint8 [bytes].
    ``layer_tensors`` are those of the layers. ``layout``, int64 [layers + 1, columns], is the place
    of each part: see csrc/bindings/decoder_checks.h. ``of_layers`` and ``of_model`` are the
    arguments of ops that read the layers alone, or all of it.
    """

    config: Any
    weight_format: str
    tensors: list[Tensor]
    model_fields: ClassVar[tuple[str, ...]] = ()
    layer_fields: ClassVar[tuple[str, ...]] = LayerWeights._fields

    @classmethod
    def of_packed(
        cls, config: Any, weight_format: str, tensors: list[Tensor], memory: Tensor
    ) -> Self:
        """Return a stack of the ``tensors`` of another one, which are kept as they are.

        That packed ones fit the config is for the ops to see.
        """
        stack = cls.__new__(cls)
        stack._take(config, check_format("Decoding", weight_format, FORMATS), tensors, memory)
        for name, tensor in zip(stack._names, tensors, strict=True):
            if name not in LINEAR_FIELDS and tensor.numel():
                check_fields(config, {name: tensor})
        return stack

    def _gather(
        self, config: Any, weight_format: str, embedding: Tensor, others: list[Tensor]
    ) -> None:
        """Move the packed tensors to one memory, and take it."""
        memory = gather(others)
        self._take(config, weight_format, [embedding, *others], memory)

    def _take(self, config: Any, weight_format: str, tensors: list[Tensor], memory: Tensor) -> None:
        self.config, self.weight_format = config, weight_format
        self.tensors, self.memory = tensors, memory
        if len(tensors) != len(self._names):
            raise ValueError(f"{len(tensors)} tensors; expected {len(self._names)}, from config")
        places = [
            tensor.data_ptr() - memory.data_ptr() if tensor.numel() else _NO_PART
            for tensor in tensors[1:]
        ]
        columns, count = len(self.layer_fields), len(self.model_fields)
        self.layer_tensors = tensors[1 + count :]
        first = [*self._sizes_of_tables(), *places[:count]] if count else []
        first += [_NO_PART] * (columns - len(first))
        self.layout = torch.tensor(first + places[count:], device="cpu").view(-1, columns)
        sizes, numbers = config.sizes(weight_format), config.numbers()
        self.of_layers = (memory, self.layout, sizes, numbers)
        self.of_model = (tensors[0], *self.of_layers)

    @property
    def _names(self) -> list[str]:
        """Name of each tensor."""
        return ["embedding", *self.model_fields, *self.layer_fields * self.config.num_layers]

    def _sizes_of_tables(self) -> tuple[int, int, int]:
        """Return the rows of the positions, and rows and columns of the relative bias."""
        positions, bias = self.tensors[1:3]
        return (len(positions), *(bias.shape if bias.dim() == 2 else (0, 0)))

    def __getstate__(self) -> dict[str, Any]:
        # Each tensor by itself: with each part of a memory pickle writes the whole of it, and
        # torch.save takes no memory of several dtypes.
        embedding, *others = self.tensors
        if embedding.untyped_storage().nbytes() != embedding.nbytes:
            embedding = embedding.clone()
        tensors = (embedding, [tensor.clone() for tensor in others])
        return {"config": self.config, "weight_format": self.weight_format, "tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._gather(state["config"], state["weight_format"], *state["tensors"])


class PackedDecoder(PackedStack):
    """A decoder's weights, packed once.

    ``weights`` are not kept, except for embeddings that are float32 already. ``num_positions`` and
    ``num_distances`` count the position embeddings and the relative biases, or are None.
    ``spare_memory`` holds caches and scratch of searches. ``translators`` is the cache of
    ``Decoding.translate``, by its settings. Raises ValueError or TypeError that names the weight
    with a wrong shape, dtype or type.
    """

    config: DecoderConfig
    model_fields = DecoderWeights._fields[1:-1]

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        weight_format: str | torch.dtype = "float32",
    ) -> None:
        weight_format = check_format("Decoding", weight_format, FORMATS)
        check_weights(config, weights)
        tensors = [
            float32(weights.positions),
            float32(weights.relative_bias),
            float32(weights.embedding_norm_gamma),
            float32(weights.embedding_norm_beta),
            float32(weights.final_norm_gamma),
            float32(weights.final_norm_beta),
            _pack(weights.logits, format_of_head(weight_format)),
            float32(weights.logits_bias),
        ]
        for layer in weights.layers:
            tensors += pack_layer(config, layer, weight_format)
        self._gather(config, weight_format, float32(weights.embedding), tensors)

    def _take(self, config: DecoderConfig, *packed: Any) -> None:
        super()._take(config, *packed)
        self.device = torch.device("cpu")
        rows, _, distances = self._sizes_of_tables()
        self.num_positions = rows - config.position_offset if rows else None
        self.num_distances = distances or None
        self.spare_memory = SpareMemory()
        self.translators: dict[bytes, Any] = {}


def packed_layer(config: Any, layer: Any, weight_format: str) -> PackedStack:
    """Return a checked layer of a decoder, the only one of its config."""
    stack = PackedStack()
    stack._gather(config, weight_format, float32(None), pack_layer(config, layer, weight_format))
    return stack
