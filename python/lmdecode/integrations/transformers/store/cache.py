"""Between a KV store and the caches of transformers 5.x."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from lmdecode.integrations.transformers.caches.beam_caches import (
    BeamDynamicCache,
    BeamEncoderDecoderCache,
)
from lmdecode.integrations.transformers.caches.kv_layers import (
    check_layers,
    fill_layer,
    length_of,
    read_layer,
    reserve_layer,
    room_of,
    window_of,
)

if TYPE_CHECKING:
    from lmdecode.store import Hit, KVStore

__all__ = ["cache_from_kv", "cache_to_kv", "load_cache"]

KV = list[tuple[Tensor, Tensor]]


def _of_self_attention(cache: Any, op: str) -> Cache:
    part = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if not isinstance(part, Cache):
        raise TypeError(f"{op}: cache is of type {type(cache).__name__}; expected a Cache")
    check_layers(part, op)
    return part


def cache_to_kv(cache: Any, num_tokens: int | None = None, *, row: int = 0) -> KV:
    """Return a transformers cache's keys and values, for ``KVStore.put`` and ``Session.commit``.

    Parameters
    ----------
    cache
        A ``Cache`` of dynamic, static, beam or ring layers, with or without sliding windows. For an
        ``EncoderDecoderCache``, the self-attention is taken; its ``cross_attention_cache`` can be
        passed as a cache of its own.
    num_tokens
        Number of leading tokens to take; None: all.
    row
        Row of the batch.

    Returns
    -------
    list of (K, V)
        [num_kv_heads, held, head_size] for each layer; views if the cache holds them in order.
        Layers with a window have the last tokens only. Appending to the cache does not change
        them. Cropping, reordering or resetting it does.

    Raises
    ------
    TypeError
        ``cache`` is not a ``Cache``.
    ValueError
        A layer is of a kind that holds more than keys and values, ``num_tokens`` is out of range,
        the cache is empty, or a layer with a window no longer has these tokens.
    """
    part = _of_self_attention(cache, "cache_to_kv")
    held = min((length_of(layer) for layer in part.layers), default=0)
    count = held if num_tokens is None else num_tokens
    if not 1 <= count <= held:
        raise ValueError(f"cache_to_kv: num_tokens is {count}; expected 1 to {held}, the cache's")
    kv = []
    for number, layer in enumerate(part.layers):
        states = read_layer(layer, count)
        if states is None:
            raise ValueError(
                f"cache_to_kv: layers[{number}] has a window and went on to token "
                f"{length_of(layer)}; it no longer has what token {count} sees"
            )
        kv.append((states[0][row], states[1][row]))
    return kv


def _reserve(
    cache: Cache, shapes: Sequence[tuple[int, int, int]], num_tokens: int, like: Tensor, op: str
) -> list[tuple[Tensor, Tensor]]:
    """Prepare an empty cache for so many tokens; shapes: (H, held, D) of each layer."""
    if len(cache.layers) != len(shapes):
        raise ValueError(
            f"{op}: the cache has {len(cache.layers)} layers; expected {len(shapes)}, as there are "
            "keys and values"
        )
    if any(length_of(layer) for layer in cache.layers):
        raise ValueError(f"{op}: the cache holds tokens already; expected an empty one")
    for number, layer in enumerate(cache.layers):
        held, room = shapes[number][1], room_of(layer)
        window = window_of(layer)
        if held < min(num_tokens, (window or num_tokens + 1) - 1):
            raise ValueError(
                f"{op}: layer {number} has keys and values of {held} tokens; expected those of the "
                f"last {min(num_tokens, (window or num_tokens + 1) - 1)}"
            )
        if window is None and room not in (-1, 0) and num_tokens > room:
            raise ValueError(
                f"{op}: the cache has room for {room} tokens; expected at least {num_tokens}"
            )
    return [
        reserve_layer(layer, like.new_empty((1, heads, 0, size)), held, num_tokens)
        for layer, (heads, held, size) in zip(cache.layers, shapes, strict=True)
    ]


def _fill(cache: Cache, states: list[tuple[Tensor, Tensor]], num_tokens: int) -> None:
    for layer, pair in zip(cache.layers, states, strict=True):
        fill_layer(layer, pair, num_tokens)


def cache_from_kv(
    config: Any,
    kv: Sequence[tuple[Tensor, Tensor]],
    num_tokens: int | None = None,
    *,
    cross: Sequence[tuple[Tensor, Tensor]] | None = None,
    cache: Any = None,
) -> Any:
    """Return a cache that ``generate(past_key_values=...)`` goes on from.

    Parameters
    ----------
    config
        Of the model.
    kv
        (K, V) of each layer, [num_kv_heads, held, head_size], as ``KVStore.load`` and
        ``cache_to_kv`` return them, on the device of the model.
    num_tokens
        How many tokens they stand for; None: as many as the longest layer has. Needed where every
        layer has a window.
    cross
        The same of cross-attention, for an encoder-decoder model.
    cache
        An empty cache to fill. None: a new ``BeamDynamicCache``, a ``DynamicCache`` that grows in
        place, or a ``BeamEncoderDecoderCache``.

    Returns
    -------
    Cache
        ``cache``, or the new one; keys and values are copied.

    Raises
    ------
    ValueError
        They do not fit: another number of layers, too few tokens for a window, no room; or the
        cache holds tokens already, or has layers of an unknown kind.
    """
    op = "cache_from_kv"
    if cache is None:
        is_pair = cross is not None
        cache = (
            BeamEncoderDecoderCache.from_config(config)
            if is_pair
            else BeamDynamicCache(config=config)
        )
    if (cross is not None) != isinstance(cache, EncoderDecoderCache):
        raise ValueError(
            f"{op}: cross is {'not ' if cross else ''}None and the cache a "
            f"{type(cache).__name__}; expected cross for an EncoderDecoderCache alone"
        )
    parts: list[tuple[Cache, Sequence[tuple[Tensor, Tensor]], int | None]]
    parts = [(_of_self_attention(cache, op), kv, num_tokens)]
    if cross is not None:
        check_layers(cache.cross_attention_cache, op)
        parts.append((cache.cross_attention_cache, cross, None))
    for part, pairs, given in parts:
        if not pairs:
            raise ValueError(f"{op}: kv has no layers; expected those of the model")
        count = max(keys.shape[1] for keys, _ in pairs) if given is None else given
        shapes = [(keys.shape[0], keys.shape[1], keys.shape[2]) for keys, _ in pairs]
        states = _reserve(part, shapes, count, pairs[0][0], op)
        for target, source in zip(states, pairs, strict=True):
            for to, values in zip(target, source, strict=True):
                to[0].copy_(values)
        _fill(part, states, count)
    if cross is not None:
        cache.is_updated = dict.fromkeys(range(len(cross)), True)
    return cache


def _read(store: KVStore, hit: Hit, states: list[tuple[Tensor, Tensor]]) -> bool:
    """Read a hit into tensors [1, H, held, D]; False: a miss after all."""
    targets: list[tuple[Tensor, ...]] = [(keys[0], values[0]) for keys, values in states]
    if all(keys.device.type == "cpu" for keys, _ in targets):
        return store.load(hit, out=targets) is not None
    return _copy_by_layer(store.load_layers(hit), targets)


def _copy_by_layer(
    coming: Iterator[tuple[Tensor, ...]], targets: Sequence[tuple[Tensor, ...]]
) -> bool:
    """Copy to another device layer by layer, while the next ones are read."""
    try:
        for target, source in zip(targets, coming, strict=True):
            for to, values in zip(target, source, strict=True):
                to.copy_(values)
    except LookupError:
        return False
    return True


def load_cache(store: KVStore, hit: Hit, cache: Any, *, device: torch.device | str = "cpu") -> bool:
    """Fill an empty cache with what ``KVStore.lookup`` found.

    On the CPU it is read into the cache's own memory; elsewhere layer by layer, each copied while
    the next ones are read.

    Parameters
    ----------
    store, hit
        The store and its hit.
    cache
        An empty cache, see ``cache_from_kv``; of an ``EncoderDecoderCache`` self-attention is
        filled.
    device
        Of the model.

    Returns
    -------
    bool
        False: a miss, or a miss after all, see ``KVStore.load``; the cache is empty.

    Raises
    ------
    ValueError
        The cache does not fit, see ``cache_from_kv``.
    """
    if not hit:
        return False
    part = _of_self_attention(cache, "load_cache")
    of = store.fingerprint
    windows = of.windows or (None,) * of.num_layers
    shapes = [
        (of.num_kv_heads, min(hit.num_tokens, (w or hit.num_tokens + 1) - 1), of.head_size)
        for w in windows
    ]
    like = torch.empty(0, dtype=of.torch_dtype, device=device)
    states = _reserve(part, shapes, hit.num_tokens, like, "load_cache")
    try:
        loaded = _read(store, hit, states)
    except BaseException:
        clear(part)
        raise
    if loaded:
        _fill(part, states, hit.num_tokens)
    else:
        clear(part)
    return loaded


def empty_cache_for(config: Any, capacity: int) -> Any:
    """Return an empty cache that grows in place, for a model of this config."""
    if config.is_encoder_decoder:
        return BeamEncoderDecoderCache.from_config(config, capacity=capacity)
    return BeamDynamicCache(config=config, capacity=capacity)


def clear(cache: Any) -> None:
    """Let a cache forget everything."""
    cache.reset()
    halves: list[Any] = [cache]
    if isinstance(cache, EncoderDecoderCache):
        halves = [cache.self_attention_cache, cache.cross_attention_cache]
    for layer in (layer for half in halves for layer in half.layers):
        # Before transformers 5.18 a dynamic layer becomes one of zeros, as long as before.
        if isinstance(layer, DynamicLayer) and type(layer).reset is CacheLayerMixin.reset:
            layer.keys = layer.values = None
            layer.is_initialized = False


def is_empty(cache: Any) -> bool:
    """Whether a cache holds no token yet."""
    return not isinstance(cache, Cache) or int(cache.get_seq_length()) == 0


def repeat_rows(cache: Any, repeats: int) -> None:
    """Let each row follow itself so many times: from a prompt to its beams."""
    halves: list[Any] = [cache]
    if isinstance(cache, EncoderDecoderCache):
        halves = [cache.self_attention_cache, cache.cross_attention_cache]
    for half in halves:
        if not all(hasattr(layer, "batch_repeat_interleave") for layer in half.layers):
            raise ValueError(
                f"generate_with_store: a {type(half).__name__} cannot be repeated for beams; "
                "expected dynamic layers"
            )
        half.batch_repeat_interleave(repeats)
