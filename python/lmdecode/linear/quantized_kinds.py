"""The block types of llama.cpp: weights and bytes of a block."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "Kind"]


class Kind(NamedTuple):
    """A type of blocks.

    Attributes
    ----------
    block_size : int
        Number of weights of a block, which are consecutive in a row.
    block_bytes : int
        Number of bytes of a block.
    number : int
        Number of the type in files.
    """

    block_size: int
    block_bytes: int
    number: int


#: By the names of ggml; ``lmdecode.reference.gguf`` reads the blocks.
KINDS: dict[str, Kind] = {
    "Q4_0": Kind(32, 18, 2),
    "Q4_1": Kind(32, 20, 3),
    "Q5_0": Kind(32, 22, 6),
    "Q5_1": Kind(32, 24, 7),
    "Q8_0": Kind(32, 34, 8),
    "Q2_K": Kind(256, 84, 10),
    "Q3_K": Kind(256, 110, 11),
    "Q4_K": Kind(256, 144, 12),
    "Q5_K": Kind(256, 176, 13),
    "Q6_K": Kind(256, 210, 14),
    "IQ4_NL": Kind(32, 18, 20),
    "IQ4_XS": Kind(256, 136, 23),
    "MXFP4": Kind(32, 17, 39),
}
