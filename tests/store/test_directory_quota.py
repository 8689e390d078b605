"""Room on a disk: the quota of a directory, and a file system that is full."""

import errno
import fcntl
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from store_cases import same

from lmdecode.store import Fingerprint, KVStore, StoreLockedError
from lmdecode.store.__main__ import main
from tests.support.processes import PROCESSES

_MIB = 1 << 20
_TOKENS = 64  # a slot each, of a little more than 1 MiB
_OVERHEAD = 5 * _MIB  # of a fingerprint's index, log and reserve
KV = list[tuple[torch.Tensor, torch.Tensor]]


def _fingerprint(model: str) -> Fingerprint:
    return Fingerprint(
        model_id=model, weights_hash="1", dtype="float32", num_layers=2, num_kv_heads=4,
        head_size=256,
    )  # fmt: skip


def _kv(number: int, count: int = _TOKENS) -> KV:
    generator = torch.Generator().manual_seed(number)
    return [
        (torch.randn(4, count, 256, generator=generator),
         torch.randn(4, count, 256, generator=generator))
        for _ in range(2)
    ]  # fmt: skip


def _tokens(number: int, count: int = _TOKENS) -> list[int]:
    return [number] * count


def _open(
    path: Path, model: str = "a", limit: int | None = 24 * _MIB, **options: object
) -> KVStore:
    if limit is None:
        options.setdefault("capacity_bytes", 1 << 30)
    return KVStore(
        path, fingerprint=_fingerprint(model), directory_bytes=limit, chunk_tokens=_TOKENS,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


def _taken(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.glob("*/*"))


def _has(store: KVStore, number: int) -> bool:
    hit = store.lookup(_tokens(number))
    return bool(hit) and same(store.load(hit), _kv(number))


@pytest.mark.parametrize("durability", ["strict", "relaxed"])
def test_the_limit_holds_after_every_put(tmp_path: Path, durability: str) -> None:
    with _open(tmp_path, durability=durability) as store:
        for number in range(60):
            assert store.put(_tokens(number), _kv(number)) == _TOKENS
            assert _taken(tmp_path) <= 24 * _MIB
            assert _has(store, number)
        stats = store.stats()
        assert stats["directory_bytes"] == _taken(tmp_path)
        assert 24 * _MIB - _OVERHEAD - 3 * _MIB <= stats["used_areas"] * stats["slot_bytes"]
        assert store.failure == "" and store.verify().damage == ()


def test_models_that_are_not_used_go_first(tmp_path: Path) -> None:
    with _open(tmp_path, "old") as store:
        for number in range(8):
            store.put(_tokens(number), _kv(number))
    with _open(tmp_path, "row", v_layout="row") as store:
        for number in range(4):
            store.put(_tokens(number), _kv(number))
    with _open(tmp_path, "new", limit=30 * _MIB) as store:
        store.put(_tokens(0), _kv(0))
        taken = []
        for number in range(1, 14):
            assert store.put(_tokens(number), _kv(number)) == _TOKENS
            assert _taken(tmp_path) <= 30 * _MIB
            taken.append(store.stats()["evicted"])
        assert taken == [0] * 13
    with _open(tmp_path, "old", limit=None) as store:
        assert [_has(store, number) for number in range(8)] == [False] * 8
        assert store.verify().damage == ()
    with _open(tmp_path, "row", limit=None, v_layout="row") as store:
        kept = [_has(store, number) for number in range(4)]
        assert kept == sorted(kept) and kept[-1]


def test_stores_that_are_open_here_give_their_oldest(tmp_path: Path) -> None:
    limit = 20 * _MIB
    with _open(tmp_path, "a", limit) as a, _open(tmp_path, "b", limit) as b:
        for number in range(6):
            a.put(_tokens(number), _kv(number))
            time.sleep(0.002)
        assert _has(a, 0)
        for number in range(8):
            assert b.put(_tokens(number), _kv(number)) == _TOKENS
            assert _taken(tmp_path) <= limit
        kept = [_has(a, number) for number in range(6)]
        assert kept[0] and not kept[1] and kept[1:] == sorted(kept[1:])


def test_short_entries_count_with_what_they_have(tmp_path: Path) -> None:
    with _open(tmp_path, limit=12 * _MIB) as store:
        for number in range(100):  # 36 KiB each, and 100 MiB of slots
            assert store.put(_tokens(number, 1), _kv(number, 1)) == 1
        assert store.stats()["evicted"] == 0
        assert _taken(tmp_path) <= 12 * _MIB
        assert all(store.lookup(_tokens(number, 1)) for number in range(100))


def test_a_long_prompt_keeps_what_it_goes_on_from(tmp_path: Path) -> None:
    with _open(tmp_path, limit=16 * _MIB) as store:
        tokens = [number for number in range(8) for _ in range(_TOKENS)]
        kv = _kv(5, len(tokens))
        for chunks in range(1, 9):
            n = chunks * _TOKENS
            assert store.put(tokens[:n], [(k[:, :n], v[:, :n]) for k, v in kv]) == n
        assert same(store.load(store.lookup(tokens)), kv)


def test_where_others_take_it_nothing_is_stored_and_nothing_evicted(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with _open(tmp_path) as store:
        for number in range(4):
            store.put(_tokens(number), _kv(number))
        (tmp_path / "other" / "file").write_bytes(bytes(22 * _MIB))
        session = store.session("chat")
        session.step(_tokens(9))
        with pytest.warns(RuntimeWarning, match="takes its directory_bytes, 25165824"):
            assert store.put(_tokens(7), _kv(7)) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert session.commit(_kv(9)) == 0
        assert "directory_bytes" in store.failure
        assert store.session("chat").tokens == _tokens(9)  # its tokens are
        assert store.stats()["evicted"] == 0 and all(_has(store, number) for number in range(4))
        (tmp_path / "other" / "file").unlink()
        assert store.put(_tokens(7), _kv(7)) == _TOKENS and store.failure == ""
        assert session.commit(_kv(9)) == _TOKENS


def test_what_is_held_or_pinned_stays(tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        store.put(_tokens(0), _kv(0), pin=True)
        store.put(_tokens(1), _kv(1))
        hit = store.lookup(_tokens(1))
        for number in range(2, 40):
            store.put(_tokens(number), _kv(number))
        assert _has(store, 0) and same(store.load(hit), _kv(1))


def test_imports_and_many_writers(tmp_path: Path) -> None:
    with _open(tmp_path / "one", limit=None) as store:
        for number in range(20):
            store.put(_tokens(number), _kv(number))
        store.export(tmp_path / "file")
    with _open(tmp_path / "two", limit=16 * _MIB) as store:
        store.import_(tmp_path / "file")
        assert 4 * _MIB < _taken(tmp_path / "two") <= 16 * _MIB
    first, second = (_open(tmp_path / "many", writers="many", limit=16 * _MIB) for _ in range(2))
    with first, second:
        for number in range(20):
            assert second.put(_tokens(number), _kv(number)) == _TOKENS
            assert _taken(tmp_path / "many") <= 16 * _MIB
        assert _has(first, 19) and not _has(first, 0)
        assert second.stats()["directory_bytes"] == _taken(tmp_path / "many")


def test_threads(tmp_path: Path) -> None:
    with _open(tmp_path, "a") as a, _open(tmp_path, "b") as b:

        def work(store: KVStore, begin: int) -> None:
            for number in range(begin, begin + 15):
                store.put(_tokens(number), _kv(number))

        threads = [
            threading.Thread(target=work, args=(store, begin))
            for store in (a, b) for begin in (0, 100)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _taken(tmp_path) <= 24 * _MIB
        assert a.verify().damage == () and b.verify().damage == ()
        assert a.stats()["entries"] + b.stats()["entries"] >= 8


def test_a_forked_child_has_stores_of_its_own(tmp_path: Path) -> None:
    with _open(tmp_path, "a") as store:
        store.put(_tokens(0), _kv(0))
        child = os.fork()
        if child == 0:
            try:
                with _open(tmp_path, "b") as own:
                    for number in range(30):
                        own.put(_tokens(number), _kv(number))
                    stored = own.put(_tokens(99), _kv(99))
                os._exit(0 if stored == _TOKENS and _taken(tmp_path) <= 24 * _MIB else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert _has(store, 0)  # which the child may not evict


def _write_elsewhere(path: Path, ready: object, done: object) -> None:
    with _open(path, "elsewhere") as store:
        for number in range(6):
            store.put(_tokens(number), _kv(number))
        ready.set()  # type: ignore[attr-defined]
        done.wait()  # type: ignore[attr-defined]
        assert all(_has(store, number) for number in range(6))


def test_what_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    ready, done = PROCESSES.Event(), PROCESSES.Event()
    process = PROCESSES.Process(target=_write_elsewhere, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(120)
    with _open(tmp_path, "here") as store:
        for number in range(30):
            assert store.put(_tokens(number), _kv(number)) == _TOKENS
            assert _taken(tmp_path) <= 24 * _MIB
        with pytest.raises(StoreLockedError):
            _open(tmp_path, "elsewhere")
    done.set()
    process.join()
    assert process.exitcode == 0


def test_who_opens_a_store_waits_for_an_eviction(tmp_path: Path) -> None:
    evicting = _open(tmp_path, "a")  # as the process does that evicts, with this lock
    with (tmp_path / "eviction.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        opened: list[KVStore] = []
        thread = threading.Thread(target=lambda: opened.append(_open(tmp_path, "a")))
        thread.start()
        time.sleep(0.1)
        assert not opened
        evicting.close()
    thread.join(60)
    opened[0].close()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("a", "b"):
        with _open(tmp_path, model, limit=None) as store:
            for number in range(5):
                store.put(_tokens(number), _kv(number))
    assert main(["gc", str(tmp_path), "--limit", "14M"]) == 0
    assert _taken(tmp_path) <= 14 * _MIB
    assert f"{_taken(tmp_path)} bytes on the disk" in capsys.readouterr().out
    with _open(tmp_path, "b", limit=None) as store:
        assert _has(store, 4)
    assert main(["gc", str(tmp_path), "--limit", "1M"]) == 1  # the indices alone have more


@pytest.mark.parametrize("limit, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_wrong_limits(tmp_path: Path, limit: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="directory_bytes"):
        _open(tmp_path, limit=limit)  # type: ignore[arg-type]


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    point = tmp_path / "disk"
    point.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(point)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(28 * _MIB)
        if subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True).returncode:
            pytest.skip("no mkfs.ext4")
        command = ["mount", "-o", "loop", str(image), str(point)]
    try:
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this user may not mount file systems")
    except FileNotFoundError:
        pytest.skip("no mount")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def _opened(path: Path) -> KVStore:
    return KVStore(path, fingerprint=_fingerprint("full"), capacity_bytes=1 << 30)


def test_a_full_disk_replaces_the_oldest(small_disk: Path) -> None:
    path = small_disk / "store"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _opened(path) as store:
            for number in range(60):
                evicted = store.stats()["evicted"]
                assert store.put(_tokens(number), _kv(number)) == _TOKENS
                # One for one; what the index took once is given back from a few slots more.
                assert store.stats()["evicted"] - evicted <= 6
                assert store.failure == ""
            for number in range(60, 64):
                session = store.session(f"s{number}")
                session.step(_tokens(number))
                assert session.commit(_kv(number)) == _TOKENS
            held = [n for n in range(64) if store.lookup(_tokens(n))]
            assert len(held) >= 10 and held == list(range(held[0], 64))  # the newest
        with _opened(path) as store:
            for number in held:
                hit = store.lookup(_tokens(number))
                loaded = store.load(hit)
                assert torch.equal(loaded[1][0], _kv(number)[1][0])
            assert store.session("s63").tokens == _tokens(63)
            assert not store.verify().damage


def test_nothing_goes_where_there_is_space_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with _opened(small_disk / "store") as store:
        ballast.write_bytes(os.urandom(8 * _MIB))
        number = 0
        while store.stats()["evicted"] == 0:
            store.put(_tokens(number), _kv(number))
            number += 1
        ballast.unlink()
        evicted = store.stats()["evicted"]
        for number in range(100, 103):
            assert store.put(_tokens(number), _kv(number)) == _TOKENS
        assert store.stats()["evicted"] == evicted


def test_one_warning_says_that_nothing_can_be_stored(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with (
        _opened(small_disk / "store") as store,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="No space"), ballast.open("wb") as file:
            for _ in range(64):
                file.write(os.urandom(_MIB))
                file.flush()
        for number in range(3):  # there is nothing to replace
            assert store.put(_tokens(number), _kv(number)) == 0
        assert len(caught) == 1 and caught[0].category is RuntimeWarning
        assert "no space left" in str(caught[0].message)
        assert "no space left" in store.failure
        ballast.unlink()
        assert store.put(_tokens(9), _kv(9)) == _TOKENS
        assert store.failure == "" and len(caught) == 1


def test_a_new_store_has_no_space(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"), (small_disk / "ballast").open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(_MIB))
            file.flush()
    with pytest.raises(OSError) as raised:
        _opened(small_disk / "store")
    assert raised.value.errno == errno.ENOSPC
    assert "store" in str(raised.value)
