"""The second tier against a real redis-server: shared entries, and what a server may do to them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis_server import Server, redis
from remote_cases import TOKENS, entry_names, filled, remote_stats, wait_for
from store_cases import CHUNK, cache, fingerprint, same

from lmdecode.store import KVStore
from tests.support.processes import run_python


def test_another_host_finds_what_was_stored(host: Callable[..., KVStore], server: Server) -> None:
    assert remote_stats(filled(host, server.url))["entries_written"] == 4
    other = host(server.url)
    hit = other.lookup([*TOKENS, 99])
    assert hit.num_tokens == 30
    assert same(other.load(hit), cache(TOKENS))
    assert remote_stats(other)["entries_fetched"] == 4
    # It is the local store's now.
    server.kill()
    assert same(other.load(other.lookup(TOKENS)), cache(TOKENS))
    assert other.stats()["hits"] == 2 and other.stats()["misses"] == 0


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 23, 24, 29, 30])
def test_it_finds_whole_chunks_and_stored_ends(
    host: Callable[..., KVStore], server: Server, length: int
) -> None:
    filled(host, server.url)
    other = host(server.url)
    hit = other.lookup([*TOKENS[:length], 777])
    assert hit.num_tokens == (30 if length == 30 else length // CHUNK * CHUNK)
    assert not hit or same(other.load(hit), cache(TOKENS[: hit.num_tokens]))


def test_it_continues_what_is_stored_here(host: Callable[..., KVStore], server: Server) -> None:
    filled(host, server.url)
    other = host(server.url)
    other.put(TOKENS[:11], cache(TOKENS[:11]))
    assert same(other.load(other.lookup(TOKENS)), cache(TOKENS))
    assert remote_stats(other)["entries_fetched"] == 3


def test_two_processes_share(host: Callable[..., KVStore], server: Server, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from store_cases import cache, fingerprint
from lmdecode.store import KVStore
with KVStore({str(tmp_path / "elsewhere")!r}, fingerprint=fingerprint(), capacity_bytes=1 << 20,
             chunk_tokens=8, remote={server.url!r}) as store:
    session = store.session("chat")
    session.step(range(30))
    assert session.commit(cache(range(30))) == 30
"""
    assert run_python("-c", code).returncode == 0  # close() has written all
    store = host(server.url)
    session = store.session("chat")
    assert session.step([*TOKENS, 5]) == "continue"
    num_tokens, kv = session.resume()
    assert num_tokens == 30
    assert same(kv, cache(TOKENS))


def test_a_process_that_closes_nothing_ends(server: Server, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from store_cases import cache, fingerprint
from lmdecode.store import KVStore
store = KVStore({str(tmp_path / "open")!r}, fingerprint=fingerprint(), capacity_bytes=1 << 20,
                chunk_tokens=8, remote={server.url!r})
for n in range(20):
    store.put([n] * 30, cache([n] * 30))
    store.lookup([n] * 31)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""


def test_tenants_contexts_and_configurations_never_meet(
    host: Callable[..., KVStore], server: Server
) -> None:
    store = filled(host, server.url)
    store.for_tenant("blue").put(TOKENS, cache(TOKENS), context=b"image")
    store.flush_remote(20)
    others = [
        host(server.url, salt="red"),
        host(server.url, fingerprint=fingerprint(weights_hash="revised")),
        host(server.url, fingerprint=fingerprint(dtype="float16")),
        host(server.url, v_layout="row"),
        host(server.url, chunk_tokens=4),
    ]
    assert not any(other.lookup(TOKENS) for other in others)
    blue = host(server.url, salt="blue")
    assert not blue.lookup(TOKENS)
    assert same(blue.load(blue.lookup(TOKENS, context=b"image")), cache(TOKENS))
    assert sum(entry["tenant"] != store.entries()[0]["tenant"] for entry in blue.entries()) == 4


@pytest.mark.parametrize("windows", [(None, 12, 12), (None, 4, 12)])
def test_windows(
    host: Callable[..., KVStore], server: Server, windows: tuple[int | None, ...]
) -> None:
    of = fingerprint(window=windows)
    full = cache(TOKENS, of)
    last = [
        (k[:, -(w - 1) :], v[:, -(w - 1) :]) if w else (k, v)
        for (k, v), w in zip(full, windows, strict=True)
    ]
    store = host(server.url, fingerprint=of)
    store.put(TOKENS, last)
    store.flush_remote(20)
    other = host(server.url, fingerprint=of)
    assert same(other.load(other.lookup([*TOKENS, 1])), last)
    assert not host(server.url, fingerprint=of).lookup(TOKENS[:16])
    # Now with all tokens: the server's entries are replaced by these.
    fuller = host(server.url, fingerprint=of)
    fuller.put(TOKENS[:16], cache(TOKENS[:16], of))
    fuller.flush_remote(20)
    third = host(server.url, fingerprint=of)
    assert third.lookup(TOKENS[:16]).num_tokens == 16


def test_keys_and_values_on_the_server(host: Callable[..., KVStore], server: Server) -> None:
    of = fingerprint(num_layers=4, head_size=64, num_kv_heads=4)
    store = host(server.url, fingerprint=of, chunk_tokens=256, capacity_bytes=1 << 26, salt="acme")
    tokens = [*range(600)]
    store.put(tokens, cache(tokens, of))
    assert store.slot_bytes > 2 << 20
    assert store.flush_remote(20)
    client = server.client()
    names = [name.decode() for name in client.keys()]
    sizes = [client.strlen(name) for name in names if not name.endswith(":tails")]
    assert max(sizes) <= 1 << 20 and len(sizes) == 7  # 3 + 3 + 1
    assert all(name.startswith("lmdkv1:{") and "acme" not in name for name in names)
    assert all(0 < client.ttl(name) <= 7 * 24 * 3600 for name in names)
    other = host(server.url, fingerprint=of, chunk_tokens=256, capacity_bytes=1 << 26, salt="acme")
    assert same(other.load(other.lookup(tokens)), cache(tokens, of))


def test_a_small_store_takes_what_fits(host: Callable[..., KVStore], server: Server) -> None:
    size = filled(host, server.url).slot_bytes
    other = host(server.url, capacity_bytes=2 * size)
    assert other.lookup(TOKENS).num_tokens == 16
    tenant = host(server.url, quota_bytes=size)
    assert tenant.lookup(TOKENS).num_tokens == 8


def swap(client: redis.Redis, name: bytes) -> None:
    other = next(n for n in entry_names(client) if n != name)
    first, second = client.get(name), client.get(other)
    client.mset({name: second, other: first})


DAMAGE: dict[str, Callable[[redis.Redis, bytes], object]] = {
    "first byte": lambda client, name: client.setrange(name, 0, b"X"),
    "payload": lambda client, name: client.setrange(name, client.strlen(name) - 9, b"\xff\xfe"),
    "cut": lambda client, name: client.set(name, client.getrange(name, 0, client.strlen(name) - 2)),
    "empty": lambda client, name: client.set(name, b""),
    "longer": lambda client, name: client.append(name, b"more"),
    "swapped": swap,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_and_is_mended(
    host: Callable[..., KVStore], server: Server, damage: str
) -> None:
    writer = filled(host, server.url)
    client = server.client()
    for name in entry_names(client):
        DAMAGE[damage](client, name)
    other = host(server.url)
    assert other.lookup(TOKENS).num_tokens == 0
    stats = remote_stats(other)
    assert (stats["damaged"], stats["errors"], stats["available"]) == (1, 0, 1)
    assert len(entry_names(client)) == 3  # the damaged one was removed
    # Each turn finds what is damaged next.
    for _ in range(4):
        writer.put(TOKENS, cache(TOKENS))
        writer.flush_remote(20)
        third = host(server.url)
        hit = third.lookup(TOKENS)
        assert not hit or same(third.load(hit), cache(TOKENS[: hit.num_tokens]))
    assert hit.num_tokens == 30


def test_values_of_another_fingerprint_under_the_right_keys(
    host: Callable[..., KVStore], server: Server
) -> None:
    filled(host, server.url)
    client = server.client()
    revised = fingerprint(weights_hash="revised")
    theirs = {name: client.get(name) for name in entry_names(client)}
    client.flushall()
    filled(host, server.url, fingerprint=revised)
    ours = entry_names(client)
    for name, value in zip(ours, theirs.values(), strict=True):
        client.set(name, value)
    other = host(server.url, fingerprint=revised)
    assert not other.lookup(TOKENS)
    assert remote_stats(other)["damaged"] == 1
    assert other.stats()["entries"] == 0


def test_keys_of_another_type(host: Callable[..., KVStore], server: Server) -> None:
    filled(host, server.url)
    client = server.client()
    for name in client.keys():
        client.delete(name)
        client.lpush(name, b"list")
    other = host(server.url)
    assert not other.lookup(TOKENS)
    assert remote_stats(other)["errors"] > 0 and remote_stats(other)["available"] == 1
    assert other.put(TOKENS, cache(TOKENS)) == 30


def test_nonsense_among_the_lengths_of_tails(host: Callable[..., KVStore], server: Server) -> None:
    filled(host, server.url)
    client = server.client()
    (name,) = (name for name in client.keys() if name.endswith(b":tails"))
    client.sadd(name, b"x", b"-1", b"0", b"7", b"99999999999999999999", b"5" * 100000, "٣".encode())
    assert host(server.url).lookup(TOKENS).num_tokens == 30


def test_an_evicted_value_is_a_miss(host: Callable[..., KVStore], server: Server) -> None:
    of = fingerprint(num_layers=8, head_size=64, num_kv_heads=4)  # two values an entry
    store = host(server.url, fingerprint=of, chunk_tokens=128, capacity_bytes=1 << 26)
    tokens = [*range(256)]
    store.put(tokens, cache(tokens, of))
    store.flush_remote(20)
    client = server.client()
    client.delete(next(name for name in entry_names(client) if name.endswith(b":1")))
    other = host(server.url, fingerprint=of, chunk_tokens=128, capacity_bytes=1 << 26)
    assert other.lookup(tokens).num_tokens in (0, 128)
    assert remote_stats(other)["misses"] >= 1 and remote_stats(other)["damaged"] == 0
    store.put(tokens, cache(tokens, of))  # written whole again
    store.flush_remote(20)
    assert other.lookup(tokens).num_tokens == 256


def test_a_server_that_evicts(host: Callable[..., KVStore], tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    try:
        store = host(server.url, capacity_bytes=1 << 24)
        prefixes = [[n] * 300 for n in range(40)]
        for tokens in prefixes:
            store.put(tokens, cache(tokens))
            store.flush_remote(20)
        assert server.client().info()["evicted_keys"] > 0
        other = host(server.url, capacity_bytes=1 << 24)
        found = 0
        for tokens in prefixes:
            hit = other.lookup(tokens)
            found += hit.num_tokens
            assert not hit or same(other.load(hit), cache(tokens[: hit.num_tokens]))
        assert 0 < found < 40 * 300
        assert remote_stats(other)["errors"] == 0
    finally:
        server.kill()


def test_a_server_that_is_full(host: Callable[..., KVStore], tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", "--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
    try:
        store = host(server.url, capacity_bytes=1 << 24)
        for n in range(20):
            tokens = [n] * 300
            assert store.put(tokens, cache(tokens)) == 300
            store.flush_remote(20)
        stats = remote_stats(store)
        assert stats["errors"] > 0 and stats["available"] == 1
        assert "maxmemory" in store._handle.remote.last_error
        assert same(store.load(store.lookup([19] * 300)), cache([19] * 300))
    finally:
        server.kill()


def test_time_to_live(host: Callable[..., KVStore], server: Server) -> None:
    store = host(server.url, settings={"ttl": 0.2})
    store.put(TOKENS, cache(TOKENS))
    store.flush_remote(20)
    client = server.client()
    assert client.keys()
    wait_for(lambda: not client.keys())
    assert not host(server.url).lookup(TOKENS)


def test_no_time_to_live(host: Callable[..., KVStore], server: Server) -> None:
    store = filled(host, server.url, settings={"ttl": None})
    client = server.client()
    assert {client.ttl(name) for name in client.keys()} == {-1}
    store.put(TOKENS, cache(TOKENS))
    store.flush_remote(20)
    assert remote_stats(store)["entries_written"] == 4


def test_the_local_time_to_live_goes_along(host: Callable[..., KVStore], server: Server) -> None:
    store = host(server.url)
    store.put(TOKENS, cache(TOKENS), ttl=100.0)
    store.flush_remote(20)
    client = server.client()
    assert all(0 < client.ttl(name) <= 100 for name in entry_names(client))
    other = host(server.url)
    other.lookup(TOKENS)
    expiry = {entry["expires_ms"] for entry in other.entries()}
    assert all(abs(at - store.entries()[0]["expires_ms"]) < 1000 for at in expiry)
