"""Erasing: what is gone, what stays, and what the files hold afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_cases import Open, cache, fingerprint

from lmdecode.store import KVStore

_SHARED = list(range(50, 66))  # two slots
_ONE, _OTHER = [*_SHARED, 701, 702, 703], [*_SHARED, 801, 802]


def _talk(store: KVStore, name: str, tokens: list[int]) -> None:
    session = store.session(name)
    session.step(tokens)
    assert session.commit(cache(tokens)) == len(tokens)


def _content(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())


def test_a_session_goes_and_what_others_share_stays(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    _talk(store, "one", _ONE)
    _talk(store, "other", _OTHER)
    held = store.lookup(_ONE)
    assert held.num_tokens == 19
    assert store.erase(session="one") == 1
    assert store.load(held) is None
    assert store.lookup(_ONE).num_tokens == 16 and store.lookup(_OTHER).num_tokens == 18
    assert [name for name, _ in store.sessions()] == ["other"]
    assert store.session("one").tokens == []
    with pytest.raises(ValueError, match="no session 'one'"):
        store.erase(session="one")
    needle = b"".join(token.to_bytes(4, "little") for token in (701, 702, 703))
    assert needle not in _content(tmp_path / "store")
    assert not store.verify().damage
    assert store.erase(session="other") == 3 and not store.lookup(_SHARED)


def test_tokens_go_with_all_that_continue_them(open_store: Open) -> None:
    store = open_store()
    for tokens in (_ONE, _OTHER):
        store.put(tokens, cache(tokens))
    assert store.erase([*_SHARED, 701]) == 1
    assert store.lookup(_ONE).num_tokens == 16
    assert store.erase([99]) == 0
    assert store.erase(_SHARED[:3]) == 3 and not store.lookup(_OTHER)
    assert store.put(_ONE, cache(_ONE)) == 19


def test_everything_of_one_tenant_goes(open_store: Open) -> None:
    store = open_store()
    tenant = store.for_tenant("tenant")
    _talk(store, "one", _ONE)
    tenant.put(_ONE, cache(_ONE))
    assert store.erase(everything=True) == 3
    assert not store.lookup(_ONE) and store.sessions() == []
    assert tenant.lookup(_ONE).num_tokens == 19
    for arguments in ({}, {"tokens": [1], "session": "a"}, {"session": "a", "everything": True}):
        with pytest.raises(ValueError, match="erase: expected one of"):
            store.erase(**arguments)  # type: ignore[arg-type]
    assert store.fingerprint == fingerprint()
