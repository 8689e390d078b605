"""Decoder weights as the ops take them: linear ones packed, the others float32."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode.decoder.checks import check_layer, check_weights
from lmdecode.decoder.config import (
    FORMATS,
    LINEAR_FIELDS,
    DecoderConfig,
    DecoderWeights,
    float32,
)
from lmdecode.decoder.huge_memory import SpareMemory, gather
from lmdecode.linear_formats import format_of_head, pack_weight

__all__ = ["PackedDecoder", "PackedStack", "pack_layer"]

_FIRST_OF_LAYERS = 9  # of a decoder's tensors


def _pack(weight: Tensor | None, weight_format: str) -> Tensor:
    if weight is None:
        return torch.empty(0, dtype=torch.uint8)
    return pack_weight(weight, weight_format)


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


def size_of_table(table: Tensor, dim: int) -> int | None:
    """Return a size of one of a stack's tensors, None where it is empty: there is no such table."""
    return table.shape[dim] if table.dim() == 2 else None


class PackedStack:
    """The layers of a decoder or of an encoder, and what is before and behind them, packed once.

    Attributes
    ----------
    config
        Of the stack.
    weight_format : {"float32", "bfloat16", "int8", "int4"}
        What linear weights are held as.
    tensors : list of Tensor
        What the ops take: float32, or uint8 of packed weights; of what is not there, empty ones.
        The first is the embedding, which is not copied where it is float32 already.
    """

    config: Any
    weight_format: str
    tensors: list[Tensor]

    @classmethod
    def of_packed(cls, config: Any, weight_format: str, tensors: list[Tensor]) -> Self:
        """Return a stack of the ``tensors`` of another one, which are kept as they are.

        That they fit the config is for the ops to see.
        """
        stack = cls.__new__(cls)
        stack._take(config, check_format("Decoding", weight_format, FORMATS), tensors)
        return stack

    def _gather(
        self, config: Any, weight_format: str, embedding: Tensor, others: list[Tensor]
    ) -> None:
        """Move what was packed to one memory, and take it."""
        gather(others)
        self._take(config, weight_format, [embedding, *others])

    def _take(self, config: Any, weight_format: str, tensors: list[Tensor]) -> None:
        self.config, self.weight_format, self.tensors = config, weight_format, tensors

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
    num_positions, num_distances : int or None
        That there are embeddings, or relative biases, for.
    spare_memory : SpareMemory
        Of searches: their caches and scratch.
    translators : dict
        What ``Decoding.translate`` keeps from call to call, by what was asked for.

    Raises
    ------
    ValueError, TypeError
        Names what has a wrong shape, dtype or type.
    """

    config: DecoderConfig

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

    def _take(self, config: DecoderConfig, weight_format: str, tensors: list[Tensor]) -> None:
        super()._take(config, weight_format, tensors)
        self.layer_tensors = tensors[_FIRST_OF_LAYERS:]
        self.device = torch.device("cpu")
        self.sizes, self.numbers = config.sizes(weight_format), config.numbers()
        positions, relative_bias = tensors[1:3]
        rows = size_of_table(positions, 0)
        self.num_positions = None if rows is None else rows - config.position_offset
        self.num_distances = size_of_table(relative_bias, 1)
        self.spare_memory = SpareMemory()
        self.translators: dict[bytes, Any] = {}
