"""The tensors of a batch of decoder searches: caches, and rules for tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode.decoder.config import DecoderConfig

__all__ = ["DecodingCaches", "TokenRules", "caches_bytes", "new_caches", "new_token_rules"]

BLOCK = 16  # floats: heads and sources are padded to it
ALWAYS = (1 << 62) - 1  # a length that no sequence has


class TokenRules(NamedTuple):
    """What is done to log-probabilities before tokens are chosen, slot by slot.

    Without beams it is done to the logits, as in transformers.

    Attributes
    ----------
    repetition_penalty : Tensor
        [slots] float32 > 0; 1 is off.
    no_repeat_ngram_size : Tensor
        [slots] int64; 0 is off.
    diversity_penalty : Tensor
        [slots] float32, for each time that an earlier group of the request chose the token.
    bans : Tensor
        [slots, n, 4] int64: a token (-1: none), the first and the last length of a sequence that it
        cannot be added to, and 1 where that also holds for a forced token.
    forced : Tensor
        [slots, n, 2] int64: a length (-1: none), and the token that follows there.
    bias : Tensor
        [V] float32, added to all rows, or empty.
    """

    repetition_penalty: Tensor
    no_repeat_ngram_size: Tensor
    diversity_penalty: Tensor
    bans: Tensor
    forced: Tensor
    bias: Tensor


class DecodingCaches(NamedTuple):
    """Keys and values, which stay where they were written.

    ``rows`` are the slots' beams, heads are padded to a multiple of 16 floats.

    Attributes
    ----------
    self_keys, self_values : Tensor
        [layers, rows, heads, capacity, padded head] float32.
    cross_keys : Tensor
        [layers, requests, heads, padded head, source] float32: the source runs along memory.
    cross_values : Tensor
        [layers, requests, heads, source, padded head] float32.
    memory_lengths : Tensor
        [requests] int64.
    table : Tensor
        [rows, capacity] int32: the row of ``self_keys`` that holds each position of a beam.
    cached_lengths : Tensor
        [requests] int64: positions whose keys have been written.
    """

    self_keys: Tensor
    self_values: Tensor
    cross_keys: Tensor
    cross_values: Tensor
    memory_lengths: Tensor
    table: Tensor
    cached_lengths: Tensor


def padded(size: int) -> int:
    """Return the next multiple of the block."""
    return -(-size // BLOCK) * BLOCK


def new_token_rules(slots: int, num_bans: int = 0, num_forced: int = 0) -> TokenRules:
    """Return rules that do nothing."""
    with torch.inference_mode(False):
        return TokenRules(
            torch.ones(slots),
            torch.zeros(slots, dtype=torch.int64),
            torch.zeros(slots),
            torch.full((slots, num_bans, 4), -1, dtype=torch.int64),
            torch.full((slots, num_forced, 2), -1, dtype=torch.int64),
            torch.empty(0),
        )


def _cache_shapes(
    config: DecoderConfig, requests: int, rows: int, capacity: int, source: int
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of keys and values: of the sequences, and of the memories."""
    head, source = padded(config.head_size), padded(source)
    layers, heads = config.num_layers, config.num_heads
    of_rows = (layers, rows, heads, capacity, head)
    return (
        of_rows,
        of_rows,
        (layers, requests, heads, head, source),
        (layers, requests, heads, source, head),
    )


def new_caches(
    config: DecoderConfig,
    requests: int,
    rows: int,
    capacity: int,
    source: int,
    memory: Tensor | None = None,
) -> DecodingCaches:
    """Return caches in which nothing has been written, lengths 0.

    Parameters
    ----------
    config, requests, rows, capacity, source
        Sizes; see ``DecodingCaches``.
    memory : Tensor, optional
        ``caches_bytes`` of uint8 for keys and values to lie in.
    """
    shapes = _cache_shapes(config, requests, rows, capacity, source)
    with torch.inference_mode(False):
        if memory is None:
            parts = [torch.empty(shape) for shape in shapes]
        else:
            sizes = [math.prod(shape) for shape in shapes]
            flat = memory[: 4 * sum(sizes)].view(torch.float32).split(sizes)
            parts = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]
        self_keys, self_values, cross_keys, cross_values = parts
        return DecodingCaches(
            self_keys,
            self_values,
            cross_keys,
            cross_values,
            torch.zeros(requests, dtype=torch.int64),
            torch.zeros(rows, capacity, dtype=torch.int32),
            torch.zeros(requests, dtype=torch.int64),
        )


def caches_bytes(
    config: DecoderConfig, requests: int, rows: int, capacity: int, source: int
) -> int:
    """Return how much memory keys and values take: a multiple of 64."""
    return 4 * sum(map(math.prod, _cache_shapes(config, requests, rows, capacity, source)))
