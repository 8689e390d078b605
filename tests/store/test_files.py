"""What lies on disk, who may use it, and what becomes of stores that cannot be used."""

import ast
import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from interpreters import Interpreters
from store_cases import Open, cache, fingerprint, same

import lmdecode.store
from lmdecode.store import KVStore, StoreDamagedError, StoreError, StoreLockedError
from tests.support.processes import run_python

TOKENS = list(range(30))


def test_files_are_the_owners_alone(open_store: Open, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store()
        store.put(TOKENS, cache(TOKENS))
        store.export(tmp_path / "file")
        store.backup(tmp_path / "copy")
    finally:
        os.umask(before)
    files = [tmp_path / "file"]
    for folder in (tmp_path / "store", tmp_path / "copy"):
        assert folder.stat().st_mode & 0o777 == 0o700
        for path in folder.rglob("*"):
            if path.is_dir():
                assert path.stat().st_mode & 0o777 == 0o700
            else:
                files.append(path)
    assert {path.name for path in files} >= {"index.sqlite", "slab-00000", "lock", "file"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_nothing_is_unpickled() -> None:
    folder = Path(lmdecode.store.__file__).parent
    for path in folder.rglob("*.py"):
        names = {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Name | ast.Attribute)
        }
        assert not names & {"pickle", "marshal", "shelve", "eval", "exec"}, path
        assert not any(name == "load" and "torch" in names for name in names), path


def test_the_types_of_the_compiled_part_name_what_it_has() -> None:
    from lmdecode import _store

    package = Path(lmdecode.store.__file__).parents[1]
    types = ast.parse((package / "_store.pyi").read_text())
    classes = {node.name: node for node in types.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in types.body if isinstance(node, ast.FunctionDef)}
    assert {name for name in vars(_store) if name[0] != "_"} == {*classes, *functions}
    for name, node in classes.items():
        listed = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        has = {each for each in vars(getattr(_store, name)) if each[0] != "_"}
        assert listed - {"__init__"} == has, name


def test_a_build_without_the_store_says_so(interpreters: Interpreters) -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "lmdecode._store" else find(name)
try:
    import lmdecode.store
except ImportError as error:
    print(error)
"""
    status, printed, _ = interpreters.run(code)
    assert status == 0 and "needs SQLite" in printed and "libsqlite3-dev" in printed


def test_a_symbolic_link_is_not_followed(open_store: Open, tmp_path: Path) -> None:
    open_store().close()
    (slot,) = (tmp_path / "store").iterdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (slot / "slab-00000").symlink_to(victim)
    store = open_store()
    assert store.put(TOKENS, cache(TOKENS)) == 0
    assert victim.read_bytes() == b"precious"


def test_a_second_writer_is_refused(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    with pytest.raises(StoreLockedError, match="has a writer"):
        open_store()
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from store_cases import fingerprint
from lmdecode.store import KVStore, StoreLockedError
try:
    KVStore({str(tmp_path / "store")!r}, fingerprint=fingerprint(), capacity_bytes=1 << 20)
except StoreLockedError:
    print("locked")
"""
    assert run_python("-c", code).stdout == "locked\n"
    store.close()
    open_store()


def test_readers_follow_a_writer(open_store: Open) -> None:
    store = open_store()
    reader = open_store(readonly=True)
    assert not reader.lookup(TOKENS)
    store.put(TOKENS, cache(TOKENS))
    session = store.session("a")
    session.step(TOKENS)
    session.commit(cache(TOKENS))
    assert same(reader.load(reader.lookup(TOKENS)), cache(TOKENS))
    assert reader.session("a").tokens == TOKENS
    with pytest.raises(StoreError, match="readonly"):
        reader.put(TOKENS, cache(TOKENS))
    store.close()
    assert reader.lookup(TOKENS).num_tokens == 30


def test_a_reader_needs_a_store(open_store: Open, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing to read"):
        open_store(readonly=True)
    assert not (tmp_path / "store").exists()


def test_a_folder_that_cannot_be_written(open_store: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_store(path=tmp_path / "file" / "store")
    if os.getuid() == 0:  # root writes everywhere but there
        with pytest.raises(OSError):
            open_store(path=Path("/proc/lmdecode-store"))
        return
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        open_store(path=tmp_path / "closed" / "store")


def test_closed_stores(open_store: Open) -> None:
    store = open_store()
    store.put(TOKENS, cache(TOKENS))
    hit = store.lookup(TOKENS)
    store.close()
    store.close()
    for call in (lambda: store.lookup(TOKENS), lambda: store.load(hit), store.stats, store.flush,
                 lambda: store.put(TOKENS, cache(TOKENS))):  # fmt: skip
        with pytest.raises(StoreError, match="closed"):
            call()


def only(folder: Path, name: str) -> Path:
    (found,) = folder.rglob(name)
    return found


def test_a_damaged_index_is_a_clear_error(open_store: Open, tmp_path: Path) -> None:
    with open_store() as store:
        store.put(TOKENS, cache(TOKENS))
    index = only(tmp_path / "store", "index.sqlite")
    content = index.read_bytes()
    index.write_bytes(b"not a database at all".ljust(4096, b"!") + content[4096:])
    with pytest.raises(StoreDamagedError, match=r"index\.sqlite"):
        open_store()
    index.write_bytes(content[:4096])
    with pytest.raises(StoreDamagedError, match=r"index\.sqlite"):
        open_store()
    index.write_bytes(content)
    assert open_store().lookup(TOKENS)


def test_damage_is_a_miss_and_a_second_try_finds_the_rest(open_store: Open, tmp_path: Path) -> None:
    with open_store() as store:
        session = store.session("a")
        session.step(TOKENS)
        session.commit(cache(TOKENS))
        size = store.slot_bytes
    slab = only(tmp_path / "store", "slab-00000")
    content = bytearray(slab.read_bytes())
    content[2 * size + 4100] ^= 1  # the third of four slots
    slab.write_bytes(content)
    store = open_store()
    assert store.load(store.lookup(TOKENS)) is None
    found, kv = store.session("a").resume()
    assert found == 16
    assert same(kv, cache(TOKENS[:16]))
    with pytest.raises(LookupError, match="layer 0"):
        _flip(slab, 4100)
        list(store.load_layers(store.lookup(TOKENS)))


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_full_disk_declines(open_store: Open, tmp_path: Path) -> None:
    """A limit of this process on the size of files stands for the disk: inference goes on."""
    code = f"""
import resource, signal, sys, warnings
sys.path.insert(0, {str(Path(__file__).parent)!r})
from store_cases import cache, fingerprint
from lmdecode.store import KVStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = KVStore({str(tmp_path / "store")!r}, fingerprint=fingerprint(), capacity_bytes=1 << 24,
                chunk_tokens=8)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
stored = [store.put([n] * 8, cache([n] * 8)) for n in range(60)]
assert stored[0] == 8 and stored[-1] == 0, stored
assert store.lookup([0] * 8)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    store = open_store()
    assert store.lookup([0] * 8)
    assert not store.verify().damage
    assert store.put(TOKENS, cache(TOKENS)) == 30


def test_a_flush_that_fails_is_told(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    monkeypatch.setattr(KVStore, "failure", property(lambda self: "fdatasync failed"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store._warn_of_failure(True)
    assert "no longer writes: fdatasync failed" in str(caught[0].message)


def test_a_copy_of_a_closed_store_is_a_store(open_store: Open, tmp_path: Path) -> None:
    with open_store() as store:
        session = store.session("a")
        session.step(TOKENS)
        session.commit(cache(TOKENS))
    subprocess.run(["cp", "-r", str(tmp_path / "store"), str(tmp_path / "moved")], check=True)
    moved = open_store(path=tmp_path / "moved")
    assert moved.session("a").tokens == TOKENS
    assert same(moved.load(moved.lookup(TOKENS)), cache(TOKENS))
    other = open_store(path=tmp_path / "moved", fingerprint=fingerprint(weights_hash="x"))
    assert not other.lookup(TOKENS)


def test_relaxed_is_durable_after_flush_and_close(open_store: Open) -> None:
    with open_store(durability="relaxed", flush_interval=3600.0) as store:
        assert store.put(TOKENS, cache(TOKENS)) == 30
        assert store.lookup(TOKENS)
        reader = open_store(readonly=True)
        assert not reader.lookup(TOKENS)
        assert store.flush()
        assert reader.lookup(TOKENS)
        store.put(TOKENS[::-1], cache(TOKENS[::-1]))
    assert open_store().lookup(TOKENS[::-1]).num_tokens == 30


def test_relaxed_loses_nothing_to_a_kill(open_store: Open, tmp_path: Path) -> None:
    process = os.fork()
    if process == 0:
        try:
            store = open_store(durability="relaxed", flush_interval=3600.0)
            is_stored = store.put(TOKENS, cache(TOKENS)) == 30
            store.session("a").step(TOKENS[:20])
            is_stored &= store.session("a").commit(cache(TOKENS[:20])) == 20
            os.kill(os.getpid(), signal.SIGKILL if is_stored else signal.SIGTERM)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    assert not open_store(readonly=True).lookup(TOKENS)  # the next writer makes it durable
    (slab,) = tmp_path.glob("store/*/slab-00000")
    slab.rename(tmp_path / "aside")
    slab.mkdir()
    with pytest.raises(OSError, match="cannot sync the slots of"):
        open_store(durability="relaxed")
    slab.rmdir()
    (tmp_path / "aside").rename(slab)
    store = open_store(durability="relaxed", flush_interval=3600.0)
    assert same(store.load(store.lookup(TOKENS)), cache(TOKENS))
    assert open_store(readonly=True).lookup(TOKENS).num_tokens == 30
    assert store.session("a").tokens == TOKENS[:20]


@pytest.mark.parametrize("durability", ["strict", "relaxed"])
def test_times_of_use_outlive_the_process(open_store: Open, durability: str) -> None:
    others = [[i] * 30 for i in (101, 102, 103)]
    with open_store(durability=durability, flush_interval=3600.0) as store:
        for tokens in others[:2]:
            store.put(tokens, cache(tokens))
            time.sleep(0.01)  # the clock has milliseconds
        store.load(store.lookup(others[0]))
        store.put(others[2], cache(others[2]))
    used = [e["used_ms"] for e in sorted(open_store().entries(), key=lambda e: e["created_ms"])]
    of_each = len(used) // 3
    assert len(used) == 3 * of_each and min(used[:of_each]) > max(used[of_each : 2 * of_each])


def test_the_directory_of_a_forked_child_is_not_touched(open_store: Open) -> None:
    store = open_store()
    store.put(TOKENS, cache(TOKENS))
    process = os.fork()
    if process == 0:
        try:
            store.lookup(TOKENS)
        except StoreError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(process, 0)[1] == 0
    assert store.lookup(TOKENS)


_FORKED = """
import os, sys
sys.path[:0] = [{tests!r}]
from store_cases import CHUNK, cache, fingerprint
from lmdecode.store import KVStore, StoreError

TOKENS = list(range(30))

def opened():
    return KVStore(
        {path!r}, fingerprint=fingerprint(), capacity_bytes=1 << 20, chunk_tokens=CHUNK, **{options}
    )

def error_of(call):
    try:
        call()
    except StoreError as error:
        return str(error)
    return "none"

store = opened()
store.put(TOKENS, cache(TOKENS), background=True).result()
session = store.session("chat")
session.step(TOKENS)
parent_lives, end = os.pipe()
told, tell = os.pipe()
child = os.fork()
if child == 0:
    os.close(end)
    for call in (
        lambda: store.put(TOKENS[::-1], cache(TOKENS[::-1])),
        lambda: store.put(TOKENS[::-1], cache(TOKENS[::-1]), background=True),
        lambda: session.commit(cache(TOKENS)),
        lambda: store.erase(tokens=TOKENS),
        lambda: store.flush(),
    ):
        if "opened by another process; open it again after a fork" not in error_of(call):
            os._exit(1)
    store.close()
    # The lock is the parent's still, whom other writers may ask where there are many.
    if "many" not in {options}.values() and "has a writer" not in error_of(opened):
        os._exit(2)
    os.write(tell, b"1")
    os.read(parent_lives, 1)  # the copies of descriptors are there until the parent ends
    os._exit(0)
os.close(tell)
assert os.read(told, 1) == b"1", os.waitpid(child, 0)
store.put(TOKENS[:5], cache(TOKENS[:5]))
store.close()
again = opened()
assert again.lookup(TOKENS).num_tokens == 30
again.close()
os.close(end)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(
    "options", [{}, {"durability": "relaxed"}, {"writers": "many"}, {"directory_bytes": 1 << 26}]
)
def test_a_forked_child_that_lives_on_may_not_write_and_does_not_keep_the_lock(
    options: dict[str, object], tmp_path: Path
) -> None:
    code = _FORKED.format(
        tests=str(Path(__file__).parent), path=str(tmp_path / "store"), options=options
    )
    done = run_python("-c", code, timeout=60)
    assert done.returncode == 0, done.stderr
