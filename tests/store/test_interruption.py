"""Ctrl-C and callbacks that raise in long calls, and threads that outlive the interpreter."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from interpreters import Interpreters
from store_cases import KV, Open, cache, fingerprint, same

from lmdecode.store import KVStore

TOKENS = list(range(30))
EndOf = Callable[[str], tuple[int, str, str]]  # a program; its status and what it wrote

# So much that a call lasts for several of the store's looks at signals: 256 slots of 1 MiB.
LARGE = fingerprint(num_layers=4, num_kv_heads=8, head_size=64, dtype="float32")
LARGE_CHUNK = 64
LARGE_TOKENS = [n % 1000 for n in range(256 * LARGE_CHUNK)]


def large_cache() -> KV:
    shape = (LARGE.num_kv_heads, len(LARGE_TOKENS), LARGE.head_size)
    plane = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float32).view(shape)
    return [(plane, plane) for _ in range(LARGE.num_layers)]


@pytest.fixture
def large(tmp_path: Path) -> Iterator[KVStore]:
    with open_large(tmp_path / "large") as store:
        assert store.put(LARGE_TOKENS, large_cache()) == len(LARGE_TOKENS)
        yield store


def open_large(path: Path) -> KVStore:
    return KVStore(
        path, fingerprint=LARGE, capacity_bytes=1 << 30, chunk_tokens=LARGE_CHUNK, io_threads=1,
        durability="relaxed", flush_interval=3600.0,
    )  # fmt: skip


def interrupted(call: Callable[[], object]) -> None:
    """Make a call, in which a signal arrives; the kernel sends it, however busy the cores are."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            call()
            time.sleep(10)  # at the latest here; each test sees that the call did not end
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def use(store: KVStore) -> None:
    """The store is as good as before."""
    tokens = [2000, 2001, 2002]
    kv = [(k[:, :3], v[:, :3]) for k, v in large_cache()]
    assert store.put(tokens, kv) == 3
    assert same(store.load(store.lookup(tokens)), kv)
    assert store.flush()


def test_an_interrupted_verify(large: KVStore) -> None:
    large.flush()
    entries = large.entries()
    slab = Path(large._handle.directory) / "slab-00000"
    with slab.open("r+b") as file:  # where an uninterrupted one comes last
        file.seek(entries[-1]["area"] * large.slot_bytes)
        file.write(b"x")
    interrupted(large.verify)
    assert large.stats()["damaged"] == 0
    use(large)
    assert len(large.verify().damage) == 1


def test_an_interrupted_backup(large: KVStore, tmp_path: Path) -> None:
    interrupted(lambda: large.backup(tmp_path / "copy"))
    assert not (tmp_path / "copy" / LARGE.name).exists()
    use(large)
    large.backup(tmp_path / "copy")
    with open_large(tmp_path / "copy") as copy:
        assert copy.lookup(LARGE_TOKENS).num_tokens == len(LARGE_TOKENS)


def test_an_interrupted_export_and_import(large: KVStore, tmp_path: Path) -> None:
    interrupted(lambda: large.export(tmp_path / "file"))
    assert not (tmp_path / "file").exists()
    use(large)
    large.export(tmp_path / "file")
    with open_large(tmp_path / "other") as other:
        interrupted(lambda: other.import_(tmp_path / "file"))
        assert other.stats()["entries"] < large.stats()["entries"]
        assert not other.verify().damage
        assert other.import_(tmp_path / "file") > 0
        assert other.lookup(LARGE_TOKENS).num_tokens == len(LARGE_TOKENS)


def test_an_interrupted_put(tmp_path: Path) -> None:
    kv = large_cache()
    with open_large(tmp_path / "large") as store:
        interrupted(lambda: store.put(LARGE_TOKENS, kv))
        assert store.lookup(LARGE_TOKENS).num_tokens < len(LARGE_TOKENS)
        assert not store.verify().damage
        use(store)
        assert store.put(LARGE_TOKENS, kv) == len(LARGE_TOKENS)
        assert same(store.load(store.lookup(LARGE_TOKENS)), kv)


def test_an_interrupted_commit(tmp_path: Path) -> None:
    kv = large_cache()
    with open_large(tmp_path / "large") as store:
        session = store.session("a")
        session.step(LARGE_TOKENS)
        interrupted(lambda: session.commit(kv))
        assert store.lookup(LARGE_TOKENS).num_tokens < len(LARGE_TOKENS)
        assert session.commit(kv) == len(LARGE_TOKENS)


def test_an_interrupted_load(large: KVStore) -> None:
    hit = large.lookup(LARGE_TOKENS)
    interrupted(lambda: large.load(hit))
    stats = large.stats()
    assert (stats["bytes_read"], stats["damaged"]) == (0, 0)
    use(large)
    assert same(large.load(hit), large_cache())


@pytest.mark.parametrize(
    "call",
    [lambda store, path: store.verify(), lambda store, path: store.export(path / "file")],
    ids=["verify", "export"],
)
def test_other_threads_run_during_a_call(
    large: KVStore, tmp_path: Path, call: Callable[[KVStore, Path], object]
) -> None:
    within, ran, ended = False, threading.Event(), threading.Event()

    def work() -> None:
        while not ended.wait(0.0001):
            if within:
                ran.set()

    thread = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # the interpreter's lock changes hands only where it is given up
    try:
        thread.start()
        for _ in range(20):  # where all cores are busy the thread may come too late
            within = True
            call(large, tmp_path)
            within = False
            if ran.is_set():
                break
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert ran.is_set()


def test_what_a_callback_raises_comes_out(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.put(TOKENS, cache(TOKENS))
    store.export(tmp_path / "file")

    def stop(done: int, total: int) -> None:
        if done:
            raise LookupError(f"at {done} of {total}")

    for call in (
        lambda: store.verify(stop),
        lambda: store.backup(tmp_path / "copy", stop),
        lambda: store.export(tmp_path / "none", progress=stop),
        lambda: open_store(path=tmp_path / "other").import_(tmp_path / "file", stop),
    ):
        with pytest.raises(LookupError, match=r"at \d+ of"):
            call()
    assert not (tmp_path / "none").exists()
    assert not store.verify().damage
    assert same(store.load(store.lookup(TOKENS)), cache(TOKENS))


def test_a_hit_is_released_under_a_load(large: KVStore) -> None:
    expected = large_cache()
    for _ in range(5):
        hit = large.lookup(LARGE_TOKENS)
        pending = large.load(hit, background=True)
        hit.release()
        kv = pending.result()
        assert kv is None or same(kv, expected)


@pytest.mark.slow
def test_threads_in_calls_when_the_interpreter_ends(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    """They are neither killed within a call nor do they hold up the end."""
    code = f"""
import os, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from store_cases import cache, fingerprint
from lmdecode.store import KVStore, StoreError

for seconds in (0.0, 0.001, 0.01, 0.02, 0.05):
    child = os.fork()
    if child == 0:
        break  # to an end of its own
    assert os.waitpid(child, 0)[1] == 0, seconds
else:
    sys.exit()
store = KVStore({str(tmp_path / "store")!r}, fingerprint=fingerprint(), capacity_bytes=1 << 24,
                chunk_tokens=8, durability="relaxed")
tokens = list(range(30))
kv = cache(tokens)
store.put(tokens, kv)
# No put or load: torch's own calls, which they make, abort in a daemon thread at the end.
calls = (store.verify, lambda: store.lookup(tokens), store.stats, store.entries)

def work(call):
    try:
        while True:
            call()
    except StoreError as error:
        assert "closed" in str(error) or str(error) == "verify: interrupted"

for call in 2 * calls:
    threading.Thread(target=work, args=(call,), daemon=True).start()
time.sleep(seconds)
"""
    status, _, raised = interpreters.run(code)
    assert (status, raised) == (0, "")


# A program with a store, atexit handlers on both sides of the store's own, and threads that wait
# until the interpreter ends.
AT_EXIT = """
import atexit, os, sys, threading, time, weakref

keep = threading.Event()
weakref.finalize(keep, lambda: None)  # its handler, which closes stores, is the last one to run
last = []
atexit.register(lambda: [handler() for handler in last])

sys.path.insert(0, {folder!r})
from store_cases import cache, fingerprint, same
from lmdecode.store import KVStore, StoreError

def open_store(path):
    return KVStore(path, fingerprint=fingerprint(), capacity_bytes=1 << 24, chunk_tokens=8)

path = {path!r}
store = open_store(path + "/store")
tokens = list(range(24))
kv = cache(tokens)

ending = threading.Event()
atexit.register(ending.set)  # the first one to run, before the store's

def at_exit(function):
    def run():
        ending.wait()
        time.sleep(0.1)  # the store's handler has begun
        function()
    threading.Thread(target=run, daemon=True).start()

def wait_until_exit(done, total):
    begun.set()
    ending.wait()
    time.sleep(0.5)

begun = threading.Event()
"""


@pytest.fixture
def end_of(interpreters: Interpreters, tmp_path: Path) -> EndOf:
    """Runs such a program; returns its status and what it wrote."""
    begin = AT_EXIT.format(folder=str(Path(__file__).parent), path=str(tmp_path))
    return lambda code: interpreters.run(begin + code)


def test_calls_of_an_exit_handler_are_whole(end_of: EndOf) -> None:
    """Of one that is older than the store, and so runs after the store's own."""
    code = """
store.put(tokens[:8], [(k[:, :8], v[:, :8]) for k, v in kv])
other = open_store(path + "/other")
other.put(tokens, kv)
other.export(path + "/file")
third = open_store(path + "/third")
session = third.session("a")

def work():
    print(store.put(tokens, kv), store.lookup(tokens).num_tokens)
    print(same(store.load(store.lookup(tokens)), kv))
    print(store.verify().entries)
    session.step(tokens)
    print(session.commit(kv))
    print(open_store(path + "/fourth").import_(path + "/file"))
    seen = []
    store.verify(lambda done, total: seen.append(done))
    print(seen)

last.append(work)
"""
    expected = "24 24\nTrue\n3\n24\n3\n[0, 1, 2, 3]\n"
    assert end_of(code) == (0, expected, "")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("store.verify(wait_until_exit)", "verify: interrupted"),
        ("open_store(path + '/other').import_(path + '/file', wait_until_exit)",
         "import: interrupted"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_call_that_the_end_stops_says_so(end_of: EndOf, call: str, message: str) -> None:
    code = f"""
store.put(tokens, kv)
store.export(path + "/file")

def work():
    try:
        print({call})
    except StoreError as error:
        print(error)

thread = threading.Thread(target=work, daemon=True)
thread.start()
begun.wait()
last.append(thread.join)
"""
    assert end_of(code) == (0, message + "\n", "")


@pytest.mark.slow
def test_a_close_at_the_end_waits_without_the_lock(end_of: EndOf) -> None:
    """It waits for a call whose callback needs the lock."""
    code = """
store.put(tokens, kv)
threading.Thread(target=lambda: store.verify(wait_until_exit), daemon=True).start()
begun.wait()
at_exit(store.close)
threading.excepthook = lambda raised: print(raised.exc_value)
last.append(lambda: time.sleep(0.1))
"""
    assert end_of(code) == (0, "verify: interrupted\n", "")


def test_threads_that_go_on_calling_do_not_hold_up_the_end(end_of: EndOf) -> None:
    code = """
store.put(tokens, kv)

def work():
    while True:
        store.stats()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
last.append(lambda: os._exit(7))
"""
    assert end_of(code) == (7, "", "")


def test_a_signal_ends_the_wait_at_the_end(end_of: EndOf) -> None:
    code = """
import signal

# A shell starts what runs in the background with SIGINT ignored, and Python leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)

def for_ever(done, total):
    begun.set()
    threading.Event().wait()

store.put(tokens, kv)
threading.Thread(target=store.verify, args=(for_ever,), daemon=True).start()
begun.wait()

def interrupt():
    while True:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)  # where the machine is busy, the first may come before the wait

at_exit(interrupt)
last.append(lambda: os._exit(7))
"""
    status, _, raised = end_of(code)
    assert status == 7
    assert "KeyboardInterrupt" in raised


@pytest.mark.slow
def test_a_forked_child_does_not_wait_for_the_parents_calls(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    code = f"""
import os, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_interruption import LARGE_TOKENS, large_cache, open_large
from pathlib import Path
store = open_large(Path({str(tmp_path / "large")!r}))
thread = threading.Thread(target=store.put, args=(LARGE_TOKENS, large_cache()))
thread.start()
time.sleep(0.005)
if os.fork() == 0:
    sys.exit(0)
_, status = os.wait()
thread.join()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert interpreters.run(code, timeout=120)[0] == 0
