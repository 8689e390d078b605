"""Weights of a decoder-only model, written one behind the other into one memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.causal_weight_checks import check_weight
from lmdecode.linear.formats import format_of_head, pack_weight_into
from lmdecode.linear.quantized_weight import JoinedWeight

__all__ = [
    "ALIGNMENT", "IS_BFLOAT16", "IS_FLOAT32", "IS_LOGITS", "IS_PACKED", "LINEAR", "PROJECTIONS",
    "TABLES", "WeightMemory", "format_of",
]  # fmt: skip

ALIGNMENT = 64  # bytes
TABLES = ("embedding", "per_layer_embedding")
PROJECTIONS = ("per_layer_projection", "embedding_projection", "hidden_projection")  # of the model
LINEAR = ("qkv", "attention_out", "ffn_up", "ffn_gate", "ffn_down", "router", "logits",
          "per_layer_gate", "per_layer_out", *PROJECTIONS)  # fmt: skip
# Formats of an embedding, as in csrc/decoder/per_layer_input.h.
IS_LOGITS, IS_FLOAT32, IS_BFLOAT16, IS_PACKED = 0, 1, 2, 3


def format_of(name: str, weight_format: str) -> str:
    """Return the format of a linear weight: experts are chosen by floats."""
    return "float32" if name == "router" else weight_format


class WeightMemory:
    """A memory that weights are written to.

    Parameters
    ----------
    memory : Tensor
        uint8 [bytes], enough for all of them.
    weight_format : str
        Of linear weights.
    formats_of_tables : mapping
        How the rows of each table of tokens are held.

    Attributes
    ----------
    used : int
        Bytes that have been written.
    """

    def __init__(
        self, memory: Tensor, weight_format: str, formats_of_tables: Mapping[str, int]
    ) -> None:
        self.memory, self.used = memory, 0
        self._format, self._formats_of_tables = weight_format, formats_of_tables

    def write(
        self, path: str, name: str, value: Any, experts: Mapping[str, tuple[int, int]]
    ) -> int:
        """Write a weight; return where it begins.

        Parameters
        ----------
        path
            The beginning of its name in errors.
        name, value
            The weight, which fits the config; matrices of experts are checked here, one by one.
        experts
            Names of weights that are matrices of experts, and the shape of one.
        """
        begin, at = self.used, self.memory[self.used :]
        if name in experts:
            size = self._write_experts(f"{path}{name}", value, experts[name], at)
        elif name in LINEAR or self._formats_of_tables.get(name) == IS_PACKED:
            is_table = name in (*TABLES, "logits")
            kind = format_of_head(self._format) if is_table else self._format
            size = pack_weight_into(value, format_of(name, kind), at)
        else:
            value = value if isinstance(value, Tensor) else value.dequantize()
            value = value.T if name == "convolution" else value  # tap by tap
            is_half = self._formats_of_tables.get(name) == IS_BFLOAT16
            dtype = torch.bfloat16 if is_half else torch.float32
            size = value.numel() * dtype.itemsize
            at[:size].view(dtype).view(value.shape).copy_(value.detach())
        end = -(-size // ALIGNMENT) * ALIGNMENT
        at[size:end] = 0  # the same weights give the same bytes
        self.used += end
        return begin

    def _write_experts(self, name: str, matrices: Any, shape: tuple[int, int], to: Tensor) -> int:
        """Write the matrices of experts one behind the other; return their bytes."""
        used, size = 0, None
        for i in range(len(matrices)):
            matrix = matrices[i]  # one at a time
            check_weight(f"{name}[{i}]", matrix, shape, optional=False)
            if isinstance(matrix, JoinedWeight):
                matrix = matrix.dequantize()
            added = pack_weight_into(matrix, self._format, to[used:])
            if size not in (None, added):
                raise ValueError(
                    f"Decoding: weights.{name}[{i}] takes {added} bytes; expected {size}, in the "
                    "format of those before"
                )
            used, size = used + added, added
        return used
