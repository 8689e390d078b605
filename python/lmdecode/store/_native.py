"""The compiled part of the store, ``lmdecode._store``, or why it is not there."""

from __future__ import annotations

import importlib.util

# find_spec goes through the import hook of an editable install, which rebuilds what changed.
if importlib.util.find_spec("lmdecode._store") is None:
    raise ImportError(
        "lmdecode was built without its KV store, which needs SQLite with its header and "
        "pybind11: install them (on Debian or Ubuntu: apt install libsqlite3-dev; pip install "
        "pybind11) and lmdecode again"
    )
try:
    from lmdecode._store import Hit, Plane, PutOptions, Scope, Store, crc32c
except ImportError as error:
    raise ImportError(
        f"lmdecode's KV store needs the SQLite library (on Debian or Ubuntu: apt install "
        f"libsqlite3-0): {error}"
    ) from error

__all__ = ["Hit", "Plane", "PutOptions", "Scope", "Store", "crc32c"]
