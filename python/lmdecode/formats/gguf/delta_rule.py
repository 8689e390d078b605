"""The order of the delta rule's heads in a GGUF file, and in transformers."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.formats.gguf.reader import GgufFile
from lmdecode.linear.quantized_weight import (
    LinearWeight,
    QuantizedWeight,
    index_rows,
    join_rows,
)

__all__ = ["KeyHeads", "ValueHeads"]

_ALL_OF_KEY_HEADS = re.compile(r"model\.layers\.(\d+)\.linear_attn\.in_proj_qkvz\.weight")


class ValueHeads:
    """The order of the delta rule's value heads: llama.cpp has those of a key head apart.

    Its i-th value head is of key head i modulo the number of these.
    """

    def __init__(self, config: Any) -> None:
        self._key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
        self._group, self._size = heads // self._key_heads, config.linear_value_head_dim
        self._before = 2 * self._key_heads * config.linear_key_head_dim

    def _index(self, size: int, before: int = 0) -> Tensor:
        rows = torch.arange(self._group * self._key_heads * size, device="cpu") + before
        grouped = rows.view(self._group, self._key_heads, size).transpose(0, 1).flatten()
        return torch.cat((torch.arange(before, device="cpu"), grouped))

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
        return index_rows(tensor, index)


class KeyHeads:
    """Qwen 3 Next's projection, which transformers has as queries to gates of a key head in turn.

    llama.cpp has queries, keys and values of all heads as one tensor, and the gates as another.
    Older files have transformers' as it is.
    """

    def __init__(self, config: Any) -> None:
        self._heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // self._heads * config.linear_value_head_dim
        self._sizes = (keys, keys, values, values)

    def tensors(
        self, parameter: str, shape: tuple[int, ...], tensors: Container[str]
    ) -> dict[str, tuple[int, ...]] | None:
        """Return names and shapes of a parameter's tensors in the file, None where it has one."""
        found = _ALL_OF_KEY_HEADS.fullmatch(parameter)
        if found is None or f"blk.{found[1]}.ssm_in.weight" in tensors:
            return None
        gates = self._sizes[-1] * self._heads
        return {
            f"blk.{found[1]}.attn_qkv.weight": (shape[0] - gates, *shape[1:]),
            f"blk.{found[1]}.attn_gate.weight": (gates, *shape[1:]),
        }

    def read(self, file: GgufFile, names: Sequence[str]) -> LinearWeight:
        """Return the rows of these tensors in transformers' order."""
        joined = join_rows([file.tensor(name) for name in names])
        parts = torch.arange(joined.shape[0], device="cpu").split(
            [size * self._heads for size in self._sizes]
        )
        index = torch.cat([part.view(self._heads, -1) for part in parts], dim=1).flatten()
        return index_rows(joined, index)
