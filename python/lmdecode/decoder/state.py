"""The caches of a batch of decoder searches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode.models.configs import DecoderConfig

__all__ = ["DecodingCaches", "caches_bytes", "new_caches"]

BLOCK = 16  # floats: heads and sources are padded to it


class DecodingCaches(NamedTuple):
    """Keys and values, which stay where they were written.

    ``rows`` are the slots' beams; heads are padded to a multiple of 16 floats. ``self_keys`` and
    ``self_values`` are [layers, rows, heads, capacity, padded head] float32; ``cross_keys``
    [layers, requests, heads, padded head, source] and ``cross_values`` [layers, requests, heads,
    source, padded head] float32; ``memory_lengths`` [requests] int64. ``table``, [rows, capacity]
    int32, is the row of ``self_keys`` that holds each position of a beam. ``cached_lengths``,
    [requests] int64, is the number of positions with keys.
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
    """Return empty caches, with lengths 0.

    ``memory`` holds the keys and values: uint8, ``caches_bytes`` of these sizes.
    """
    shapes = _cache_shapes(config, requests, rows, capacity, source)
    with torch.inference_mode(False):
        if memory is None:
            parts = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes]
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
            torch.zeros(requests, dtype=torch.int64, device="cpu"),
            torch.zeros(rows, capacity, dtype=torch.int32, device="cpu"),
            torch.zeros(requests, dtype=torch.int64, device="cpu"),
        )


def caches_bytes(
    config: DecoderConfig, requests: int, rows: int, capacity: int, source: int
) -> int:
    """Return how much memory keys and values take: a multiple of 64."""
    return 4 * sum(map(math.prod, _cache_shapes(config, requests, rows, capacity, source)))
