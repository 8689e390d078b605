"""``LmdecodeStorage``: the pages of SGLang's HiCache in a ``KVStore``, on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from torch import Tensor

from lmdecode.integrations.block_store import Block, BlockStore, StoreOptions
from lmdecode.store import Fingerprint
from lmdecode.store.kv_store import KV

_NAME = "LmdecodeStorage"
_OPTIONS = ("path", "capacity_bytes", "directory_bytes", "durability", "salt", "weights_hash")
_MOST_ROW_BYTES = 4096


class _Pages:
    """Pages of one pool: all of the same size."""

    def __init__(self, options: StoreOptions, fields: dict[str, Any], num_bytes: int,
                 writes: bool) -> None:  # fmt: skip
        if num_bytes % 2:
            raise ValueError(f"{_NAME}: pages have {num_bytes} bytes; expected an even number")
        self.num_bytes = num_bytes
        # The halves of a page lie as keys and values; a row is a token to the store.
        row = math.gcd(num_bytes // 2, _MOST_ROW_BYTES)
        self._tokens = (0,) * (num_bytes // 2 // row)
        fingerprint = Fingerprint(
            **fields, dtype="uint8", num_layers=1, num_kv_heads=1, head_size=row
        )
        self._store = BlockStore(options, fingerprint, len(self._tokens), writes)

    def _block(self, key: str) -> Block:
        return Block(key.encode(), self._tokens)

    def _kv(self, page: Tensor) -> KV:
        halves = page.view(2, 1, len(self._tokens), -1)
        return [(halves[0], halves[1])]

    def has(self, key: str) -> bool:
        return self._store.has(self._block(key))

    def load(self, key: str, page: Tensor) -> bool:
        return self._store.load(self._block(key), self._kv(page))

    def save(self, pages: Sequence[tuple[str, Callable[[], Tensor]]]) -> bool:
        """Store pages; whether all are stored now."""

        def kv(page: Callable[[], Tensor]) -> Callable[[], KV]:
            return lambda: self._kv(page())

        blocks = [(self._block(key), kv(page)) for key, page in pages]
        self._store.save(reversed(blocks))  # the beginnings of texts are to be evicted last
        return all(self._store.has(block) for block, _ in blocks)

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()


def _bytes_of(page: Tensor) -> Tensor:
    return page.detach().contiguous().view(torch.uint8).reshape(-1)


class LmdecodeStorage(HiCacheStorage):
    """HiCache's pages in a ``KVStore``: checked when they are read, evicted, and kept over a crash.

    Named in SGLang's options, with ``--hicache-storage-backend dynamic``. SGLang's keys are hashes
    of tokens alone. Model, weights, dtype, layout, page size and rank are in the fingerprint, so
    that what another model or another configuration stored is never found.

    Parameters
    ----------
    storage_config
        Of SGLang. Its ``extra_config`` has ``path``, the directory of the store, and
        ``capacity_bytes`` or ``directory_bytes``; and, if wanted, ``durability`` ("relaxed"),
        ``salt``, and ``weights_hash``, a name for the weights where the model's name is not one.
    settings
        What SGLang gives beside; it is not looked at.

    Raises
    ------
    ValueError
        An option is missing or none of ``KVStore``'s.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, settings: Any = None) -> None:
        extra = storage_config.extra_config or {}
        given = {name: extra[name] for name in _OPTIONS if extra.get(name) is not None}
        if "path" not in given or not {"capacity_bytes", "directory_bytes"} & set(given):
            raise ValueError(
                f"{_NAME}: extra_config has {sorted(given)}; expected path, and capacity_bytes or "
                "directory_bytes"
            )
        self._weights = str(given.pop("weights_hash", ""))
        self._options = StoreOptions(**given, writers="many", owner=_NAME)
        self._config = storage_config
        self._pools: dict[str, _Pages] = {}

    # --- one pool: what SGLang calls for models with plain attention

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Read a page into ``target_location``, of any dtype; None: a miss."""
        return self._get(str(PoolName.KV), key, target_location)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        """Read pages; None for each miss."""
        targets = target_locations or [None] * len(keys)
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page; False: it is not stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages; whether all are stored."""
        if not keys:
            return True
        pages = self._pages(str(PoolName.KV), _num_bytes(values[0]))
        return pages.save([(k, _later(value)) for k, value in zip(keys, values, strict=True)])

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        pages = self._pages(str(PoolName.KV))
        return pages is not None and pages.has(key)

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool, at the places of ``host_indices``."""
        return self._transfer(PoolName.KV, self.mem_pool_host, keys, host_indices, self._read)

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool."""
        return self._transfer(PoolName.KV, self.mem_pool_host, keys, host_indices, self._write)

    # --- several pools: windows, state space models, indexers

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Say how many leading pages are stored, as far as every pool has what it needs."""
        found = self.batch_exists(keys)
        counts = {PoolName.KV: found} if found else {}
        usable = set(range(1, found + 1))
        for transfer in pool_transfers or []:
            if not usable:
                break
            has = self._stored_pages(transfer.name, keys[:found])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                last = has.index(False) if False in has else found
                lengths = set(range(1, last + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                tail = max(1, len(transfer.keys or ()))
                lengths = {n for n in range(1, found + 1) if all(has[max(0, n - tail) : n])}
            else:
                raise ValueError(f"{_NAME}: hit_policy is {transfer.hit_policy}; not supported")
            if lengths:
                counts[transfer.name] = max(lengths)
            usable &= lengths
        return PoolTransferResult(max(usable, default=0), counts, sorted(usable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read each pool's pages into its host pool."""
        return {one.name: self._of_pool(one, self._read) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store each pool's pages."""
        return {one.name: self._of_pool(one, self._write) for one in transfers}

    # --- upkeep

    def clear(self) -> None:
        """Erase all pages of this configuration."""
        for pages in self._pools.values():
            pages.clear()

    def close(self) -> None:
        """Make everything durable; done again it does nothing."""
        for pages in self._pools.values():
            pages.close()

    # --- parts

    def _pool(self, name: str) -> Any:
        if name == PoolName.KV:
            return getattr(self, "mem_pool_host", None)
        return getattr(self, "registered_pools", {}).get(name)

    def _pages(self, name: str, num_bytes: int | None = None) -> Any:
        """Return the pages of a pool; None: their size is not known yet, and none was stored."""
        if (known := self._pools.get(name)) is None:
            if (pool := self._pool(name)) is not None:
                num_bytes = _num_bytes(pool.get_dummy_flat_data_page())
            if num_bytes is None:
                return None
            known = _Pages(self._options, self._identity(name, pool), num_bytes, self._writes(name))
            self._pools[name] = known
        return known

    def _is_shared(self, name: str) -> bool:
        """Whether all ranks have the same pages: latent attention, but for states beside it."""
        return self._config.is_mla_model and name != PoolName.MAMBA

    def _writes(self, name: str) -> bool:
        return self._config.is_storage_writer or not self._is_shared(name)

    def _identity(self, name: str, pool: Any) -> dict[str, Any]:
        config = self._config
        ranks = [] if self._is_shared(name) else [config.tp_size]
        parts = [
            "sglang", name, config.pp_size, config.pp_rank, config.attn_cp_size,
            config.attn_cp_rank, *ranks,
            *(getattr(pool, part, None) for part in ("dtype", "layout", "page_size")),
        ]  # fmt: skip
        return dict(
            model_id=config.model_name or "",
            weights_hash=self._weights,
            layout=":".join(map(str, parts)),
            tensor_parallel_rank=0 if self._is_shared(name) else config.tp_rank,
        )

    def _get(self, name: str, key: str, target: Tensor | None) -> Tensor | None:
        pages = self._pages(name, None if target is None else _num_bytes(target))
        if pages is None:
            return None
        page = torch.empty(pages.num_bytes, dtype=torch.uint8)
        if target is None:
            return page if pages.load(key, page) else None
        if _num_bytes(target) != pages.num_bytes:
            raise ValueError(
                f"{_NAME}.get: target_location has {_num_bytes(target)} bytes; expected "
                f"{pages.num_bytes}, a page"
            )
        if target.is_contiguous() and target.device.type == "cpu":
            return target if pages.load(key, _bytes_of(target)) else None
        if not pages.load(key, page):
            return None
        target.copy_(page.view(target.dtype).view(target.shape))
        return target

    def _read(self, name: str, pool: Any, keys: list[str], places: list[int]) -> list[bool]:
        done = []
        for key, place in zip(keys, places, strict=True):
            page = self._get(name, key, pool.get_dummy_flat_data_page())
            if page is not None:
                pool.set_from_flat_data_page(place, page)
            done.append(page is not None)
        return done

    def _write(self, name: str, pool: Any, keys: list[str], places: list[int]) -> list[bool]:
        pages = self._pages(name)
        assert pages is not None
        pages.save([
            (key, lambda place=place: _bytes_of(pool.get_data_page(place, flat=True)).cpu())
            for key, place in zip(keys, places, strict=True)
        ])  # fmt: skip
        return [pages.has(key) for key in keys]

    def _transfer(
        self, name: str, pool: Any, keys: list[str], host_indices: Tensor | None, move: Any
    ) -> list[bool]:
        size = getattr(pool, "page_size", 1) or 1
        if host_indices is None or host_indices.numel() != len(keys) * size:
            came = 0 if host_indices is None else host_indices.numel()
            raise ValueError(
                f"{_NAME}: host_indices of {name} has {came} numbers; expected {len(keys) * size}"
            )
        result: list[bool] = move(str(name), pool, keys, host_indices[::size].tolist())
        return result

    def _of_pool(self, transfer: PoolTransfer, move: Any) -> list[bool]:
        pool = self._pool(transfer.name)
        if pool is None:
            raise ValueError(f"{_NAME}: pool {transfer.name} is not registered")
        return self._transfer(transfer.name, pool, transfer.keys or [], transfer.host_indices, move)

    def _stored_pages(self, name: str, keys: list[str]) -> list[bool]:
        pages = self._pages(name)
        return [pages is not None and pages.has(key) for key in keys]


def _num_bytes(page: Tensor) -> int:
    return page.numel() * page.element_size()


def _later(value: Tensor) -> Callable[[], Tensor]:
    return lambda: _bytes_of(value).cpu()
