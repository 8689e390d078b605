"""SGLang's own modules where it is installed; else the interfaces that lmdecode takes from it.

SGLang imports much that a CPU has not: what is missing of that becomes empty modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any, NamedTuple

import torch

IS_REAL = importlib.util.find_spec("sglang") is not None
_STORAGE, _SAMPLER = "sglang.srt.mem_cache.hicache_storage", "sglang.srt.layers.sampler"


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)  # type: ignore[no-any-return]


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules of these packages."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _import_with_empty(name: str) -> None:
    missing = _Missing()
    sys.meta_path.append(missing)
    while True:
        try:
            importlib.import_module(name)
            return
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if not package or package == "sglang" or package in missing.names:
                raise
            missing.names.add(package)


def _new(name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            _new(parent, __path__=[])
        setattr(sys.modules[parent], last, module)


@dataclass
class _Config:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict[str, Any] | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0


class _Pool(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"


class _Policy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class _Transfer:
    name: Any
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: Any = _Policy.ALL_PAGES


@dataclass
class _Result:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class _Storage:
    def register_mem_pool_host(self, pool: Any) -> None:
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, pool: Any, name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[name] = pool

    def exists(self, key: str) -> bool:
        raise NotImplementedError

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((i for i, key in enumerate(keys) if not self.exists(key)), len(keys))


class _Capture(NamedTuple):
    weights: torch.Tensor
    token_ids: torch.Tensor | None
    selected_weight: torch.Tensor | None
    batch_rows: torch.Tensor


if IS_REAL:
    for _name in (_STORAGE, _SAMPLER):
        _import_with_empty(_name)
else:
    _factories: dict[str, Any] = {}
    _new(
        _STORAGE, HiCacheStorage=_Storage, HiCacheStorageConfig=_Config, PoolName=_Pool,
        HiCacheStorageExtraInfo=object, PoolHitPolicy=_Policy, PoolTransfer=_Transfer,
        PoolTransferResult=_Result,
    )  # fmt: skip
    _new(
        _SAMPLER, Sampler=torch.nn.Module, _SamplingMaskCapture=_Capture,
        _CUSTOM_SAMPLER_FACTORIES=_factories, register_sampler_backend=_factories.__setitem__,
    )  # fmt: skip

storage_module = sys.modules[_STORAGE]
sampler_module = sys.modules[_SAMPLER]
