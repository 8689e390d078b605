"""Stores for the tests; where the store was not built there is nothing to test."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("lmdecode._store") is None:  # built without SQLite
    collect_ignore_glob = ["test_*.py"]
else:
    from store_cases import CHUNK, Open, fingerprint

    from lmdecode.store import KVStore


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
