"""The second tier against a real redis-server: shared entries, and what a server may do to them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import Proxy, Server, redis
from remote_cases import TOKENS, entry_names, filled, remote_stats, wait_for
from store_cases import CHUNK, Open, cache, fingerprint, same

from lmdecode.store import KVStore, Remote
from lmdecode.store.__main__ import main
from lmdecode.store.remote_values import (
    MAX_VALUE_BYTES,
    DamagedValueError,
    RemoteEntry,
    chain_key,
    tails_name,
)
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


def test_passwords(
    host: Callable[..., KVStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(tmp_path / "redis", password="hunter2")
    try:
        url = server.url.replace("//", "//:{}@")
        store = filled(host, url.format("hunter2"))
        assert host(url.format("hunter2")).lookup(TOKENS).num_tokens == 30
        wrong = host(url.format("swordfish"))
        assert wrong.put(TOKENS, cache(TOKENS)) == 30
        wait_for(lambda: remote_stats(wrong)["errors"] > 0)
        assert "swordfish" not in wrong._handle.remote.last_error
        folder = str(Path(store._handle.directory).parent)
        for password in ("hunter2", "swordfish"):
            assert main(["stat", folder, "--remote", url.format(password)]) == 0
        captured = capsys.readouterr()
        assert "remote entries        4 of 4" in captured.out
        assert "remote error          AuthenticationError" in captured.out
        assert f"redis://127.0.0.1:{server.port}/0" in captured.out
        assert "hunter2" not in captured.out + captured.err
        assert "swordfish" not in captured.out + captured.err
        assert main(["stat", folder, "--remote", "redis://:hunter2@host:port/0"]) == 1
        captured = capsys.readouterr()
        assert "Remote" in captured.err and "hunter2" not in captured.out + captured.err
    finally:
        server.kill()


def test_tls(host: Callable[..., KVStore], tmp_path: Path) -> None:
    from shutil import which

    if which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    from redis_server import free_port

    port = free_port()
    server = Server(
        tmp_path / "redis", "--tls-port", str(port), "--tls-cert-file", str(certificate),
        "--tls-key-file", str(key), "--tls-auth-clients", "no",
    )  # fmt: skip
    try:
        url = f"rediss://localhost:{port}/0"
        filled(host, f"{url}?ssl_ca_certs={certificate}")
        assert host(f"{url}?ssl_ca_certs={certificate}").lookup(TOKENS).num_tokens == 30
        distrustful = host(url, settings={"cool_down": 1000.0})  # the certificate is nobody's
        assert not distrustful.lookup(TOKENS)
        assert "certificate" in distrustful._handle.remote.last_error.lower()
    finally:
        server.kill()


def test_a_unix_socket(host: Callable[..., KVStore], tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", "--unixsocket", str(tmp_path / "socket"))
    try:
        filled(host, f"unix://{tmp_path / 'socket'}")
        assert host(server.url).lookup(TOKENS).num_tokens == 30
    finally:
        server.kill()


def test_a_cluster(host: Callable[..., KVStore], tmp_path: Path) -> None:
    """One node has all slots; it refuses what would be of several."""
    server = Server(tmp_path / "redis", "--cluster-enabled", "yes")
    try:
        client = server.client()
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_for(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO")))
        url = f"redis://127.0.0.1:{server.port}"
        store = filled(host, url, settings={"cluster": True})
        assert remote_stats(store)["entries_written"] == 4 and remote_stats(store)["errors"] == 0
        other = host(url, settings={"cluster": True})
        assert same(other.load(other.lookup(TOKENS)), cache(TOKENS))
        slots = {client.execute_command("CLUSTER", "KEYSLOT", n) for n in entry_names(client)}
        assert slots == {redis.crc.key_slot(name) for name in entry_names(client)}
        server.kill()
        assert other.put([7] * 9, cache([7] * 9)) == 9
        assert not other.lookup([8] * 9)
        wait_for(lambda: remote_stats(other)["available"] == 0)
    finally:
        server.kill()


def test_without_redis_py_the_extra_is_named(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"lmdecode\[redis\]"):
        open_store(remote="redis://host")
    assert not (tmp_path / "store").exists()


def test_a_reader_has_no_second_tier(open_store: Open) -> None:
    open_store().put(TOKENS, cache(TOKENS))
    with pytest.raises(ValueError, match="readonly"):
        open_store(readonly=True, remote="redis://host")


def test_a_server_that_was_never_there(host: Callable[..., KVStore], server: Server) -> None:
    server.kill()
    store = host(server.url, settings={"cool_down": 1000.0})
    assert store.put(TOKENS, cache(TOKENS)) == 30
    assert store.lookup([*TOKENS, 1]).num_tokens == 30
    wait_for(lambda: remote_stats(store)["available"] == 0)
    for n in range(50):
        assert not store.lookup([500 + n])
        assert store.put([n], cache([n])) == 1
    # Of the first put and lookup, which may have asked at the same time; nobody asked again.
    assert 1 <= remote_stats(store)["errors"] <= 2
    assert remote_stats(store)["dropped"] >= 50


def test_killed_midway_and_back_empty(host: Callable[..., KVStore], server: Server) -> None:
    store = host(server.url, capacity_bytes=1 << 24)
    for n in range(30):
        tokens = [n] * 50
        if n == 10:
            server.kill()
        if n == 20:
            server.start()
            wait_for(lambda: remote_stats(store)["available"] == 1)
        assert store.put(tokens, cache(tokens)) == 50
        assert same(store.load(store.lookup([*tokens, 77])), cache(tokens))
    assert store.flush_remote(20)
    other = host(server.url, capacity_bytes=1 << 24)
    assert not other.lookup([5] * 50)  # it was there, and went with the server
    assert same(other.load(other.lookup([25] * 50)), cache([25] * 50))
    store.put([5] * 50, cache([5] * 50))
    store.flush_remote(20)
    assert other.lookup([5] * 50).num_tokens == 50


@pytest.mark.parametrize("mode", ["stall", "drip"])
def test_a_server_that_stalls_is_waited_for_once(
    host: Callable[..., KVStore], server: Server, mode: str
) -> None:
    filled(host, server.url)
    proxy = Proxy(server.port)
    try:
        other = host(proxy.url, settings={"timeout": 0.3, "cool_down": 0.2})
        proxy.mode = mode
        assert not other.lookup(TOKENS)
        stats = remote_stats(other)
        assert stats["available"] == 0 and stats["errors"] >= 1
        assert other.put([1, 2], cache([1, 2])) == 2
        proxy.mode = "pass"
        wait_for(lambda: remote_stats(other)["available"] == 1)
        assert same(other.load(other.lookup(TOKENS)), cache(TOKENS))
    finally:
        proxy.close()


def test_writes_to_a_server_that_stalls_are_dropped(
    host: Callable[..., KVStore], server: Server
) -> None:
    proxy = Proxy(server.port)
    try:
        store = host(
            proxy.url,
            settings={"timeout": 60.0, "max_pending": 3, "max_wait": 0.1, "cool_down": 1000.0},
            capacity_bytes=1 << 24,
        )
        proxy.mode = "stall"
        for n in range(20):
            assert store.put([n] * 20, cache([n] * 20)) == 20
        stats = remote_stats(store)
        assert stats["dropped"] >= 20 - 3 - 1 and stats["pending"] <= 4
        assert not store.flush_remote(0.01)
        store.close()  # for max_wait, and no longer
    finally:
        proxy.close()


def test_a_server_that_talks_nonsense(host: Callable[..., KVStore], tmp_path: Path) -> None:
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n$-7\r\n*9999999999\r\n")
            client.close()

    threading.Thread(target=answer, daemon=True).start()
    try:
        store = host(
            f"redis://127.0.0.1:{listener.getsockname()[1]}", settings={"cool_down": 1000.0}
        )
        assert store.put(TOKENS, cache(TOKENS)) == 30
        assert store.lookup([*TOKENS, 1]).num_tokens == 30
        wait_for(lambda: remote_stats(store)["errors"] > 0)
    finally:
        listener.close()


ENTRY = RemoteEntry(b"k" * 32, b"r" * 32, True, 5000)


def image_of(size: int) -> memoryview:
    return memoryview(os.urandom(size))


@settings(deadline=None, max_examples=30)
@given(size=st.integers(40, 4 * MAX_VALUE_BYTES), expires=st.integers(0, 2**62))
def test_values_are_short_and_make_the_image_again(size: int, expires: int) -> None:
    entry = ENTRY.of(ENTRY.key, size)
    image = image_of(size)
    values = list(entry.values(image, expires))
    assert len(values) == len(entry.names) == len(set(entry.names))
    assert all(len(value) <= MAX_VALUE_BYTES for value in values)
    assert entry.image(values) == (bytearray(image), expires)


@pytest.mark.parametrize("by_column", [False, True])
def test_a_cluster_keeps_an_entry_together_and_spreads_a_prefix(by_column: bool) -> None:
    redis = pytest.importorskip("redis")
    entries = [
        RemoteEntry(bytes([n]) * 32, b"r" * 32, by_column, 3 * MAX_VALUE_BYTES) for n in range(64)
    ]
    slots = [{redis.crc.key_slot(name.encode()) for name in entry.names} for entry in entries]
    assert all(len(entry.names) == 4 for entry in entries)
    assert all(len(of_one) == 1 for of_one in slots)
    assert len(set().union(*slots)) > 48
    assert len(ENTRY.of(b"a" * 32).names) == 1


def test_names_hold_a_hash_and_nothing_else() -> None:
    pattern = r"lmdkv1:\{[0-9a-f]{64}\}:(\d+|tails)"
    for name in [*ENTRY.names, tails_name(ENTRY.key, True)]:
        assert re.fullmatch(pattern, name)
        assert ENTRY.key.hex() not in name
    assert ENTRY.names != RemoteEntry(ENTRY.key, ENTRY.root, False, 5000).names


def test_every_flipped_bit_is_noticed() -> None:
    entry = ENTRY.of(ENTRY.key, 300)
    (value,) = entry.values(image_of(300), 0)
    for at in range(len(value)):
        damaged = bytearray(value)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(DamagedValueError):
            entry.image([bytes(damaged)])


@pytest.mark.parametrize("length", [0, 1, 127, 128, 427, 429, 1 << 21])
def test_a_value_of_another_length_is_noticed(length: int) -> None:
    entry = ENTRY.of(ENTRY.key, 300)
    (value,) = entry.values(image_of(300), 0)
    with pytest.raises(DamagedValueError):
        entry.image([(value * 5000)[:length]])


def test_a_value_of_another_place_is_noticed() -> None:
    entry = ENTRY.of(ENTRY.key, 2 * MAX_VALUE_BYTES)
    first, second, third = entry.values(image_of(entry.num_bytes), 0)
    for wrong in ([second, first, third], [first, first, third], [first, third, second]):
        with pytest.raises(DamagedValueError):
            entry.image(wrong)
    for other in (
        entry.of(b"x" * 32),
        RemoteEntry(entry.key, b"x" * 32, True, entry.num_bytes),  # fingerprint or tenant
        RemoteEntry(entry.key, entry.root, False, entry.num_bytes),
        entry.of(entry.key, entry.num_bytes + 3),
    ):
        with pytest.raises(DamagedValueError):
            other.image([first, second, third])


def test_the_chain_of_keys_is_the_stores(open_store: Open) -> None:
    store = open_store()
    ids = list(range(21))
    key = store.key([])
    for begin in range(0, 21, 8):
        part = ids[begin : begin + 8]
        data = b"".join(token.to_bytes(4, "little") for token in part)
        key = chain_key(key, begin + len(part), data)
        assert key == store.key(ids[: begin + len(part)])
    assert open_store(path=store._handle.directory + "-", fingerprint=fingerprint(dtype="float16")
                      ).key([]) != store.key([])  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [{"url": "http://host"}, {"url": "host:6379"}, {"url": ""},
                  {"url": "redis://h", "ttl": 0}, {"url": "redis://h", "timeout": -1.0},
                  {"url": "redis://h", "max_pending": 0}],
)  # fmt: skip
def test_wrong_settings_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Remote"):
        Remote(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": 5}, "url is of type int; expected a str"),
        ({"timeout": None}, "timeout is of type NoneType; expected int or float"),
        ({"max_wait": "1"}, "max_wait is of type str; expected int or float"),
        ({"max_pending": 0.5}, "max_pending is of type float; expected int"),
        ({"ttl": True}, "ttl is of type bool; expected int or float"),
    ],
)
def test_settings_of_other_types_are_refused(arguments: dict[str, object], message: str) -> None:
    """None is a time to live alone: without a timeout a lookup would wait for a stalled server."""
    with pytest.raises(TypeError, match=f"Remote: {message}"):
        Remote(**{"url": "redis://h", **arguments})  # type: ignore[arg-type]
    assert Remote(url="redis://h", ttl=None, timeout=1).ttl is None


def test_a_store_takes_a_url_or_settings(open_store: Open, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="KVStore: remote is of type int; expected a URL or a Rem"):
        open_store(remote=6379)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "url", ["redis://user:hunter2@host:6379/0", "rediss://:hunter2@host/1?ssl_ca_certs=hunter2",
            "unix://user:hunter2@/run/socket?password=hunter2"],
)  # fmt: skip
def test_passwords_are_not_printed(url: str) -> None:
    remote = Remote(url=url)
    assert "hunter2" not in repr(remote) + str(remote) + remote.location
    assert "hunter2" not in remote.without_secrets(f"cannot reach {url}")
