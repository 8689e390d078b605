"""``KVStore`` against the least that its work can cost on this disk and in this page cache."""

from __future__ import annotations

import atexit
import mmap
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from lmdecode.store import Fingerprint, KVStore
from lmdecode.store.kv_store import KV

GROUP = "KVStore"
SOURCES = ("store/",)
CHUNK = 64  # tokens: slots of 1 MiB
_PUTS = 64  # that a store has room for
_FINGERPRINT = Fingerprint(
    model_id="benchmark", weights_hash="none", dtype="bfloat16", num_layers=8, num_kv_heads=8,
    head_size=64,
)  # fmt: skip
_TOKEN_BYTES = 8 * 2 * 8 * 64 * 2


@lru_cache(maxsize=1)
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lmdecode-bench-", dir=os.environ.get("LMD_BENCH_DIR")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _cache(num_tokens: int) -> KV:
    generator = torch.Generator().manual_seed(1)
    shape = (8, num_tokens, 64)
    return [
        (torch.randn(shape, generator=generator).bfloat16(),
         torch.randn(shape, generator=generator).bfloat16())
        for _ in range(_FINGERPRINT.num_layers)
    ]  # fmt: skip


def _tokens(num_tokens: int, start: int = 0) -> Tensor:
    return (torch.arange(num_tokens) * 7919 + start) % 32000


@lru_cache(maxsize=2)
def _filled(num_tokens: int, v_layout: str) -> KVStore:
    store = KVStore(
        _folder() / f"{v_layout}-{num_tokens}", fingerprint=_FINGERPRINT, chunk_tokens=CHUNK,
        capacity_bytes=4 * num_tokens * _TOKEN_BYTES, v_layout=v_layout, io_threads=1,  # type: ignore[arg-type]
    )  # fmt: skip
    store.put(_tokens(num_tokens), _cache(num_tokens))
    return store


@lru_cache(maxsize=1)
def _plain_file(size: int) -> Path:
    """A file of so many bytes, in the page cache and on the disk."""
    path = _folder() / "plain"
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def _forget(paths: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _load(store: KVStore, tokens: Tensor, cold: bool) -> Callable[[], object]:
    slabs = sorted(Path(store._handle.directory).glob("slab-*"))
    hit = store.lookup(tokens)
    staging = store.load(hit)

    def load() -> None:
        if cold:
            _forget(slabs)
        if store.load(hit, out=staging) is None:
            raise RuntimeError("the store lost what it should load")

    return load


def _ours(call: Callable[[], object], waits: bool = True) -> Contestant:
    # With more than one thread of torch's, which ours does not use, wall time is taken: waiting for
    # the disk counts. Without, CPU time of the one thread, the kernel's included.
    return Contestant(OURS, call, threads=2 if waits else None)


def _load_contestants(
    with_peers: bool, *, num_tokens: int, v_layout: str, cold: bool
) -> list[Contestant]:
    store = _filled(num_tokens, v_layout)
    contestants = [_ours(_load(store, _tokens(num_tokens), cold), waits=cold)]
    if not with_peers:
        return contestants
    size = num_tokens * _TOKEN_BYTES
    path = _plain_file(size)
    descriptor = os.open(path, os.O_RDONLY)
    mapped = torch.frombuffer(
        mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8
    )

    target = torch.zeros(size, dtype=torch.uint8)  # used again, as ours uses its staging buffer
    buffer = memoryview(target.numpy())

    def copy() -> None:
        target.copy_(mapped)

    def read() -> None:
        if cold:
            _forget([path])
        for start in range(0, size, 1 << 20):
            os.preadv(descriptor, [buffer[start : start + (1 << 20)]], start)

    if cold:
        return [*contestants, Contestant(LIMIT, read)]
    reading = Contestant("pread of 1 MiB", read, complete=False)
    return [*contestants, Contestant(LIMIT, copy), reading]


def _put_contestants(with_peers: bool, *, num_tokens: int, full: bool) -> list[Contestant]:
    size = num_tokens * _TOKEN_BYTES
    store = KVStore(
        _folder() / f"put-{num_tokens}-{full}", fingerprint=_FINGERPRINT, chunk_tokens=CHUNK,
        # So much that the reserve, 1/64, is one put: room is made by the put before.
        capacity_bytes=_PUTS * (size + num_tokens // CHUNK * 4096), io_threads=2, v_layout="row",
    )  # fmt: skip
    kv = _cache(num_tokens)
    count = 0

    def put() -> None:
        nonlocal count
        count += 1
        tokens = _tokens(num_tokens, count)
        if store.put(tokens, kv) != num_tokens:
            raise RuntimeError("the store declined")

    if full:  # each put evicts one, and writes to slots in the order in which they were freed
        for _ in range(_PUTS):
            put()
    contestants = [_ours(put)]
    if not with_peers:
        return contestants
    data = os.urandom(size)
    plain = os.open(_folder() / "written", os.O_RDWR | os.O_CREAT, 0o600)
    log = os.open(_folder() / "log", os.O_RDWR | os.O_CREAT, 0o600)
    turn = 0

    if full:  # the plain file has all of its space too
        for start in range(_PUTS):
            os.pwrite(plain, data, start * size)
        os.fdatasync(plain)

    def write() -> None:
        nonlocal turn
        turn = (turn + 1) % _PUTS
        for start in range(0, size, 1 << 20):
            os.pwrite(plain, data[start : start + (1 << 20)], turn * size + start)
        os.fdatasync(plain)
        os.pwrite(log, data[:4096], turn * 4096)
        os.fdatasync(log)

    return [*contestants, Contestant(LIMIT, write)]


def _lookup_contestants(with_peers: bool, *, num_tokens: int) -> list[Contestant]:
    small = Fingerprint(
        model_id="small", weights_hash="none", dtype="float32", num_layers=1, num_kv_heads=1,
        head_size=4,
    )  # fmt: skip
    store = KVStore(
        _folder() / f"lookup-{num_tokens}", fingerprint=small, chunk_tokens=CHUNK,
        capacity_bytes=1 << 30,
    )  # fmt: skip
    tokens = _tokens(num_tokens).int()
    kv = [(torch.zeros(1, num_tokens, 4), torch.zeros(1, num_tokens, 4))]
    store.put(tokens, kv)

    def lookup() -> None:
        hit = store.lookup(tokens)
        if hit.num_tokens != num_tokens:
            raise RuntimeError("the store lost what it should find")
        hit.release()

    return [_ours(lookup)]


def _index_of(entries: int) -> Path:
    """A store whose index has so many entries; their slots are not there."""
    small = Fingerprint(
        model_id="many", weights_hash="none", dtype="float32", num_layers=1, num_kv_heads=1,
        head_size=4,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="many-", dir=_folder()))
    KVStore(folder, fingerprint=small, chunk_tokens=CHUNK, capacity_bytes=1 << 40).close()
    index = sqlite3.connect(folder / small.name / "index.sqlite")
    keys = [os.urandom(32) for _ in range(entries)]
    root = os.urandom(32)
    # Chains of eight chunks.
    index.executemany(
        "INSERT INTO areas VALUES (?, ?, ?, ?, 0, 0, 0, 0, ?, 0, 0, ?)",
        (
            (n, n + 1, CHUNK * (n % 8 + 1), CHUNK, n, keys[n] + (keys[n - 1] if n % 8 else root))
            for n in range(entries)
        ),
    )
    index.commit()
    index.close()
    return folder


def _open_contestants(with_peers: bool, *, entries: int) -> list[Contestant]:
    folder = _index_of(entries)
    small = Fingerprint(
        model_id="many", weights_hash="none", dtype="float32", num_layers=1, num_kv_heads=1,
        head_size=4,
    )  # fmt: skip

    def open_() -> None:
        with KVStore(folder, fingerprint=small, capacity_bytes=1 << 40) as store:
            if store.stats()["entries"] != entries:
                raise RuntimeError("the store lost entries")

    return [_ours(open_)]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` small ones."""
    loaded, put = (256, 128) if quick else (4096, 1024)
    result = []
    for v_layout in ("column", "row"):
        for name, cold in (("load, page cache", False), ("load, disk", True)):
            result.append(
                Case(
                    GROUP, name, {"work": f"{loaded * _TOKEN_BYTES >> 20} MiB, {v_layout}"},
                    partial(_load_contestants, num_tokens=loaded, v_layout=v_layout, cold=cold),
                    caches="warm" if not cold else "cold disk", threads=1,
                )
            )  # fmt: skip
    for full in (False, True):
        name = "strict put, full store" if full else "strict put"
        result.append(Case(GROUP, name, {"work": f"{put * _TOKEN_BYTES >> 20} MiB"},
                           partial(_put_contestants, num_tokens=put, full=full)))  # fmt: skip
    found = 1024 if quick else 32768
    result.append(Case(GROUP, "lookup", {"work": f"{found} tokens"},
                       partial(_lookup_contestants, num_tokens=found)))  # fmt: skip
    many = 10_000 if quick else 1_000_000
    result.append(Case(GROUP, "open", {"work": f"{many} entries"},
                       partial(_open_contestants, entries=many)))  # fmt: skip
    return result


def _share_of_limit(result: Result) -> float | None:
    return None if result.times_limit is None else 1 / result.times_limit


def _microseconds(result: Result) -> float | None:
    return result.microseconds(OURS)


GOALS = [
    Goal("load, page cache", "warm", "a copy from the page cache", "at least", 0.8,
         _share_of_limit),
    Goal("load, disk", "cold disk", "a loop of pread", "at least", 0.9, _share_of_limit),
    Goal("strict put", "warm", "the write and two flushes", "at most", 1.1,
         lambda result: result.times_limit),
    Goal("strict put, full store", "warm", "the write and two flushes", "at most", 1.1,
         lambda result: result.times_limit),
    Goal("lookup", "warm", "hash and find", "at most", 1000, _microseconds, unit=" us"),
    Goal("open", "warm", "a million entries", "at most", 2e6, _microseconds, unit=" us"),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)
