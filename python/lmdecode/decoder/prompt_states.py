"""Keys and values of a prompt, between ``CausalCaches`` and a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["PromptStates", "StoredFormat"]


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
        """Of each layer."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of keys and values."""


class PromptStates:
    """Keys and values of a prompt that grows, as a store takes and gives them.

    What has been given away does not change.

    Parameters
    ----------
    fingerprint : StoredFormat
        Of the store.
    capacity : int
        The most tokens.
    """

    def __init__(self, fingerprint: StoredFormat, capacity: int) -> None:
        of = fingerprint
        self._windows = of.windows or (None,) * of.num_layers
        self._shape, self._dtype = (of.num_kv_heads, capacity, of.head_size), of.torch_dtype
        # Of layers with a window as many positions as tokens to come see; of others room for all.
        self._pairs = [
            (self._new(0 if window else capacity), self._new(0 if window else capacity))
            for window in self._windows
        ]

    def _new(self, length: int) -> Tensor:
        heads, _, size = self._shape
        return torch.empty(heads, length, size, dtype=self._dtype)

    def first(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return those of the first tokens; of layers with a window what there is."""
        return [
            (keys, values) if window else (keys[:, :length], values[:, :length])
            for window, (keys, values) in zip(self._windows, self._pairs, strict=True)
        ]

    def reserve(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return where the first tokens are to be written."""
        for layer, window in enumerate(self._windows):
            if window:
                held = min(length, window - 1)
                self._pairs[layer] = (self._new(held), self._new(held))
        return self.first(length)

    def append(self, begin: int, new: list[tuple[Tensor, Tensor]]) -> None:
        """Add what ``CausalCaches.read`` returned from a position on."""
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
