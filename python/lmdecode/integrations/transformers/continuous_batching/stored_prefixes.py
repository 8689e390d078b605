"""Prompts and texts of continuous batching in a ``KVStore``."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)
from transformers.generation.continuous_batching.requests import RequestStatus

from lmdecode._upload import uploaded
from lmdecode.integrations.transformers.store.cache import KV
from lmdecode.integrations.transformers.store.conversation import Conversation
from lmdecode.integrations.transformers.store.request import check_store

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.requests import RequestState

    from lmdecode.store import Hit, KVStore

__all__ = ["StoredPrefixes", "check_prefix_store"]


def check_prefix_store(op: str, model: Any, batching: Any, store: KVStore) -> None:
    """Raise where requests of continuous batching cannot share the content of a store.

    ValueError or TypeError: it is no store of this model, layers have windows, or blocks are not to
    be shared.
    """
    check_store(op, model, store)
    if store.fingerprint.windows is not None:
        raise ValueError(
            f"{op}: store is given for a model with sliding windows; expected a model without "
            "them, or None: transformers shares no blocks of layers with a window"
        )
    if not batching.allow_block_sharing:
        raise ValueError(
            f"{op}: store is given with allow_block_sharing=False; expected True: what is loaded "
            "becomes shared blocks"
        )


class StoredPrefixes:
    """Moves prefixes between a paged cache and a store that ``check_prefix_store`` accepted.

    A prompt is looked up when it is first scheduled: blocks that the cache lacks and the store has
    become shared blocks, which transformers then finds. A text is stored when its prompt has been
    computed, and again when it ends. A store that fails costs time, and is a warning in the name of
    ``op``. The cache has layers with full attention; its methods call this object from now on.
    """

    def __init__(self, op: str, cache: PagedAttentionCache, store: KVStore) -> None:
        (self._allocator,) = cache.cache_allocators.values()
        self._op, self._cache, self._store = op, cache, store
        self._texts: dict[str, Conversation] = {}
        kind: Any = type(cache)
        self._search = partial(kind.search_prefix_match, cache)
        self._mark = partial(kind.mark_complete_blocks, cache)
        self._free = partial(kind.free_blocks, cache)
        changed: Any = cache
        changed.search_prefix_match = self.search_prefix_match
        changed.mark_complete_blocks = self.mark_complete_blocks
        changed.free_blocks = self.free_blocks

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Load what is stored, and let the cache search itself; transformers asks in each step."""
        text = self._texts.get(request_id)
        if text is None or text.num_tokens != len(prompt_ids):  # new, or put back with its answer
            text = Conversation(
                self._store, None, array("q", prompt_ids), b"", chunk_size=None, commit_every=None,
                caller=self._op,
            )  # fmt: skip
            self._texts[request_id] = text
            known = self._allocator.match_prefix_blocks(prompt_ids)
            if len(known) < (len(prompt_ids) - 1) // self._allocator.tokens_per_page:
                text.load(partial(self._fill, prompt_ids))
        return self._search(request_id, prompt_ids)

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Store a text whose prompt has just been computed, or that ends."""
        text = self._texts.get(state.request_id)
        blocks = self._allocator.block_table.get(state.request_id)
        is_first, is_last = state.generated_len() == 1, state.status == RequestStatus.FINISHED
        if text is not None and blocks and (is_first or is_last):
            tokens = state.initial_tokens + state.generated_tokens
            text.append(tokens[text.num_tokens :])
            computed = len(tokens) - 1  # the newest one comes with the next step
            text.commit_kv(self._read(blocks, computed), computed, background=True)
        self._mark(state, complete_blocks)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Forget a request that has ended or is put back; what is being written goes on."""
        self._texts.pop(request_id, None)
        self._free(request_id, no_cache)

    def _pages(self, blocks: list[int]) -> Tensor:
        """Where the pages of blocks lie in the views of a layer."""
        allocator = self._allocator
        stride = allocator.block_physical_stride // allocator.tokens_per_page
        return uploaded(blocks, torch.int64, self._cache.device) * stride

    def _read(self, blocks: list[int], length: int) -> KV:
        """Copy keys and values of the first tokens, [num_kv_heads, length, head_size] each."""
        allocator = self._allocator
        pages = self._pages(blocks[: -(-length // allocator.tokens_per_page)])

        def copied(cached: Tensor) -> Tensor:
            return cached[pages].flatten(0, 1)[:length].transpose(0, 1).cpu()

        views = map(allocator.get_cache_for_block_table, allocator.layer_indices)
        return [(copied(keys), copied(values)) for keys, values in views]

    def _fill(self, prompt_ids: list[int], hit: Hit) -> bool:
        """Write what the cache does not have into free blocks; False: a miss after all."""
        allocator = self._allocator
        size = allocator.tokens_per_page
        known = self._known_with_room(prompt_ids)
        if known is None:
            return True  # the prompt itself has to wait
        first, end = len(known), hit.num_tokens // size
        if end <= first:
            return True
        kv = self._store.load(hit)
        if kv is None:
            return False
        blocks = self._take(end - first)
        pages = self._pages(blocks)
        for layer, pair in zip(allocator.layer_indices, kv, strict=True):
            views = allocator.get_cache_for_block_table(layer)
            for cached, states in zip(views, pair, strict=True):
                part = states[:, first * size : end * size].unflatten(1, (-1, size))
                cached[pages] = part.permute(1, 2, 0, 3).to(cached.device)
        ledger = allocator.ledger
        digest = ledger.block_to_hash[known[-1]] if known else None
        for number, block in enumerate(blocks, first):
            digest = compute_block_hash(digest, prompt_ids[number * size : (number + 1) * size])
            if ledger.register_new_hash(block, digest) is None:
                ledger.cached_blocks[block] = None
            else:
                allocator.pool.free_blocks(allocator.index, [block])
        return True

    def _known_with_room(self, prompt_ids: list[int]) -> list[int] | None:
        """Return the blocks of a prompt that the cache has, where the others fit beside them."""
        allocator, pool = self._allocator, self._allocator.pool
        while True:
            known: list[int] = allocator.match_prefix_blocks(prompt_ids)
            missing = -(-len(prompt_ids) // allocator.tokens_per_page) - len(known)
            room = pool.num_free_sectors * allocator.blocks_per_sector
            if missing <= room + pool.count_free_blocks(allocator.index):
                return known
            if not self._cache.evict_cached_blocks():
                return None

    def _take(self, count: int) -> list[int]:
        allocator, pool = self._allocator, self._allocator.pool
        while pool.count_free_blocks(allocator.index) < count:
            pool.allocate_sector(allocator.index)
        return list(pool.get_free_blocks(allocator.index, count))
