"""The tier of vLLM's offloading: chunks between main memory and disk, by vLLM's own factory."""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

CHUNKS, BYTES = 8, 3 * 4096
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(16)]


class _Medium(Enum):
    STORAGE = auto()


class _Locality(str, Enum):  # noqa: UP042
    LOCAL = "LOCAL"


class _Lookup(Enum):
    MISS = auto()
    HIT = auto()


@dataclass
class _Job:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


@dataclass
class _Result:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class _Manager:
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None) -> None:  # fmt: skip
        self.block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering"]
    modules = {name: ModuleType(name) for name in names}
    modules["vllm"].__version__ = "0"  # type: ignore[attr-defined]
    modules["vllm.v1.kv_offload.base"] = SimpleNamespace(  # type: ignore[assignment]
        Locality=_Locality, LookupResult=_Lookup, Medium=_Medium, OffloadKey=bytes,
        ReqContext=object, RequestOffloadingContext=SimpleNamespace,
    )  # fmt: skip
    modules["vllm.v1.kv_offload.tiering.base"] = SimpleNamespace(  # type: ignore[assignment]
        JobResult=_Result, SecondaryTierManager=_Manager, TransferJob=_Job
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


class Engine:
    """Makes tiers over one main memory, as vLLM does."""

    def __init__(self, is_real: bool) -> None:
        self.is_real = is_real
        module = importlib.import_module("vllm.v1.kv_offload.tiering.base")
        self.job_type: Callable[..., Any] = module.TransferJob
        self.memory = np.random.default_rng(0).integers(0, 256, (CHUNKS, BYTES), dtype=np.uint8)
        self.tiers: list[Any] = []

    def tier(self, path: Path, config: dict[str, Any] | None = None, **options: Any) -> Any:
        fields = {"name": "org/model", "dtype": "bfloat16", "tp_size": 1, **(config or {})}
        parallel = SimpleNamespace(tp_size=fields["tp_size"], pp_size=1, pcp_size=1, dcp_size=1,
                                   rank=0)  # fmt: skip
        spec = SimpleNamespace(config=SimpleNamespace(
            model=SimpleNamespace(name=fields["name"], dtype=fields["dtype"]), parallel=parallel,
            groups=(SimpleNamespace(tokens_per_block=16, layer_names=("a", "b")),),
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
            replicated_layout=False, canonical_layout=False, kv_cache_layout=None,
        ))  # fmt: skip
        settings = {"path": str(path), "capacity_bytes": 1 << 24, **options}
        view = memoryview(self.memory)
        if self.is_real:
            factory = importlib.import_module("vllm.v1.kv_offload.tiering.factory")
            named = {"type": "LmdecodeTier", "module_path": "lmdecode.integrations.vllm"}
            made = factory.SecondaryTierFactory.create_secondary_tier(
                {**named, **settings}, view, spec
            )
        else:
            made = importlib.import_module("lmdecode.integrations.vllm").LmdecodeTier(
                spec, view, "LmdecodeTier", None, **settings
            )
        self.tiers.append(made)
        return made

    def job(self, number: int, keys: list[bytes], chunks: list[int], loads: bool = False) -> Any:
        return self.job_type(number, keys, np.array(chunks), loads, None)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    try:
        importlib.import_module("vllm.v1.kv_offload.tiering.base")
        is_real = True
    except ImportError:
        _stand_in(monkeypatch)
        is_real = False
    monkeypatch.delitem(sys.modules, "lmdecode.integrations.vllm.tier", raising=False)
    made = Engine(is_real)
    yield made
    for tier in made.tiers:
        tier.shutdown()
    if not is_real:
        sys.modules.pop("lmdecode.integrations.vllm.tier", None)


def finished(tier: Any) -> dict[int, Any]:
    tier.drain_jobs()
    assert tier.has_pending_work()
    results = {result.job_id: result for result in tier.get_finished_jobs()}
    assert not tier.has_pending_work() and not list(tier.get_finished_jobs())
    return results


def has(tier: Any, key: bytes) -> bool:
    return bool(tier.lookup(key, None).name == "HIT")


def test_chunks_come_back_after_a_restart(engine: Engine, tmp_path: Path) -> None:
    tier = engine.tier(tmp_path)
    assert not has(tier, KEYS[0])
    tier.on_new_request(None)
    tier.submit_store(engine.job(1, KEYS[:4], [3, 0, 5, 7]))
    tier.submit_store(engine.job(2, KEYS[3:5], [7, 1]))
    results = finished(tier)
    assert results[1].success and results[2].success
    assert results[1].transfer_bytes == 4 * BYTES
    tier.touch(KEYS[:2], None)
    tier.shutdown()
    tier.shutdown()
    kept = engine.memory.copy()
    tier = engine.tier(tmp_path)
    assert [has(tier, key) for key in KEYS[:6]] == [True] * 5 + [False]
    engine.memory[:] = 0
    tier.submit_load(engine.job(3, KEYS[:5], [0, 1, 2, 3, 4], True))
    assert finished(tier)[3].success
    assert np.array_equal(engine.memory[:5], kept[[3, 0, 5, 7, 1]])
    assert not engine.memory[5:].any()


def test_a_chunk_that_is_gone_is_named(engine: Engine, tmp_path: Path) -> None:
    tier = engine.tier(tmp_path)
    tier.submit_store(engine.job(1, KEYS[:2], [0, 1]))
    tier.drain_jobs()
    tier.submit_load(engine.job(2, KEYS[:4], [4, 5, 6, 7], True))
    result = finished(tier)[2]
    assert not result.success and list(result.successful_keys) == KEYS[:2]
    assert np.array_equal(engine.memory[4:6], engine.memory[:2])


def test_a_full_store_evicts(engine: Engine, tmp_path: Path) -> None:
    tier = engine.tier(tmp_path, capacity_bytes=4 * (BYTES + 8192))
    for number, key in enumerate(KEYS[:8]):
        tier.submit_store(engine.job(number, [key], [number % CHUNKS]))
        tier.drain_jobs()
    assert all(result.success for result in finished(tier).values())
    assert not has(tier, KEYS[0]) and has(tier, KEYS[7])


@pytest.mark.parametrize(
    "config, options",
    [
        (dict(name="other"), {}), (dict(dtype="float16"), {}), (dict(tp_size=2), {}),
        ({}, dict(weights_hash="v2")), ({}, dict(salt="tenant")),
    ],
)  # fmt: skip
def test_what_is_another_never_hits(
    engine: Engine, tmp_path: Path, config: dict[str, Any], options: dict[str, Any]
) -> None:
    tier = engine.tier(tmp_path, durability="strict")
    tier.submit_store(engine.job(1, KEYS[:1], [0]))
    tier.drain_jobs()
    tier.shutdown()
    assert has(engine.tier(tmp_path), KEYS[0])
    assert not has(engine.tier(tmp_path, config, **options), KEYS[0])


def test_jobs_from_threads(engine: Engine, tmp_path: Path) -> None:
    tier = engine.tier(tmp_path, num_threads=4, locality="LOCAL")
    assert tier.locality.value == "LOCAL"

    def work(begin: int) -> None:
        for number in range(begin, begin + 10):
            tier.submit_store(engine.job(number, [KEYS[number % 16]], [number % CHUNKS]))

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = finished(tier)
    assert set(results) == set(range(30)) and all(r.success for r in results.values())


def test_options(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected capacity_bytes or directory_bytes"):
        engine.tier(tmp_path, capacity_bytes=None)
    with pytest.raises(ValueError, match="num_threads is 0"):
        engine.tier(tmp_path, num_threads=0)
    with pytest.raises(ValueError, match="durability"):
        engine.tier(tmp_path, durability="none")
    tier = engine.tier(tmp_path)
    with pytest.raises(ValueError, match="2 keys and 1 chunk_ids"):
        tier.submit_store(engine.job(1, KEYS[:2], [0]))
