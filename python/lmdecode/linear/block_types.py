"""The block types of llama.cpp: weights and bytes of a block."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "BlockType"]


class BlockType(NamedTuple):
    """A type of blocks: ``number`` is its number in files."""

    block_size: int  # weights, consecutive in a row
    block_bytes: int
    number: int


#: By the names of ggml; ``lmdecode.reference.gguf`` reads the blocks.
KINDS: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 2),
    "Q4_1": BlockType(32, 20, 3),
    "Q5_0": BlockType(32, 22, 6),
    "Q5_1": BlockType(32, 24, 7),
    "Q8_0": BlockType(32, 34, 8),
    "Q2_K": BlockType(256, 84, 10),
    "Q3_K": BlockType(256, 110, 11),
    "Q4_K": BlockType(256, 144, 12),
    "Q5_K": BlockType(256, 176, 13),
    "Q6_K": BlockType(256, 210, 14),
    "IQ4_NL": BlockType(32, 18, 20),
    "IQ4_XS": BlockType(256, 136, 23),
    "MXFP4": BlockType(32, 17, 39),
}
