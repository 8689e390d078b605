"""Keys and values of the second tier: what a server may do to them is noticed."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import Open, fingerprint

from lmdecode.store import Remote
from lmdecode.store.remote_values import (
    MAX_VALUE_BYTES,
    DamagedValueError,
    RemoteEntry,
    chain_key,
    tails_name,
)

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
