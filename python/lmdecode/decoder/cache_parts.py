"""How keys and values are held, and the parts of one shape that those of all layers are cut into.

A store has a place for keys of one shape, and some models have two: of layers with a window, and
of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode.decoder.causal_config import Heads

__all__ = ["CACHE_DTYPES", "CacheParts", "row_format"]

CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_SCALE_BYTES = 4  # before each key and value of int8


def row_format(head_size: int, dtype: str) -> tuple[torch.dtype, int]:
    """Return the dtype and number of elements that hold a key or value of one head."""
    kind = CACHE_DTYPES[dtype]
    return kind, head_size + (_SCALE_BYTES if kind == torch.int8 else 0)


class CacheParts(NamedTuple):
    """The shape of a part: [kv_heads, tokens, row_size].

    A layer's part has some of its heads and a piece of their rows. Rows that are no whole multiple
    of ``row_size`` end with a narrower piece, and zeros behind it. Where all layers have the same
    heads, a layer is one part.

    Attributes
    ----------
    kv_heads, row_size : int
        Heads, and elements of a row.
    """

    kv_heads: int
    row_size: int

    @staticmethod
    def of(heads: Sequence[Heads], dtype: str) -> CacheParts:
        """Return those of layers with such heads, in caches of a dtype."""
        return CacheParts(
            math.gcd(*(one.num_kv_heads for one in heads)),
            min(row_format(one.head_size, dtype)[1] for one in heads),
        )

    def number_of(self, heads: Heads, dtype: str) -> int:
        """Return how many parts a layer with such heads has."""
        _, size = row_format(heads.head_size, dtype)
        return heads.num_kv_heads // self.kv_heads * -(-size // self.row_size)

    def cut(self, pool: Tensor) -> Iterator[Tensor]:
        """Yield the parts of [num_kv_heads, ..., elements of a row], as views."""
        for rows in pool.split(self.kv_heads):
            yield from rows.split(self.row_size, dim=-1)
