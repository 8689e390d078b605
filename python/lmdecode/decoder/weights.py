"""Decoder weights as the ops take them: linear ones packed, the others float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode._ops import ops
from lmdecode.decoder.checks import check_layer, check_weights
from lmdecode.decoder.config import (
    FORMATS,
    LINEAR_FIELDS,
    DecoderConfig,
    DecoderWeights,
    float32,
)
from lmdecode.decoder.huge_memory import SpareMemory, gather

__all__ = ["PackedDecoder", "pack_layer"]


def _pack(weight: Tensor | None, weight_format: str) -> Tensor:
    if weight is None:
        return torch.empty(0, dtype=torch.uint8)
    return ops.pack_linear(float32(weight), FORMATS[weight_format])


def _norm_gamma(config: Any, gamma: Tensor | None) -> Tensor | None:
    """Layers have all of their norms; a gamma of None is 1."""
    return torch.ones(config.model_size) if gamma is None else gamma


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


class PackedDecoder:
    """A decoder's weights, packed once.

    Parameters
    ----------
    config : DecoderConfig
        Of the decoder.
    weights : DecoderWeights
        See there; not kept, but for the embeddings where they are float32 already.
    weight_format : {"float32", "bfloat16", "int8", "int4"}
        What linear weights are held as.

    Attributes
    ----------
    tensors, layer_tensors : list of Tensor
        What the ops take: of the whole decoder, and of its layers alone.
    device : torch.device
        The CPU.
    sizes, numbers : list
        The config as the ops take it.
    spare_memory : SpareMemory
        Of searches: their caches and scratch.
    translators : dict
        What ``Decoding.translate`` keeps from call to call, by what was asked for.

    Raises
    ------
    ValueError, TypeError
        Names what has a wrong shape, dtype or type.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        weight_format: str | torch.dtype = "float32",
    ) -> None:
        weight_format = check_format("Decoding", weight_format, FORMATS)
        check_weights(config, weights)
        self.config, self.weight_format = config, weight_format
        self.device = torch.device("cpu")
        self.spare_memory = SpareMemory()
        self.translators: dict[bytes, Any] = {}
        self.sizes, self.numbers = config.sizes(weight_format), config.numbers()
        self.num_positions: int | None = None
        if weights.positions is not None:
            self.num_positions = weights.positions.shape[0] - config.position_offset
        self.num_distances: int | None = None
        if weights.relative_bias is not None:
            self.num_distances = weights.relative_bias.shape[1]
        embedding = float32(weights.embedding)
        tensors = [
            float32(weights.positions),
            float32(weights.relative_bias),
            float32(weights.embedding_norm_gamma),
            float32(weights.embedding_norm_beta),
            float32(weights.final_norm_gamma),
            float32(weights.final_norm_beta),
            _pack(weights.logits, weight_format),
            float32(weights.logits_bias),
        ]
        first_of_layers = len(tensors)
        for layer in weights.layers:
            tensors += pack_layer(config, layer, weight_format)
        self._take_tensors(embedding, tensors, first_of_layers)

    def _take_tensors(self, embedding: Tensor, tensors: list[Tensor], first_of_layers: int) -> None:
        gather(tensors)
        self.tensors, self.layer_tensors = [embedding, *tensors], tensors[first_of_layers:]

    def __getstate__(self) -> dict[str, Any]:
        # Each tensor by itself: with each part of a memory pickle writes the whole of it, and
        # torch.save takes no memory of several dtypes.
        state = self.__dict__.copy()
        del state["spare_memory"], state["layer_tensors"]
        embedding, *tensors = self.tensors
        first_of_layers = len(tensors) - len(self.layer_tensors)
        state["tensors"] = (embedding, [tensor.clone() for tensor in tensors], first_of_layers)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_tensors(*state["tensors"])
        self.spare_memory = SpareMemory()
