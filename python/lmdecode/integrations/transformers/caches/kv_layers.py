"""Layers of caches and what a store keeps of them: keys and values of the last tokens, in order."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from lmdecode.attention.ring_cache import RingSnapshot
from lmdecode.integrations.transformers.caches.beam_layers import BeamLayer, BeamSlidingWindowLayer
from lmdecode.integrations.transformers.caches.ring_caches import RingLayer

_IN_PLACE = (BeamLayer, BeamSlidingWindowLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)
# Of these types exactly: a subclass may hold more than keys and values.
_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer, *_STATIC, RingLayer)


def check_layers(cache: Any, op: str) -> None:
    """Raise ValueError where a cache holds more than keys and values in known layers."""
    if cache.offloading:
        raise ValueError(f"{op}: the cache is offloaded; expected one that is not")
    for number, layer in enumerate(cache.layers):
        if type(layer) not in _KNOWN and not isinstance(layer, _IN_PLACE):
            raise ValueError(
                f"{op}: layers[{number}] of the cache is of type {type(layer).__name__}; expected "
                "layers of keys and values: dynamic, static, with or without a sliding window"
            )


def window_of(layer: Any) -> int | None:
    """Return how many tokens a query of the layer sees, its own included; None: all."""
    if isinstance(layer, StaticSlidingWindowLayer):
        return layer.max_cache_len
    return layer.sliding_window if layer.is_sliding else None


def length_of(layer: Any) -> int:
    """Return the number of tokens so far."""
    return int(layer.get_seq_length())


def room_of(layer: Any) -> int:
    """Return the number of tokens that fit, -1 or 0 for any."""
    find = getattr(layer, "get_max_length", None) or layer.get_max_cache_shape  # of 5.0
    return int(find())


def read_layer(layer: Any, num_tokens: int) -> tuple[Tensor, Tensor] | None:
    """Return the keys and values [B, H, held, D] that the token after ``num_tokens`` sees, or more.

    They are the last of these tokens, and nothing that comes later changes them. None: they are
    not held any more, because the layer has a window and went on.
    """
    total = length_of(layer)
    after = total - num_tokens
    window = window_of(layer)
    needed = num_tokens if window is None else min(num_tokens, window - 1)
    if after < 0:
        return None
    if isinstance(layer, RingLayer):
        if not layer.is_initialized or needed + after > layer.ring.capacity:
            return None
        keys, values = layer.ring.ordered(needed + after)
    else:
        keys, values = layer.keys, layer.values
        if keys is None:
            return None
        if type(layer) in _STATIC:
            held = min(total, layer.max_cache_len)
            keys, values = keys[:, :, :held], values[:, :, :held]
            if window is not None:  # its tokens move from slot to slot
                keys, values = keys.clone(), values.clone()
    held = keys.shape[2] - after
    return (keys[:, :, :held], values[:, :, :held]) if held >= needed else None


def reserve_layer(layer: Any, like: Tensor, held: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return tensors [1, H, held, D] to write the last of ``num_tokens`` tokens to.

    ``fill_layer`` makes them the content of the layer, which is empty. ``like`` [1, H, 0, D] has
    their dtype and device.
    """
    if isinstance(layer, _IN_PLACE):
        return layer.reserve(like, held)
    if type(layer) in _STATIC:
        layer.lazy_initialization(like, like)
        end = min(num_tokens, layer.max_cache_len)
        return layer.keys[:, :, end - held : end], layer.values[:, :, end - held : end]
    shape = (1, like.shape[1], held, like.shape[3])
    return like.new_empty(shape), like.new_empty(shape)


def fill_layer(layer: Any, states: tuple[Tensor, Tensor], num_tokens: int) -> None:
    """Let the layer go on from what was written to the tensors of ``reserve_layer``."""
    keys, values = states
    if isinstance(layer, RingLayer):
        layer.lazy_initialization(keys, values)
        layer.ring.restore(RingSnapshot(num_tokens, keys, values))
    elif type(layer) in _STATIC:
        count = getattr(layer, "cumulative_length", None)
        if isinstance(count, Tensor):
            count.fill_(min(num_tokens, layer.max_cache_len))
            if window_of(layer) is not None:
                layer.cumulative_length_int = num_tokens
        elif count is not None:  # of a window, in transformers 5.0; the other layers count none
            layer.cumulative_length = num_tokens
    elif not isinstance(layer, _IN_PLACE):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = num_tokens
