"""HiCache's storage: pages come back bit for bit, in the place of a pool, after a restart."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

storage_module = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
pytest.importorskip("lmdecode.store")

from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

from lmdecode.integrations.sglang import LmdecodeStorage  # noqa: E402
from lmdecode.store.__main__ import main  # noqa: E402

PAGE = 4
PoolName, Transfer = storage_module.PoolName, storage_module.PoolTransfer
Policy = storage_module.PoolHitPolicy


def new_pool(pages: int, heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> Any:
    """SGLang's own pool of the host, for 3 layers with heads of 8, filled with noise."""
    device = torch.zeros(3, pages * PAGE, heads, 8, dtype=dtype)
    pointers = torch.zeros(3, dtype=torch.int64)
    buffers = KVBuffers(
        k=tuple(device), v=tuple(device), k_data_ptrs=pointers, v_data_ptrs=pointers,
        layout=KVBufferLayout.NHD,
    )  # fmt: skip
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=heads, head_dim=8, v_head_dim=8, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = MHATokenToKVPoolHost(
        info, 1.0, 0, PAGE, "layer_first", pin_memory=False, device_capacity_tokens=pages * PAGE,
        start_layer=0, end_layer=2, host_token_capacity=pages * PAGE,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(heads)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))
    return pool


def config(path: Path, **changes: Any) -> Any:
    extra = {"path": str(path), "capacity_bytes": 1 << 24, **changes.pop("extra", {})}
    fields = dict(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=False,
        model_name="org/model", extra_config=extra,
    )  # fmt: skip
    return storage_module.HiCacheStorageConfig(**{**fields, **changes})


def opened(path: Path, pool: Any = None, **changes: Any) -> LmdecodeStorage:
    storage = LmdecodeStorage(config(path, **changes), {})
    storage.register_mem_pool_host(pool or new_pool(8))
    return storage


def indices(*pages: int) -> Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


KEYS = [f"{number:064x}" for number in range(8)]


def test_pages_come_back_after_a_restart(tmp_path: Path) -> None:
    pool = new_pool(8)
    storage = opened(tmp_path, pool)
    assert storage.batch_exists(KEYS) == 0 and not storage.exists(KEYS[0])
    data = [pool.get_data_page(page * PAGE) for page in range(4)]
    assert storage.batch_set(KEYS[:4], data)
    assert storage.batch_set(KEYS[:4], data) and storage.set(KEYS[4], data[0])
    storage.close()
    storage = opened(tmp_path, pool)
    assert storage.batch_exists(KEYS) == 5
    targets = [pool.get_dummy_flat_data_page() for _ in range(6)]
    found = storage.batch_get(KEYS[:6], targets)
    assert all(a is b for a, b in zip(found[:5], targets, strict=False)) and found[5] is None
    assert all(torch.equal(a, b) for a, b in zip(found, data, strict=False))
    strided = torch.zeros(2 * targets[0].numel(), dtype=torch.bfloat16)[::2]
    assert storage.get(KEYS[1], strided) is strided and torch.equal(strided, data[1])
    raw = storage.get(KEYS[1])
    assert raw is not None and torch.equal(raw.view(torch.bfloat16), data[1])
    storage.close()
    storage.close()
    assert main(["verify", str(tmp_path)]) == 0


def test_pages_move_between_pool_and_store(tmp_path: Path) -> None:
    pool = new_pool(8)
    storage, expected = opened(tmp_path, pool), pool.kv_buffer.clone()
    assert storage.batch_set_v1(KEYS[:3], indices(1, 4, 2)) == [True] * 3
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1([*KEYS[:3], "x"], indices(5, 6, 0, 7)) == [True] * 3 + [False]
    for to, of in ((5, 1), (6, 4), (0, 2)):
        assert torch.equal(pool.get_data_page(to * PAGE),
                           expected[:, :, of * PAGE : of * PAGE + PAGE].flatten())  # fmt: skip
    with pytest.raises(ValueError, match="host_indices of kv has 3 numbers; expected 4"):
        storage.batch_get_v1(KEYS[:1], torch.arange(3))


def test_several_pools(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    window = new_pool(8, heads=1)
    storage.register_mem_host_pool_v2(storage.mem_pool_host, PoolName.KV)
    storage.register_mem_host_pool_v2(window, PoolName.SWA)
    done = storage.batch_set_v2([
        Transfer(name=PoolName.KV, host_indices=indices(0, 1, 2, 3), keys=KEYS[:4]),
        Transfer(name=PoolName.SWA, host_indices=indices(1, 2), keys=KEYS[1:3]),
    ])  # fmt: skip
    assert done == {PoolName.KV: [True] * 4, PoolName.SWA: [True] * 2}

    def exists(policy: Any, keys: list[str]) -> Any:
        transfer = Transfer(name=PoolName.SWA, keys=keys, hit_policy=policy)
        return storage.batch_exists_v2(KEYS, [transfer])

    # The last two pages of a prefix must be there: prefixes of 3 pages alone have them.
    result = exists(Policy.TRAILING_PAGES, KEYS[:2])
    assert result.kv_hit_pages == 3 and result.restorable_prefix_pages == [3]
    assert result.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.SWA: 3}
    assert exists(Policy.ALL_PAGES, KEYS).kv_hit_pages == 0
    assert storage.batch_exists_v2(KEYS).kv_hit_pages == 4
    with pytest.raises(ValueError, match="hit_policy"):
        exists(Policy.BLOCK_GROUPS, KEYS)
    kept = window.kv_buffer.clone()
    window.kv_buffer.zero_()
    got = storage.batch_get_v2(
        [Transfer(name=PoolName.SWA, host_indices=indices(1, 2, 3), keys=KEYS[1:4])]
    )
    assert got == {PoolName.SWA: [True, True, False]}
    assert torch.equal(window.kv_buffer[:, :, PAGE : 3 * PAGE], kept[:, :, PAGE : 3 * PAGE])
    with pytest.raises(ValueError, match="pool mamba is not registered"):
        storage.batch_get_v2(
            [Transfer(name=PoolName.MAMBA, host_indices=indices(0), keys=KEYS[:1])]
        )


@pytest.mark.parametrize(
    "changes",
    [
        dict(model_name="other"), dict(tp_rank=1, tp_size=2), dict(pp_size=2), dict(attn_cp_size=2),
        dict(extra=dict(weights_hash="v2")), dict(extra=dict(salt="tenant")),
    ],
)  # fmt: skip
def test_what_is_another_never_hits(tmp_path: Path, changes: dict[str, Any]) -> None:
    storage = opened(tmp_path)
    storage.batch_set_v1(KEYS[:1], indices(0))
    storage.close()
    assert opened(tmp_path).exists(KEYS[0])
    assert not opened(tmp_path, **changes).exists(KEYS[0])
    assert not opened(tmp_path, new_pool(8, dtype=torch.float16)).exists(KEYS[0])


def test_ranks_of_latent_attention_share_pages(tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(is_mla_model=True, tp_size=2, extra=dict(durability="strict"))
    writer, other = opened(tmp_path, **changes), opened(tmp_path, tp_rank=1, **changes)
    writer.batch_set_v1(KEYS[:1], indices(0))
    assert other.exists(KEYS[0])
    assert other.batch_get_v1(KEYS[:1], indices(7)) == [True]
    for storage in (writer, other):
        storage.register_mem_host_pool_v2(new_pool(8, heads=1), PoolName.MAMBA)
        transfer = Transfer(name=PoolName.MAMBA, host_indices=indices(0), keys=KEYS[:1])
        assert storage.batch_set_v2([transfer]) == {PoolName.MAMBA: [True]}


def test_full_damaged_and_cleared(tmp_path: Path) -> None:
    size = 2 * 3 * PAGE * 2 * 8 * 2
    storage = opened(tmp_path, extra=dict(capacity_bytes=4 * (4096 + size + 4096)))
    for key in KEYS:
        assert storage.set(key, storage.mem_pool_host.get_data_page(0))
    assert not storage.exists(KEYS[0]) and storage.exists(KEYS[-1])
    storage.close()
    for slab in tmp_path.glob("*/slab-*"):
        content = bytearray(slab.read_bytes())
        for place in range(4200, len(content), 1000):
            content[place] ^= 1
        slab.write_bytes(content)
    storage = opened(tmp_path, extra=dict(capacity_bytes=1 << 20))
    assert storage.batch_get_v1(KEYS[4:], indices(0, 1, 2, 3)) == [False] * 4
    assert storage.set(KEYS[4], storage.mem_pool_host.get_data_page(0))
    assert storage.exists(KEYS[4])
    storage.clear()
    assert not storage.exists(KEYS[4])


def test_threads(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    data = [storage.mem_pool_host.get_data_page(page * PAGE) for page in range(8)]
    wrong = []

    def work(begin: int) -> None:
        for number in range(begin, begin + 40):
            key, page = f"{number % 60:064x}", data[number % 60 % 8]
            storage.set(key, page)
            found = storage.get(key, torch.zeros_like(page))
            if found is None or not torch.equal(found, page):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(begin,)) for begin in (0, 20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    storage.close()


def test_one_limit_for_all(tmp_path: Path) -> None:
    extra = {"path": str(tmp_path), "directory_bytes": 1 << 24}
    storage = LmdecodeStorage(config(tmp_path, extra_config=extra))
    storage.register_mem_pool_host(new_pool(8))
    assert storage.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected path, and capacity_bytes or directory_bytes"):
        LmdecodeStorage(config(tmp_path, extra_config={"path": str(tmp_path)}))
    with pytest.raises(ValueError, match="durability"):
        opened(tmp_path, extra=dict(durability="none")).set(KEYS[0], torch.zeros(768))
    storage = opened(tmp_path)
    storage.set(KEYS[0], storage.mem_pool_host.get_data_page(0))
    with pytest.raises(ValueError, match="target_location has 8 bytes; expected 768"):
        storage.get(KEYS[0], torch.zeros(2))


def test_sglang_makes_it_from_its_options(tmp_path: Path) -> None:
    extra = {
        "backend_name": "lmdecode", "module_path": "lmdecode.integrations.sglang",
        "class_name": "LmdecodeStorage", "path": str(tmp_path), "capacity_bytes": 1 << 24,
    }  # fmt: skip
    made = StorageBackendFactory.create_backend(
        "dynamic", config(tmp_path, extra_config=extra), SimpleNamespace()
    )
    assert isinstance(made, LmdecodeStorage)
    assert not LmdecodeStorage.__abstractmethods__
