"""KV caches for beam search in transformers 5.x: grown and reordered in place.

A reorder moves only the rows that changed, all layers in one ``reorder_cache_``; cross-attention,
which is the same for all beams of a request, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from lmdecode._checks import type_error
from lmdecode.integrations.transformers.caches.beam_layers import (
    BeamLayer,
    BeamSlidingWindowLayer,
    as_beam_layer,
)
from lmdecode.kv_cache.reorder import reorder_cache_

__all__ = [
    "BeamDynamicCache",
    "BeamEncoderDecoderCache",
    "BeamLayer",
    "BeamSlidingWindowLayer",
    "beam_cache",
    "expand_beams",
    "reorder_beams",
]

# Layers whose state is keys and values [B, H, S, D] alone. Of these types exactly: a subclass may
# hold more, and its own reorder_cache knows.
_GROWING = (DynamicLayer, DynamicSlidingWindowLayer, BeamLayer, BeamSlidingWindowLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)


class BeamDynamicCache(DynamicCache):
    """A ``DynamicCache`` for beam search: no step copies what did not change.

    Takes the arguments of ``DynamicCache`` and may be passed to ``generate()`` as
    ``past_key_values``. A token is written to one slot, where ``DynamicCache`` copies the sequence
    every step, and ``reorder_cache`` is one ``lmdecode.reorder_cache_`` over all layers. Layers of
    other kinds (linear attention, indexed, hybrid) are those of transformers, with their own
    ``reorder_cache``. Whoever holds a tensor of the cache sees it change; there are no gradients.

    Parameters
    ----------
    ddp_cache_data, config, offloading, offload_only_non_sliding
        As of ``DynamicCache``. ``config`` tells which layers have a sliding window.
    capacity : int
        Positions to make room for at once, such as the length that is generated at most. Without
        it buffers grow by half when they are full.
    """

    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[Tensor | None, ...]] | None = None,
        config: Any = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        *,
        capacity: int = 0,
    ) -> None:
        super().__init__(ddp_cache_data, config, offloading, offload_only_non_sliding)
        _exchange_layers(self, capacity)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row r go on as row ``beam_idx[r]``: [B] int64 or int32; see ``reorder_beams``."""
        reorder_beams(self, beam_idx)


class BeamEncoderDecoderCache(EncoderDecoderCache):
    """An ``EncoderDecoderCache`` whose cross-attention is never reordered.

    The beams of a request attend to the same encoder output, and a beam goes on as one of its own
    request: the rows that ``beam_idx`` exchanges are equal in the cross-attention cache. A map
    that leads from one request to another would break this, and no beam search makes one.

    The arguments are those of ``EncoderDecoderCache``: the cache of self-attention and that of
    cross-attention.
    """

    @classmethod
    def from_config(cls, config: Any, *, capacity: int = 0) -> BeamEncoderDecoderCache:
        """Return an empty cache for a model of this config; capacity as of BeamDynamicCache."""
        config = config.get_text_config(decoder=True)
        return cls(BeamDynamicCache(config=config, capacity=capacity), DynamicCache(config=config))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder self-attention alone; see ``reorder_beams``."""
        reorder_beams(self, beam_idx)


def beam_cache(cache: Any, *, capacity: int = 0) -> Any:
    """Let a cache that ``generate()`` made grow and be reordered in place.

    Its ``DynamicLayer`` and ``DynamicSlidingWindowLayer`` become ``BeamLayer`` and
    ``BeamSlidingWindowLayer`` with the same content, within the same object; of an
    ``EncoderDecoderCache`` those of self-attention. All else stays: static, quantised and
    offloaded caches, layers of other kinds, objects that are no ``Cache``.

    Parameters
    ----------
    cache
        Any cache.
    capacity : int
        As of ``BeamDynamicCache``.

    Returns
    -------
    object
        ``cache``.
    """
    if isinstance(cache, EncoderDecoderCache):
        beam_cache(cache.self_attention_cache, capacity=capacity)
    elif isinstance(cache, Cache) and not cache.offloading:
        _exchange_layers(cache, capacity)
    return cache


def _exchange_layers(cache: Cache, capacity: int) -> None:
    cache.layers = [as_beam_layer(layer, capacity) for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        # Called like the class that it stands for.
        cache.layer_class_to_replicate = partial(BeamLayer, capacity)  # type: ignore[assignment]


def reorder_beams(cache: Any, beam_idx: Tensor) -> None:
    """Let row r of a cache go on as row ``beam_idx[r]``, in place.

    Keys and values of the layers that are known (dynamic, static, with or without a sliding window,
    and those of this module) take one ``lmdecode.reorder_cache_`` a device, over the positions that
    are in use; any other layer or cache is reordered by its own ``reorder_cache``. Of an
    ``EncoderDecoderCache``, and of tuples of more than two tensors a layer, self-attention alone is
    reordered (see ``BeamEncoderDecoderCache``).

    Parameters
    ----------
    cache
        A ``Cache``; or a tuple or list of layers, each a tuple that begins with keys and values
        [B, ...], which are written in place; or any object with a ``reorder_cache``.
    beam_idx : Tensor
        [B] int64 or int32, 0 to B - 1. Where it is on the CPU and maps each row to itself, nothing
        at all is done. With more or fewer rows than the cache, as ``BeamSearch`` has them when
        requests come and go, all of the cache, cross-attention too, is selected by its
        ``batch_select_indices``.

    Raises
    ------
    TypeError
        If there is a layer, or a cache, that nobody knows how to reorder.
    ValueError
        If the cache does not have B rows, or ``beam_idx`` is out of range.
    """
    if not isinstance(beam_idx, Tensor):
        raise type_error("reorder_beams", "beam_idx", beam_idx, "a tensor")
    tensors: list[Tensor] = []
    others: list[Any] = []
    _find_states(cache, tensors, others)
    if tensors and beam_idx.dim() == 1 and tensors[0].shape[0] != len(beam_idx):
        select = getattr(cache, "batch_select_indices", None)
        if select is None:
            raise ValueError(
                f"reorder_beams: beam_idx has {len(beam_idx)} rows; expected "
                f"{tensors[0].shape[0]}, the rows of the cache, which has no batch_select_indices"
            )
        if len(beam_idx):
            low, high = torch.stack((beam_idx.min(), beam_idx.max())).tolist()
            if low < 0 or high >= tensors[0].shape[0]:
                raise ValueError(
                    f"reorder_beams: beam_idx has {low if low < 0 else high}; expected 0 to "
                    f"{tensors[0].shape[0] - 1}, the rows of the cache"
                )
        select(beam_idx)
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        reorder_cache_(group, beam_idx.to(device))
    if others and not _is_identity(beam_idx):
        for other in others:
            other.reorder_cache(beam_idx)


def _is_identity(beam_idx: Tensor) -> bool:
    # On another device the answer would have to be waited for.
    return beam_idx.device.type == "cpu" and beam_idx.tolist() == list(range(len(beam_idx)))


_KNOWN_REORDERS = (Cache.reorder_cache, BeamDynamicCache.reorder_cache)
_SELF_ATTENTION_ALONE = (EncoderDecoderCache.reorder_cache, BeamEncoderDecoderCache.reorder_cache)


def _find_states(cache: Any, tensors: list[Tensor], others: list[Any]) -> None:
    """Add keys and values to ``tensors``, and to ``others`` what is reordered by its own method."""
    reorder = getattr(type(cache), "reorder_cache", None)
    if isinstance(cache, EncoderDecoderCache) and reorder in _SELF_ATTENTION_ALONE:
        _find_states(cache.self_attention_cache, tensors, others)
    elif isinstance(cache, Cache) and reorder in _KNOWN_REORDERS:
        for number, layer in enumerate(cache.layers):
            if type(layer) in _GROWING + _STATIC:
                tensors += _states_of_layer(layer)
            else:
                _add_other(layer, f"cache.layers[{number}]", others)
    elif isinstance(cache, (tuple, list)):
        for number, pair in enumerate(cache):
            tensors += _states_of_tuple(pair, number)
    else:
        _add_other(cache, "cache", others)


def _add_other(owner: Any, name: str, others: list[Any]) -> None:
    if not callable(getattr(owner, "reorder_cache", None)):
        raise TypeError(
            f"reorder_beams: {name} is of type {type(owner).__name__}, which has no reorder_cache; "
            "expected a Cache of transformers, tuples of keys and values, or such a method"
        )
    others.append(owner)


def _states_of_layer(layer: Any) -> list[Tensor]:
    """Return the keys and values that are in use, as views."""
    if not layer.is_initialized or layer.keys is None or layer.keys.numel() == 0:
        return []
    if type(layer) in _GROWING:
        return [layer.keys, layer.values]
    length = layer.keys.shape[2]
    if isinstance(layer, StaticSlidingWindowLayer):
        length = min(length, int(layer.get_seq_length()))
    elif layer.keys.device.type == "cpu" and hasattr(layer, "cumulative_length"):
        # Elsewhere the number of tokens lies on the device, and would have to be waited for.
        length = min(length, int(layer.cumulative_length))
    return [layer.keys[:, :, :length], layer.values[:, :, :length]]


def _states_of_tuple(pair: Any, number: int) -> list[Tensor]:
    states = list(pair[:2]) if isinstance(pair, (tuple, list)) else [pair]
    if len(states) != 2 or not all(s is None or isinstance(s, Tensor) for s in states):
        kinds = ", ".join(type(s).__name__ for s in states)
        raise TypeError(
            f"reorder_beams: cache[{number}] holds {kinds}; expected a tuple that begins with the "
            "keys and values of a layer"
        )
    return [s for s in states if s is not None]


def expand_beams(cache: Any, num_beams: int | Sequence[int]) -> None:
    """Go on from prompts to beams: the prompt ran once a request, and each beam gets its rows.

    Row i of the cache becomes ``num_beams`` rows that follow each other, by one copy of what is in
    use; cross-attention is repeated too, as it has a row a beam.

    Parameters
    ----------
    cache
        A ``Cache`` of dynamic layers of one row a request: the prompts have been run.
    num_beams : int or sequence of int
        Beams a request, for all requests or for each of them.

    Raises
    ------
    TypeError
        If there is a layer that cannot be repeated (static and linear attention ones cannot), or
        ``cache`` is no ``Cache``.
    ValueError
        If ``num_beams`` is below 1.
    """
    widths = [num_beams] if isinstance(num_beams, int) else list(num_beams)
    if not widths or not all(isinstance(width, int) and width >= 1 for width in widths):
        raise ValueError(f"expand_beams: num_beams is {num_beams}; expected ints >= 1")
    uniform = len(set(widths)) == 1
    method = "batch_repeat_interleave" if uniform else "batch_select_indices"
    if not isinstance(cache, Cache):
        raise type_error("expand_beams", "cache", cache, "a Cache")
    halves: list[Cache] = (
        [cache.self_attention_cache, cache.cross_attention_cache]
        if isinstance(cache, EncoderDecoderCache)
        else [cache]
    )
    for half in halves:
        for number, layer in enumerate(half.layers):
            if not hasattr(layer, method):
                raise TypeError(
                    f"expand_beams: layers[{number}] is of type {type(layer).__name__}, whose rows "
                    "cannot be repeated; expected dynamic layers"
                )
    if not isinstance(num_beams, int):
        _check_requests(halves, len(widths))
    for half in halves:
        if uniform:
            half.batch_repeat_interleave(widths[0])
        else:
            rows = torch.repeat_interleave(torch.tensor(widths, device="cpu"))
            half.batch_select_indices(rows)


def _check_requests(halves: list[Cache], requests: int) -> None:
    for half in halves:
        for layer in half.layers:
            keys = getattr(layer, "keys", None)
            if keys is not None and keys.numel() and keys.shape[0] != requests:
                raise ValueError(
                    f"expand_beams: num_beams has {requests} entries; expected {keys.shape[0]}, "
                    "one for each row of the cache"
                )
