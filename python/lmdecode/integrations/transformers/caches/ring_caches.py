"""KV caches of transformers 5.x whose sliding layers are rings: a token is written to one slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer, StaticSlidingWindowLayer

from lmdecode._checks import check_int
from lmdecode.attention.ring_cache import RingKVCache
from lmdecode.integrations.transformers.caches.beam_caches import BeamDynamicCache
from lmdecode.integrations.transformers.caches.beam_layers import BeamLayer, BeamSlidingWindowLayer
from lmdecode.integrations.transformers.caches.ring_states import RingStates

__all__ = ["DynamicRingCache", "RingLayer", "StaticRingCache"]

# Slots beyond the window while the past is recorded, to be rolled back.
_SPARE = 63


class RingLayer(CacheLayerMixin):
    """A sliding layer that writes each token to one slot of a ring, and moves nothing.

    With ``attn_implementation="lmdecode"`` attention reads the ring in place; any other one gets
    the keys and values in order, which is a copy of the window. ``sliding_window`` counts the keys
    that a query sees, its own included; ValueError below 1. With ``keeps_memory`` the ring stays
    allocated when the layer is reset.
    """

    is_sliding = True
    is_croppable = True

    def __init__(self, sliding_window: int, *, keeps_memory: bool = False) -> None:
        if sliding_window < 1:
            raise ValueError(
                f"RingLayer: sliding_window is {sliding_window}; expected at least 1, or a layer "
                "without a window"
            )
        # Not that of the base class, which assigns keys and values.
        self.sliding_window = sliding_window
        self.record_past = False
        self.is_initialized = False
        self._keeps_memory = keeps_memory
        self._ring: RingKVCache | None = None
        # What came first, until more comes: it may be longer than the ring, and be cropped.
        self._first_chunk: tuple[Tensor, Tensor] | None = None

    @property
    def ring(self) -> RingKVCache:
        """The ring; a layer has one from its first update on."""
        assert self._ring is not None
        return self._ring

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the keys that the next token sees, in order."""
        return self._ordered()[0] if self._ring is not None else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """A copy of the values that the next token sees, in order."""
        return self._ordered()[1] if self._ring is not None else None

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        """Tokens so far."""
        return 0 if self._ring is None else self._ring.num_tokens

    def _ordered(self) -> tuple[Tensor, Tensor]:
        return self.ring.ordered(self.sliding_window - 1)

    def _new_ring(self, keys: Tensor, values: Tensor, capacity: int) -> RingKVCache:
        batch, heads, _, head_size = keys.shape
        return RingKVCache(
            batch, heads, head_size, self.sliding_window, capacity=capacity,
            value_size=values.shape[3], dtype=self.dtype, device=keys.device,
        )  # fmt: skip

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the ring, with the sizes of these states."""
        self.dtype, self.device = _dtype_of(key_states, value_states), key_states.device
        capacity = self.sliding_window + (_SPARE if self.record_past else 0)
        self._ring = self._new_ring(key_states, value_states, capacity)
        self.is_initialized = True

    def _make_room(self, capacity: int) -> None:
        if self.ring.capacity < capacity:
            snapshot = self.ring.snapshot()
            self._ring = self._new_ring(snapshot.keys, snapshot.values, capacity)
            self._ring.restore(snapshot)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, n, D], and return what their queries see, and them: a prompt comes whole."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype != value_states.dtype:
            dtype = _dtype_of(key_states, value_states)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        dtype = key_states.dtype
        if len(key_states) != self.ring.batch or dtype != self.dtype:
            raise ValueError(
                f"RingLayer: key_states has {len(key_states)} rows of {dtype}; expected "
                f"{self.ring.batch} of {self.dtype}, as the cache holds: another batch needs "
                "another cache, or reset()"
            )
        count, held = key_states.shape[2], self.cumulative_length
        self._first_chunk = None
        if held == 0:
            self.ring.append(key_states, value_states)
            if self.record_past:
                self._first_chunk = key_states, value_states
            return key_states, value_states
        if self.record_past:
            self._make_room(self.sliding_window + count)
        if self.ring.fits(count):
            self.ring.append(key_states, value_states)
            return RingStates.pair(self.ring, min(held, self.sliding_window - 1) + count)
        keys, values = self._ordered()
        self.ring.append(key_states, value_states)
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many keys ``update`` will return, and the position of the first one."""
        if isinstance(query_length, Tensor):  # the queries' positions, as transformers 5.0 gives
            query_length = len(query_length)
        held = min(self.cumulative_length, self.sliding_window - 1)
        return held + query_length, self.cumulative_length - held

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return the window."""
        return self.sliding_window

    get_max_cache_shape = get_max_length  # its name in transformers 5.0

    def activate_past_recording(self) -> None:
        """Hold more tokens than the window, for ``crop``."""
        self.record_past = True
        if self.is_initialized:
            self._make_room(self.sliding_window + _SPARE)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; see ``RingKVCache.rollback``."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"RingLayer: tokens_to_remove is {tokens_to_remove}; expected 0 or less, the "
                "number of tokens to remove, negated"
            )
        if not self.is_initialized:
            return
        if self._first_chunk is None or -tokens_to_remove > self.cumulative_length:
            self.ring.rollback(-tokens_to_remove)
            return
        left = self.cumulative_length + tokens_to_remove
        keys, values = (states[:, :, :left] for states in self._first_chunk)
        self.ring.reset()
        self.ring.append(keys, values)
        self._first_chunk = keys, values

    def reset(self) -> None:
        """Forget everything."""
        self._first_chunk = None
        if self._keeps_memory and self._ring is not None:
            self._ring.reset()
        else:
            self._ring = None
            self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row r go on as row ``beam_idx[r]``, in place; only rows that move are copied."""
        self._first_chunk = None
        if self.cumulative_length > 0:
            self.ring.reorder_(beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let ``repeats`` rows follow on each row."""
        self._first_chunk = None
        if self.cumulative_length > 0:
            rows = torch.arange(self.ring.batch, device="cpu")
            self.ring.select_rows_(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, in this order."""
        self._first_chunk = None
        if self.cumulative_length > 0:
            self.ring.select_rows_(torch.arange(self.ring.batch, device="cpu")[indices.cpu()])


def _dtype_of(key_states: Tensor, value_states: Tensor) -> torch.dtype:
    """Return the dtype of a ring for these: under autocast keys, which are rotated, differ."""
    return torch.promote_types(key_states.dtype, value_states.dtype)


class _FixedLayer(BeamLayer):
    """A ``BeamLayer`` of one allocation, for all positions that there will be."""

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(capacity=max_cache_len)
        self.max_cache_len = max_cache_len

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        length = self.get_seq_length() + key_states.shape[2]
        if length > self.max_cache_len:
            raise ValueError(
                f"StaticRingCache: the sequence would have {length} tokens; expected at most "
                f"{self.max_cache_len}, max_cache_len"
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def get_max_length(self) -> int:
        return self.max_cache_len

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        for states in self._states.values():
            states.start = states.end = 0


def _check_config(cache: str, config: object) -> None:
    if not isinstance(config, PretrainedConfig):
        raise TypeError(
            f"{cache}: config is of type {type(config).__name__}; expected the config of a model, "
            "model.config, which tells its windows"
        )


class DynamicRingCache(BeamDynamicCache):
    """A ``DynamicCache`` whose sliding layers are rings, and whose other ones grow in place.

    For ``generate(past_key_values=DynamicRingCache(model.config))``. A token is written to one slot
    a layer, where ``DynamicCache`` copies the window, or the sequence, every step. A ring has its
    full size from the first token on. Layers of other kinds are those of ``BeamDynamicCache``.

    Parameters
    ----------
    config
        Of the model: tells which layers have a sliding window.
    capacity : int
        Positions to make room for at once in layers without a window.

    Raises
    ------
    TypeError
        If ``config`` is none, such as the model itself.
    """

    def __init__(self, config: Any, *, capacity: int = 0) -> None:
        _check_config("DynamicRingCache", config)
        super().__init__(config=config, capacity=capacity)
        self.layers = [
            RingLayer(layer.sliding_window) if type(layer) is BeamSlidingWindowLayer else layer
            for layer in self.layers
        ]


class StaticRingCache(Cache):
    """The same in memory that is allocated once, for sequences of at most ``max_cache_len``.

    Layers of other kinds are those of ``StaticCache``. It is not for ``torch.compile``: Python
    counts what a layer holds.

    Parameters
    ----------
    config
        Of the model: tells which layers have a sliding window.
    max_cache_len : int
        Tokens of a sequence at most; only layers without a window hold so many.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        _check_config("StaticRingCache", config)
        max_cache_len = check_int("StaticRingCache", "max_cache_len", max_cache_len, 1)
        layers = StaticCache(config, max_cache_len).layers
        super().__init__(layers=[_as_ring_layer(layer, max_cache_len) for layer in layers])


def _as_ring_layer(layer: Any, max_cache_len: int) -> Any:
    """Return an empty layer of ``StaticCache`` as one of the above, or as it is."""
    if type(layer) is StaticSlidingWindowLayer and layer.max_cache_len < max_cache_len:
        return RingLayer(layer.max_cache_len, keeps_memory=True)
    if type(layer) in (StaticLayer, StaticSlidingWindowLayer):
        return _FixedLayer(max_cache_len)
    return layer
