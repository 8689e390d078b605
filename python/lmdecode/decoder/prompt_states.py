"""Keys, values and states of a prompt, between ``CausalCaches`` and a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CHECKPOINT_INTERVAL

__all__ = ["PromptStates", "StoredFormat", "lengths_to_store"]


def lengths_to_store(store: Any, begin: int, end: int) -> list[int]:
    """Return the lengths at which to store a prompt of ``end`` tokens; ``begin`` are in caches.

    If layers keep states, a prefix is found at one of these lengths alone: at ends of slots, at
    most one in ``CHECKPOINT_INTERVAL`` tokens, and at the end.
    """
    if begin >= end:
        return []
    if not store.fingerprint.state_size:
        return [end]
    chunk = store.chunk_tokens
    step = -(-CHECKPOINT_INTERVAL // chunk) * chunk
    return [*range((begin // step + 1) * step, end, step), end]


class StoredFormat(Protocol):
    """Shape and dtype of stored keys and values, as a store's ``Fingerprint`` has them."""

    @property
    def num_layers(self) -> int:
        """Layers."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys."""

    @property
    def head_size(self) -> int:
        """Elements of a key."""

    @property
    def windows(self) -> Sequence[int | None] | None:
        """Window of each layer, or None."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""

    @property
    def state_size(self) -> int:
        """Float32 numbers of a state; 0: none."""


class PromptStates:
    """Keys and values of a growing prompt of at most ``capacity`` tokens, and its state.

    They have the form in which a store takes and returns them. Returned tensors do not change.
    """

    def __init__(self, fingerprint: StoredFormat, capacity: int) -> None:
        of = fingerprint
        self._windows = of.windows or (None,) * of.num_layers
        self._shape, self._dtype = (of.num_kv_heads, capacity, of.head_size), of.torch_dtype
        # Layers with a window keep the positions that later tokens attend to, others all.
        self._pairs = [
            (self._new(0 if window else capacity), self._new(0 if window else capacity))
            for window in self._windows
        ]
        self._state_size = of.state_size
        self._state = torch.empty(0, dtype=torch.float32, device="cpu")

    def _new(self, length: int) -> Tensor:
        heads, _, size = self._shape
        return torch.empty(heads, length, size, dtype=self._dtype, device="cpu")

    def first(self, length: int) -> list[tuple[Tensor, ...]]:
        """Return the first tokens' keys and values; windows and states are returned as they are."""
        pairs: list[tuple[Tensor, ...]] = [
            (keys, values) if window else (keys[:, :length], values[:, :length])
            for window, (keys, values) in zip(self._windows, self._pairs, strict=True)
        ]
        return [*pairs, (self._state,)] if self._state_size else pairs

    def reserve(self, length: int) -> list[tuple[Tensor, ...]]:
        """Return where the first tokens are to be written."""
        self._state = torch.empty(self._state_size, dtype=torch.float32, device="cpu")
        for layer, window in enumerate(self._windows):
            if window:
                held = min(length, window - 1)
                self._pairs[layer] = (self._new(held), self._new(held))
        return self.first(length)

    def append(self, begin: int, new: list[tuple[Tensor, ...]]) -> None:
        """Add what ``CausalCaches.read`` returned from a position on."""
        if self._state_size:
            *new, (self._state,) = new
        for layer, (window, old, pair) in enumerate(
            zip(self._windows, self._pairs, new, strict=True)
        ):
            if window is None:
                for to, states in zip(old, pair, strict=True):
                    to[:, begin : begin + states.shape[1]] = states
                continue
            joined = [torch.cat(parts, 1) for parts in zip(old, pair, strict=True)]
            unseen = max(0, joined[0].shape[1] - (window - 1))
            self._pairs[layer] = (joined[0][:, unseen:], joined[1][:, unseen:])
