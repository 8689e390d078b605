"""What tests of the second tier share: tokens, a store that has written them, its figures."""

import time
from collections.abc import Callable

from redis_server import redis
from store_cases import cache

from lmdecode.store import KVStore

TOKENS = list(range(30))  # three chunks of eight and a tail of six


def remote_stats(store: KVStore) -> dict[str, int]:
    prefix = "remote_"
    return {k.removeprefix(prefix): v for k, v in store.stats().items() if k.startswith(prefix)}


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


def filled(host: Callable[..., KVStore], url: str, **options: object) -> KVStore:
    store = host(url, **options)
    assert store.put(TOKENS, cache(TOKENS, store.fingerprint)) == len(TOKENS)
    assert store.flush_remote(20)
    return store


def entry_names(client: redis.Redis) -> list[bytes]:
    return sorted(name for name in client.keys() if not name.endswith(b":tails"))
