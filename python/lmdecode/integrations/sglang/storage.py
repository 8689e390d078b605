"""``LmdecodeStorage``: the pages of SGLang's HiCache in a ``KVStore``, on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
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

from lmdecode.integrations.block_store import StoreOptions
from lmdecode.integrations.page_store import PageStore, bytes_of

_NAME = "LmdecodeStorage"
_OPTIONS = ("path", "capacity_bytes", "directory_bytes", "durability", "salt", "weights_hash")


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
        self._pools: dict[str, PageStore] = {}
        self._lock = threading.Lock()

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
        return all(pages.save([(k.encode(), _later(v)) for k, v in zip(keys, values, strict=True)]))

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        pages = self._pages(str(PoolName.KV))
        return pages is not None and pages.has(key.encode())

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
        with self._lock:  # SGLang reads and writes in threads of their own
            if (known := self._pools.get(name)) is not None:
                return known
            if (pool := self._pool(name)) is not None:
                num_bytes = _num_bytes(pool.get_dummy_flat_data_page())
            if num_bytes is None:
                return None
            identity, writes = self._identity(name, pool), self._writes(name)
            known = self._pools[name] = PageStore(self._options, identity, num_bytes, writes)
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
        page = torch.empty(pages.num_bytes, dtype=torch.uint8, device="cpu")
        if target is None:
            return page if pages.load(key.encode(), page) else None
        if _num_bytes(target) != pages.num_bytes:
            raise ValueError(
                f"{_NAME}.get: target_location has {_num_bytes(target)} bytes; expected "
                f"{pages.num_bytes}, a page"
            )
        if target.is_contiguous() and target.device.type == "cpu":
            return target if pages.load(key.encode(), bytes_of(target)) else None
        if not pages.load(key.encode(), page):
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
        done: list[bool] = pages.save([
            (key.encode(), lambda place=place: bytes_of(pool.get_data_page(place, flat=True)).cpu())
            for key, place in zip(keys, places, strict=True)
        ])  # fmt: skip
        return done

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
        return [pages is not None and pages.has(key.encode()) for key in keys]


def _num_bytes(page: Tensor) -> int:
    return page.numel() * page.element_size()


def _later(value: Tensor) -> Callable[[], Tensor]:
    return lambda: bytes_of(value).cpu()
