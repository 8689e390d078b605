"""Erasing: what is gone, what stays, and what the files hold afterwards."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from redis_server import Server
from remote_cases import TOKENS, entry_names, filled
from store_cases import Open, cache, fingerprint, same

from lmdecode.store import KVStore, StoreError
from lmdecode.store.__main__ import main

_SHARED = list(range(50, 66))  # two slots
_ONE, _OTHER = [*_SHARED, 701, 702, 703], [*_SHARED, 801, 802]


def _talk(store: KVStore, name: str, tokens: list[int]) -> None:
    session = store.session(name)
    session.step(tokens[len(session) :])
    assert session.commit(cache(tokens)) == len(tokens)


def _is_in_files(path: Path, *tokens: int) -> bool:
    needle = struct.pack(f"<{len(tokens)}i", *tokens)
    return any(needle in file.read_bytes() for file in path.rglob("*") if file.is_file())


def test_a_session_goes_and_what_others_share_stays(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    _talk(store, "one", _ONE)
    _talk(store, "other", _OTHER)
    held = store.lookup(_ONE)
    assert held.num_tokens == 19
    assert _is_in_files(tmp_path, 701, 702, 703)
    assert store.erase(session="one") == 1
    assert store.load(held) is None
    assert store.lookup(_ONE).num_tokens == 16 and store.lookup(_OTHER).num_tokens == 18
    assert [name for name, _ in store.sessions()] == ["other"]
    assert store.session("one").tokens == []
    with pytest.raises(ValueError, match="no session 'one'"):
        store.erase(session="one")
    assert not _is_in_files(tmp_path, 701, 702, 703)
    assert not store.verify().damage
    assert store.erase(session="other") == 3 and not store.lookup(_SHARED)


def test_earlier_stages_go_from_the_files_too(open_store: Open, tmp_path: Path) -> None:
    """A session that grows leaves its shorter ends in slots that are free."""
    store = open_store()
    for end in (17, 18, 19):
        _talk(store, "one", _ONE[:end])
    _talk(store, "other", _OTHER[:17])
    _talk(store, "other", _OTHER)
    for slot in (tmp_path / "store").rglob("slab-*"):
        assert slot.read_bytes().count(struct.pack("<i", 701)) >= 2
    store.erase(session="one")
    assert not _is_in_files(tmp_path, 701) and not _is_in_files(tmp_path, 702)
    assert _is_in_files(tmp_path, 801, 802)
    # The slots serve again.
    stats = store.stats()
    areas = stats["used_areas"] + stats["idle_areas"] + stats["freed_areas"]
    assert areas == stats["capacity_areas"]


def test_tokens_go_with_all_that_continue_them(open_store: Open) -> None:
    store = open_store()
    for tokens in (_ONE, _OTHER):
        store.put(tokens, cache(tokens))
    assert store.erase([*_SHARED, 701]) == 1
    assert store.lookup(_ONE).num_tokens == 16
    assert store.erase([99]) == 0
    assert store.erase(_SHARED[:3]) == 3 and not store.lookup(_OTHER)
    assert store.put(_ONE, cache(_ONE)) == 19


def test_everything_of_one_tenant_goes(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    tenant = store.for_tenant("tenant")
    _talk(store, "one", _ONE)
    tenant.put(_OTHER, cache(_OTHER))
    store.put(_ONE[:5], cache(_ONE[:5]), context=b"image")
    assert store.erase(everything=True) == 4
    assert not store.lookup(_ONE) and not store.lookup(_ONE, context=b"image")
    assert store.sessions() == []
    assert same(tenant.load(tenant.lookup(_OTHER)), cache(_OTHER))
    assert not _is_in_files(tmp_path, 701)
    for arguments in ({}, {"tokens": [1], "session": "a"}, {"session": "a", "everything": True}):
        with pytest.raises(ValueError, match="erase: expected one of"):
            store.erase(**arguments)  # type: ignore[arg-type]


def test_it_needs_a_store_that_writes(open_store: Open) -> None:
    _talk(open_store(), "one", _ONE)
    reader = open_store(readonly=True)
    with pytest.raises(StoreError, match="readonly"):
        reader.erase(session="one")
    assert reader.lookup(_ONE).num_tokens == 19


def test_a_reader_in_another_store_sees_it(open_store: Open) -> None:
    writer = open_store()
    _talk(writer, "one", _ONE)
    reader = open_store(readonly=True)
    held = reader.lookup(_ONE)
    assert same(reader.load(held), cache(_ONE))
    writer.erase(session="one")
    assert reader.load(held) is None and not reader.lookup(_ONE)


def _fill(open_store: Open) -> list[str]:
    """Two fingerprints, both with the sessions "one" and "other"; their names."""
    names = []
    for weights in ("weights", "others"):
        with open_store(fingerprint=fingerprint(weights_hash=weights)) as store:
            _talk(store, "one", _ONE)
            _talk(store, "other", _OTHER)
            names.append(store.fingerprint.name)
    return names


def test_rm_of_a_session(
    open_store: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(open_store)
    folder = str(tmp_path / "store")
    assert main(["rm", folder, "--session", "one"]) == 0
    assert capsys.readouterr().out.count("session one and 1 entries erased") == 2
    assert not _is_in_files(tmp_path, 701, 702, 703)
    with open_store() as store:
        assert [name for name, _ in store.sessions()] == ["other"]
    for wrong in (["--session", "one"], ["--session", "other", "--salt", "tenant"]):
        assert main(["rm", folder, *wrong]) == 1
        assert "no session" in capsys.readouterr().err


def test_rm_of_fingerprints(
    open_store: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = _fill(open_store)
    folder = str(tmp_path / "store")
    assert main(["ls", folder]) == 0
    assert capsys.readouterr().out.count("4 chunks of prefixes") == 2
    for wrong, message in (
        ([], "expected one of"), (["--fingerprint", "zz"], "no store in"),
        (["--all", "--session", "one"], "--all goes with"),
        (["--all", "--remote", "redis://host"], "--remote goes with"),
    ):  # fmt: skip
        assert main(["rm", folder, *wrong]) == 1
        assert message in capsys.readouterr().err
    with open_store() as store:
        assert main(["rm", folder, "--fingerprint", names[0]]) == 1
        assert "has a writer" in capsys.readouterr().err
        assert store.lookup(_ONE).num_tokens == 19
    assert main(["rm", folder, "--fingerprint", names[0][:12]]) == 0
    assert [path.name for path in (tmp_path / "store").iterdir()] == names[1:]
    with open_store(fingerprint=fingerprint(weights_hash="others")) as store:
        assert store.lookup(_ONE).num_tokens == 19
    assert main(["rm", folder, "--all"]) == 0
    assert list((tmp_path / "store").iterdir()) == []


def test_what_is_removed_was_overwritten(open_store: Open, tmp_path: Path) -> None:
    """A second name of each file shows what its blocks hold."""
    _fill(open_store)
    (tmp_path / "blocks").mkdir()
    for number, file in enumerate((tmp_path / "store").rglob("*")):
        if not file.is_file():
            continue
        (tmp_path / "blocks" / str(number)).hardlink_to(file)
    assert _is_in_files(tmp_path / "blocks", 701, 702, 703)
    assert main(["rm", str(tmp_path / "store"), "--all"]) == 0
    assert not any(any(file.read_bytes()) for file in (tmp_path / "blocks").iterdir())


def test_the_second_tier_forgets_it_too(host: Callable[..., KVStore], server: Server) -> None:
    store = filled(host, server.url)
    _talk(store, "one", [*TOKENS[:16], 5, 6])
    longer = [*TOKENS, 7, 8, 9]
    tenant = store.for_tenant("tenant")
    for kept in (store, tenant):
        assert kept.put(longer, cache(longer)) == 33
    assert store.flush_remote(20)
    assert store.erase(TOKENS[:20]) == 3  # the ones that "one" needs stay
    other = host(server.url)
    assert other.lookup(longer).num_tokens == 16
    assert other.lookup([*TOKENS[:16], 5, 6]).num_tokens == 18
    assert other.for_tenant("tenant").lookup(longer).num_tokens == 33
    assert store.erase(session="one") == 3
    assert not host(server.url).lookup([*TOKENS[:16], 5, 6])


def test_what_only_the_second_tier_has_goes(host: Callable[..., KVStore], server: Server) -> None:
    filled(host, server.url)
    other_model = host(server.url, fingerprint=fingerprint(weights_hash="others"))
    other_model.put(TOKENS, cache(TOKENS))
    other_model.flush_remote(20)
    with server.client() as client:
        before = len(entry_names(client))
    fresh = host(server.url)
    assert fresh.erase(TOKENS[:3]) == 0  # nothing is here
    with server.client() as client:
        assert len(entry_names(client)) == before // 2
    assert not host(server.url).lookup(TOKENS)
    assert other_model.erase(everything=True) == 4
    with server.client() as client:
        assert entry_names(client) == []


def test_without_an_answer_nothing_is_erased(host: Callable[..., KVStore], server: Server) -> None:
    store = filled(host, server.url)
    server.kill()
    with pytest.raises(StoreError, match="erase: the second tier"):
        store.erase(TOKENS)
    assert store.lookup(TOKENS).num_tokens == 30
