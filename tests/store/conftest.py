"""Stores for the tests; where the store was not built there is nothing to test."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from interpreters import Interpreters
    from redis_server import Server

if importlib.util.find_spec("lmdecode._store") is None:  # built without SQLite
    collect_ignore_glob = ["test_*.py"]
else:
    from store_cases import CHUNK, Open, fingerprint

    from lmdecode.store import KVStore, Remote


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Opens stores in one folder, and closes them."""
    opened: list[KVStore] = []

    def open_(*, path: Path = tmp_path / "store", **options: object) -> KVStore:
        settings: dict[str, object] = dict(fingerprint=fingerprint(), chunk_tokens=CHUNK)
        if not options.get("readonly"):
            settings["capacity_bytes"] = 1 << 20
        store = KVStore(path, **{**settings, **options})  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


@pytest.fixture(scope="package")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreters]:
    """Runs programs to the end of their interpreter; one that comes to none is the last."""
    from interpreters import Interpreters

    with Interpreters.started(tmp_path_factory.mktemp("interpreters")) as started:
        yield started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    from redis_server import Server

    server = Server(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def host(open_store: Open, tmp_path: Path) -> Callable[..., KVStore]:
    """Stores in directories of their own: as on different machines."""
    count = 0

    def open_host(url: str, *, settings: dict[str, object] | None = None, **options: object
                  ) -> KVStore:  # fmt: skip
        nonlocal count
        count += 1
        remote = Remote(url=url, **{"timeout": 5.0, "cool_down": 0.05, **(settings or {})})  # type: ignore[arg-type]
        return open_store(path=tmp_path / f"host{count}", remote=remote, **options)

    return open_host
