"""Cache layers whose keys and values grow, and are reordered, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmdecode.kv_cache.reorder import reorder_cache_

# Positions that a new buffer has room for beyond what it holds: a share of that, so that each is
# copied a few times at most however long the sequence becomes, and not fewer than these.
_MIN_ROOM = 64


def _capacity_for(length: int) -> int:
    return length + max(_MIN_ROOM, length // 2)


def _new_buffer(like: Tensor, rows: int, capacity: int) -> Tensor:
    # A tensor made under inference_mode could not be written to outside of it.
    with torch.inference_mode(False):
        return like.new_empty((rows, like.shape[1], capacity, like.shape[3]))


class _States:
    """The keys, or the values, of a layer: positions [start, end) of a [B, H, capacity, D] buffer.

    The buffer belongs to this object alone: whatever is assigned is copied into it.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.start = self.end = 0

    def get(self) -> Tensor | None:
        return None if self.buffer is None else self.buffer[:, :, self.start : self.end]

    def set(self, states: Tensor | None, capacity: int = 0) -> None:
        if (
            states is None or states.numel() == 0 == states.dim() - 1
        ):  # transformers' torch.tensor([])
            self.buffer, self.start, self.end = None, 0, 0
        elif self._is_slice(states):
            assert self.buffer is not None
            offset = states.storage_offset() - self.buffer.storage_offset()
            self.start = offset // self.buffer.stride(2)
            self.end = self.start + states.shape[2]
        else:
            self._move_to(states, states.shape[0], max(capacity, _capacity_for(states.shape[2])))

    def _is_slice(self, states: Tensor) -> bool:
        """Tell whether ``states`` are some neighbouring positions of the buffer."""
        buffer = self.buffer
        return (
            buffer is not None
            and states.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            and states.stride() == buffer.stride()
            and states.shape[:2] == buffer.shape[:2]
            and states.shape[3] == buffer.shape[3]
            and 0 <= states.storage_offset() < buffer.stride(1)
        )

    def _move_to(self, states: Tensor, rows: int, capacity: int) -> None:
        """Go on in a new buffer; every row of ``states`` is repeated to make ``rows``."""
        length = states.shape[2]
        buffer = _new_buffer(states, rows, capacity)
        repeats = rows // max(1, states.shape[0])
        if rows:
            buffer.unflatten(0, (-1, repeats))[:, :, :, :length].copy_(states.unsqueeze(1))
        self.buffer, self.start, self.end = buffer, 0, length

    def reserve(self, like: Tensor, length: int, capacity: int) -> Tensor:
        """Hold so many positions of unknown content, for the caller to write; rows as ``like``."""
        self.buffer = _new_buffer(like, like.shape[0], max(capacity, _capacity_for(length)))
        self.start, self.end = 0, length
        return self.buffer[:, :, :length]

    def append(self, states: Tensor) -> None:
        """Write behind the last position."""
        assert self.buffer is not None
        count = states.shape[2]
        if self.end + count > self.buffer.shape[2]:
            held = self.buffer[:, :, self.start : self.end]
            self._move_to(held, held.shape[0], _capacity_for(held.shape[2] + count))
        self.buffer[:, :, self.end : self.end + count].copy_(states)
        self.end += count

    def repeat_rows(self, repeats: int) -> None:
        assert self.buffer is not None
        held = self.buffer[:, :, self.start : self.end]
        self._move_to(held, held.shape[0] * repeats, self.buffer.shape[2])

    def to(self, device: torch.device | str) -> None:
        # As a whole: a copy of a part would read what is still on its way.
        if self.buffer is not None:
            self.buffer = self.buffer.to(device, non_blocking=True)

    def keep_last(self, count: int) -> None:
        self.start = max(self.start, self.end - count)


class _InPlace(DynamicLayer):
    """Keys and values in buffers of its own, in place of tensors that each step replaces.

    ``keys`` and ``values`` are views of what is held. What transformers assigns to them, such as a
    slice in ``crop``, moves the ends of the view where it is one of the buffer's, and is copied
    into a new buffer where it is another tensor.
    """

    def __init__(self, *args: Any, capacity: int = 0, **kwargs: Any) -> None:
        self._states = {"key": _States(), "value": _States()}
        self._capacity = capacity
        super().__init__(*args, **kwargs)

    @property
    def keys(self) -> Tensor | None:
        return self._states["key"].get()

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._states["key"].set(states, self._capacity)

    @property
    def values(self) -> Tensor | None:
        return self._states["value"].get()

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._states["value"].set(states, self._capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states[:, :, :0], value_states[:, :, :0])
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]

    def _check(self, name: str, states: Tensor, held: Tensor) -> None:
        """Raise ValueError where writing would broadcast, convert, or cut a gradient off."""
        if states.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{type(self).__name__}: {name}_states require a gradient, which a cache that is "
                "written in place does not pass on; call the model under torch.no_grad()"
            )
        shape = [*held.shape[:2], states.shape[2] if states.dim() == 4 else "n", held.shape[3]]
        same = list(states.shape) == shape and states.dtype == held.dtype
        if not same or states.device != held.device:
            raise ValueError(
                f"{type(self).__name__}: {name}_states are {states.dtype} {list(states.shape)} on "
                f"{states.device}; expected {held.dtype} {shape} on {held.device}, as those before"
            )

    def _begin_update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that are held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        self._check("key", key_states, keys)
        self._check("value", value_states, values)
        return keys, values

    def reserve(self, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Hold so many positions of keys and values, and return them for the caller to write.

        ``like`` has the rows, heads, head size, dtype and device of both, [B, H, any, D].
        """
        self.lazy_initialization(like, like)
        keys, values = (
            self._states[name].reserve(like, length, self._capacity) for name in ("key", "value")
        )
        return keys, values

    def offload(self) -> None:
        """Move the buffers to the CPU."""
        for states in self._states.values():
            states.to("cpu")

    def prefetch(self) -> None:
        """Move the buffers back to the device of the layer."""
        for states in self._states.values():
            states.to(self.device)

    def reset(self) -> None:
        """Forget everything, as a layer that was never used."""
        self.keys = self.values = None
        self.is_initialized = False
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row r go on as row ``beam_idx[r]``, in place; only rows that move are copied."""
        if self.get_seq_length() > 0:
            keys, values = self.keys, self.values
            assert keys is not None and values is not None
            reorder_cache_([keys, values], beam_idx.to(keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let ``repeats`` rows follow on each row: one copy, in a buffer with room to grow."""
        if self.get_seq_length() > 0:
            for states in self._states.values():
                states.repeat_rows(repeats)


class BeamLayer(_InPlace):
    """A ``DynamicLayer`` that writes each token to one slot and is reordered in place.

    Keys and values lie in buffers of [B, H, capacity, D] that grow by half whenever they are full,
    so that a step copies one position, not the sequence.
    """

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity=capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, n, D] behind what is held, and return views of all of it."""
        self._begin_update(key_states, value_states)
        self._states["key"].append(key_states)
        self._states["value"].append(value_states)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        return keys, values


class BeamSlidingWindowLayer(_InPlace, DynamicSlidingWindowLayer):
    """A ``DynamicSlidingWindowLayer`` that writes each token to one slot, reordered in place.

    The last ``sliding_window - 1`` positions are held: a query sees ``sliding_window`` keys, its
    own included. What is written moves through a buffer of about one and a half windows, and back
    to its beginning when it is full.
    """

    def __init__(self, sliding_window: int, capacity: int = 0) -> None:
        needed = _capacity_for(sliding_window)
        super().__init__(sliding_window=sliding_window, capacity=min(capacity, needed))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, n, D] and return what was held, and then these: a prompt comes back whole.

        Of what is held more than ``sliding_window - 1`` positions only while transformers records
        the past to roll back; the window and the new ones are returned then.
        """
        held = self._begin_update(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        keys, values = (
            self._append(self._states[name], states, before)
            for name, states, before in zip(
                ("key", "value"), (key_states, value_states), held, strict=True
            )
        )
        return keys, values

    def _append(self, held: _States, states: Tensor, before: Tensor) -> Tensor:
        window, count = self.sliding_window - 1, states.shape[2]
        if getattr(self, "record_past", False):
            held.append(states)
            full = held.get()
            assert full is not None
            return full[:, :, max(0, full.shape[2] - window - count) :]
        if before.shape[2] + count > 2 * _capacity_for(window):
            # A prompt much longer than the window: only its end is to stay.
            full = torch.cat([before, states], dim=2) if before.shape[2] else states
            held.set(full[:, :, full.shape[2] - window :], self._capacity)
            return full
        held.append(states)
        full = held.get()
        assert full is not None
        held.keep_last(window)
        return full


def as_beam_layer(layer: Any, capacity: int = 0) -> Any:
    """Return a layer of transformers as one of the above, with its content, or as it is."""
    beam_layer: _InPlace
    if type(layer) is DynamicLayer:
        beam_layer = BeamLayer(capacity)
    elif type(layer) is DynamicSlidingWindowLayer:
        beam_layer = BeamSlidingWindowLayer(layer.sliding_window, capacity)
        beam_layer.cumulative_length = layer.cumulative_length
        if hasattr(layer, "record_past"):
            beam_layer.record_past = layer.record_past
    else:
        return layer
    if layer.is_initialized and layer.keys.dim() == 4:
        beam_layer.lazy_initialization(layer.keys, layer.values)
        beam_layer.keys, beam_layer.values = layer.keys, layer.values
    return beam_layer
