"""Keys and values of a ring on their way from a cache layer to attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lmdecode.attention.ring_cache import RingKVCache


class _View:
    """The last tokens of a ring as they are now, and in order once somebody asks."""

    def __init__(self, ring: RingKVCache, length: int) -> None:
        self.ring, self.length = ring, length
        self.num_tokens = ring.num_tokens
        self._ordered: tuple[Tensor, Tensor] | None = None

    def ordered(self) -> tuple[Tensor, Tensor]:
        if self._ordered is None:
            self.check()
            self._ordered = self.ring.ordered(self.length)
        return self._ordered

    def check(self) -> None:
        if self.ring.num_tokens != self.num_tokens:
            raise RuntimeError(
                f"the keys and values of token {self.num_tokens} were read after token "
                f"{self.ring.num_tokens} had been written to the same ring"
            )


class RingStates(Tensor):
    """Keys or values that a ring layer returns.

    ``lmdecode`` attention reads the ring inside it without a copy. For any other code it is the
    tensor ``[batch, heads, length, head_size]`` in the order of positions, which is copied at its
    first use. So every other attention implementation works, whichever the config names.
    """

    _view: _View
    _which: int

    @classmethod
    def pair(cls, ring: RingKVCache, length: int) -> tuple[RingStates, RingStates]:
        """Return the keys and values of the last ``length`` tokens."""
        view = _View(ring, length)
        return cls._of(view, 0), cls._of(view, 1)

    @classmethod
    def _of(cls, view: _View, which: int) -> RingStates:
        states = torch.empty(0, dtype=torch.float32, device="cpu").as_subclass(cls)
        states._view, states._which = view, which
        return states

    @property
    def ring(self) -> RingKVCache:
        """The ring that holds them."""
        return self._view.ring

    def attend(
        self, query: Tensor, *, key_padding_mask: Tensor | None, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return ``RingKVCache.attend`` of the last tokens."""
        self._view.check()
        return self.ring.attend(query, key_padding_mask=key_padding_mask, **options)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the states in order."""
        args, kwargs = tree_map_only(
            RingStates, lambda states: states._view.ordered()[states._which], (args, kwargs or {})
        )
        return func(*args, **kwargs)
