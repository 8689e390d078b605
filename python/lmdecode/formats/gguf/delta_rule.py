"""The order of the delta rule's heads in a GGUF file, and in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.linear.quantized_weight import QuantizedWeight

__all__ = ["ValueHeads"]


class ValueHeads:
    """The order of the delta rule's value heads: llama.cpp has those of a key head apart.

    Its i-th value head is of key head i modulo the number of these.
    """

    def __init__(self, config: Any) -> None:
        self._key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
        self._group, self._size = heads // self._key_heads, config.linear_value_head_dim
        self._before = 2 * self._key_heads * config.linear_key_head_dim

    def _index(self, size: int, before: int = 0) -> Tensor:
        rows = torch.arange(self._group * self._key_heads * size) + before
        grouped = rows.view(self._group, self._key_heads, size).transpose(0, 1).flatten()
        return torch.cat((torch.arange(before), grouped))

    def in_groups(self, parameter: str, tensor: Any) -> Any:
        """Return a parameter with value heads of a key head side by side."""
        name = parameter.rpartition("linear_attn.")[2]
        if self._group == 1 or name == parameter:
            return tensor
        if name == "out_proj.weight":  # columns: blocks of columns cannot be moved in general
            floats = tensor.dequantize() if isinstance(tensor, QuantizedWeight) else tensor
            return floats[:, self._index(self._size)]
        if name in ("in_proj_qkv.weight", "conv1d.weight"):
            index = self._index(self._size, self._before)
        elif name == "in_proj_z.weight":
            index = self._index(self._size)
        elif name == "norm.weight":
            return tensor
        else:
            index = self._index(1)
        return tensor.index_rows(index) if isinstance(tensor, QuantizedWeight) else tensor[index]
