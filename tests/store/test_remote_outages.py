"""The second tier where the server goes, stalls or talks nonsense: the store goes on without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from redis_server import Proxy, Server
from remote_cases import TOKENS, filled, remote_stats, wait_for
from store_cases import cache, same

from lmdecode.store import KVStore


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
