"""Several processes write one store: what each sees, and what is left when one is killed."""

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from store_cases import CHUNK, Open, cache, fingerprint, same

from lmdecode.store import KVStore, StoreError, StoreLockedError
from tests.support.processes import PROCESSES

_TOKENS = list(range(40, 60))


def _open(folder: Path, **options: Any) -> KVStore:
    settings: dict[str, Any] = dict(
        fingerprint=fingerprint(), chunk_tokens=CHUNK, capacity_bytes=1 << 40, writers="many"
    )
    return KVStore(folder, **{**settings, **options})


def _conversation(writer: int, number: int) -> list[int]:
    """Writers share beginnings, and have ends of their own."""
    return [*range(10 * (number % 7), 10 * (number % 7) + 9), 1000 + writer, 2000 + number]


def _is_writer(store: KVStore) -> bool:
    return bool(store._handle.native.is_writer)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[KVStore, KVStore]]:
    with _open(tmp_path / "store") as first, _open(tmp_path / "store") as second:
        assert _is_writer(first) and not _is_writer(second)
        yield first, second


def test_each_finds_what_the_other_stored(two: tuple[KVStore, KVStore]) -> None:
    for number, (ours, theirs) in enumerate((two, two[::-1])):
        tokens = _conversation(number, 3)
        assert ours.put(tokens, cache(tokens)) == len(tokens)
        hit = theirs.lookup(tokens)
        assert same(theirs.load(hit), cache(tokens))
    assert two[1].stats()["entries"] == two[0].stats()["entries"] == 3
    assert two[1].failure == ""


def test_sessions_go_from_one_to_the_other(two: tuple[KVStore, KVStore]) -> None:
    first, second = two
    session = second.session("chat")
    session.step(_TOKENS)
    assert session.commit(cache(_TOKENS)) == len(_TOKENS)
    other = first.session("chat")
    assert other.tokens == _TOKENS
    num_tokens, kv = other.resume()
    assert num_tokens == len(_TOKENS) and same(kv, cache(_TOKENS))
    second.session("forked").step([1, 2])
    assert second.session("chat").fork("twin").tokens == _TOKENS
    session.rewind(5)
    assert first.sessions() and dict(first.sessions()) == {"chat": 5, "twin": 20}
    session.delete()
    assert dict(first.sessions()) == {"twin": 20}


def test_strides_quotas_and_windows_arrive(two: tuple[KVStore, KVStore]) -> None:
    second = two[1]
    kv = [(k.transpose(0, 1).contiguous().transpose(0, 1), v[None]) for k, v in cache(_TOKENS)]
    assert second.put(_TOKENS, kv, ttl=100.0) == len(_TOKENS)
    assert same(second.load(second.lookup(_TOKENS)), cache(_TOKENS))
    assert all(entry["expires_ms"] for entry in two[0].entries())
    tenant = second.for_tenant("tenant", quota_bytes=second.slot_bytes)
    assert tenant.put(_TOKENS, cache(_TOKENS)) == CHUNK
    second.pin(second.lookup(_TOKENS))
    assert sum(entry["pinned"] for entry in two[0].entries()) == 3
    with pytest.raises(ValueError, match="kv has 1 layers"):
        second.put(_TOKENS, cache(_TOKENS)[:1])
    with pytest.raises(ValueError, match="expected 20"):
        second.put(_TOKENS, cache(_TOKENS[:4]))


def test_the_other_erases(two: tuple[KVStore, KVStore], tmp_path: Path) -> None:
    first, second = two
    session = first.session("chat")
    session.step(_TOKENS)
    session.commit(cache(_TOKENS))
    held = first.lookup(_TOKENS)
    assert second.erase(session="chat") == 3
    assert first.load(held) is None and not first.lookup(_TOKENS)
    with pytest.raises(ValueError, match="no session 'chat'"):
        second.erase(session="chat")
    needle = struct.pack("<2i", *_TOKENS[8:10])
    assert not any(needle in p.read_bytes() for p in (tmp_path / "store").rglob("slab-*"))


def test_upkeep_by_the_other(two: tuple[KVStore, KVStore], tmp_path: Path) -> None:
    second = two[1]
    second.put(_TOKENS, cache(_TOKENS))
    assert second.flush() and second.gc() == 0 and not second.verify().damage
    second.export(tmp_path / "file")
    assert second.erase(everything=True) == 3
    assert second.import_(tmp_path / "file") == 3
    second.backup(tmp_path / "copy")
    for folder in ("store", "copy"):
        with _open(tmp_path / folder, capacity_bytes=None, readonly=True) as reader:
            assert same(reader.load(reader.lookup(_TOKENS)), cache(_TOKENS))


def test_it_goes_on_when_the_writer_closes(two: tuple[KVStore, KVStore]) -> None:
    first, second = two
    second.put(_TOKENS, cache(_TOKENS))
    held = second.lookup(_TOKENS)
    first.close()
    assert second.put(_TOKENS[:5], cache(_TOKENS[:5])) == 5
    assert second.put([7, 8], cache([7, 8])) == 2
    assert _is_writer(second)
    assert same(second.load(held), cache(_TOKENS))
    with pytest.raises(StoreError, match="closed"):
        first.put([1], cache([1]))


def test_one_writer_alone_is_refused_beside_many(tmp_path: Path, open_store: Open) -> None:
    alone = open_store(path=tmp_path / "alone")
    with pytest.raises(StoreLockedError, match="has a writer"):
        _open(tmp_path / "alone")
    alone.close()
    with _open(tmp_path / "alone"), pytest.raises(StoreLockedError, match="has a writer"):
        open_store(path=tmp_path / "alone")
    with pytest.raises(ValueError, match="writers is 'two'"):
        _open(tmp_path / "alone", writers="two")


def test_a_strict_store_beside_a_relaxed_one(tmp_path: Path) -> None:
    relaxed = dict(durability="relaxed", flush_interval=1e6)
    with _open(tmp_path / "store", **relaxed) as first, _open(tmp_path / "store") as second:
        first.put([1, 2], cache([1, 2]))
        assert not second.lookup([1, 2])
        assert second.put(_TOKENS, cache(_TOKENS)) == len(_TOKENS)
        assert second.lookup(_TOKENS).num_tokens == len(_TOKENS)  # it is in the index


def test_threads_of_both(two: tuple[KVStore, KVStore]) -> None:
    def talk(store: KVStore, writer: int) -> None:
        for number in range(25):
            tokens = _conversation(writer, number)
            assert store.put(tokens, cache(tokens)) == len(tokens)
            assert same(store.load(store.lookup(tokens)), cache(tokens))
            done.append(tokens)

    done: list[list[int]] = []
    threads = [threading.Thread(target=talk, args=(two[writer % 2], writer)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 150
    for store in two:
        assert all(store.lookup(tokens).num_tokens == len(tokens) for tokens in done)
    assert two[0].stats()["commits"] < 150  # some shared one


def test_nonsense_on_the_socket_harms_nobody(two: tuple[KVStore, KVStore]) -> None:
    first, second = two
    shared = second._handle.native
    heads = [struct.pack("<II", *sizes) for sizes in ((2, 0), (2, 0), (12, 0), (9, 1))]
    bodies = [b"{}", b"[]", b'{"call":"x"}', b""]
    for nonsense in (b"", b"\xff" * 64, *map(bytes.__add__, heads, bodies)):
        with shared._connect().peer as peer, suppress(ConnectionResetError):
            peer.sendall(nonsense)
            peer.shutdown(1)
            while peer.recv(1 << 12):
                pass
    assert second.put(_TOKENS, cache(_TOKENS)) == len(_TOKENS)
    assert os.stat(Path(first._handle.directory) / "socket").st_mode & 0o777 == 0o600


def _write(folder: Path, writer: int, first: int, count: int, told: Connection) -> None:
    store = _open(folder)
    told.send("open")
    for number in range(first, first + count):
        tokens = _conversation(writer, number)
        if number % 3 == 0:
            session = store.session(f"of {writer}")
            session.rewind(0)
            session.step(tokens)
            stored = session.commit(cache(tokens))
        else:
            stored = store.put(tokens, cache(tokens))
        told.send((number, stored))
        time.sleep(0.003)
    store.close()


class _Writer:
    def __init__(self, folder: Path, number: int, first: int = 0, count: int = 10**6) -> None:
        self.number = number
        self._told, theirs = PROCESSES.Pipe(False)
        self.process = PROCESSES.Process(
            target=_write, args=(folder, number, first, count, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.acknowledged: list[int] = []

    def hear(self, at_least: int = 0) -> None:
        """What was acknowledged so far, or until it is so much, or the process is gone."""
        while self._told.poll(30 if len(self.acknowledged) < at_least else 0):
            try:
                said = self._told.recv()
            except EOFError:
                return
            if said != "open":
                number, stored = said
                assert stored == len(_conversation(self.number, number))
                self.acknowledged.append(number)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.hear(10**9)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], _Writer]]:
    """Starts processes that write, and ends them."""
    started: list[_Writer] = []

    def start_(number: int) -> _Writer:
        started.append(_Writer(tmp_path / "store", number))
        return started[-1]

    yield start_
    for writer in started:
        writer.process.kill()
        writer.process.join()


def _check(store: KVStore, writers: list[_Writer]) -> None:
    for writer in writers:
        for number in [*writer.acknowledged[:5], *writer.acknowledged[-20:]]:
            tokens = _conversation(writer.number, number)
            hit = store.lookup(tokens)
            assert hit.num_tokens == len(tokens)
            assert same(store.load(hit), cache(tokens))


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_any_of_them_is_killed(tmp_path: Path, start: Callable[[int], _Writer]) -> None:
    """The one that commits among them: what each was told stays, and the others go on."""
    folder = tmp_path / "store"
    writers = [start(number) for number in range(3)]
    everyone = list(writers)
    reader = None
    for kill in range(int(os.environ.get("LMD_STORE_WRITER_KILLS", "6"))):
        for writer in writers:
            writer.hear(len(writer.acknowledged) + 5)
        reader = reader or _open(folder, capacity_bytes=None, readonly=True)
        killed = writers.pop(0)  # the oldest one: it has the lock, or is the next that had not
        killed.kill()
        assert killed.acknowledged
        for writer in writers:  # nobody waits for the one that is gone
            writer.hear(len(writer.acknowledged) + 5)
        _check(reader, everyone)
        writers.append(start(3 + kill))
        everyone.append(writers[-1])
    for writer in writers:
        writer.hear(1)
        writer.kill()
    _check(reader, everyone)
    assert reader.stats()["damaged"] == 0
    reader.close()
    with _open(folder) as store:
        assert _is_writer(store) and not store.verify().damage
        _check(store, everyone)
        stats = store.stats()
        areas = stats["used_areas"] + stats["idle_areas"] + stats["freed_areas"]
        assert areas == stats["capacity_areas"]


def test_a_writer_that_is_stopped_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[int], _Writer]
) -> None:
    monkeypatch.setattr("lmdecode.store._shared_store._ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("lmdecode.store._shared_store._SILENT_SECONDS", 0.2)
    writer = start(0)
    writer.hear(1)
    assert writer.process.pid is not None
    with _open(tmp_path / "store") as store:
        assert not _is_writer(store)
        os.kill(writer.process.pid, signal.SIGSTOP)
        try:
            with pytest.warns(RuntimeWarning, match="does not answer"):
                assert store.put(_TOKENS, cache(_TOKENS)) == 0
            assert "does not answer" in store.failure
            tokens = _conversation(0, 0)
            assert same(store.load(store.lookup(tokens)), cache(tokens))
        finally:
            os.kill(writer.process.pid, signal.SIGCONT)
        _wait(lambda: store.put(_TOKENS, cache(_TOKENS)) == len(_TOKENS))
        assert store.failure == ""
        writer.kill()
        assert store.put([5, 6], cache([5, 6])) == 2
