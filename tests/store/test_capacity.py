"""Room: the hard limit, what is evicted first, time to live, pins, quotas, the two queues."""

import time
from pathlib import Path

import pytest
from store_cases import CHUNK, Open, cache, same


def slots(open_store: Open, tmp_path: Path, count: int, **options: object) -> object:
    size = open_store(path=tmp_path / "probe").slot_bytes
    return open_store(path=tmp_path / "small", capacity_bytes=count * size, **options)


def conversation(number: int, length: int = CHUNK) -> list[int]:
    return [number] * length


@pytest.mark.parametrize("durability", ["strict", "relaxed"])
def test_the_capacity_is_never_exceeded(open_store: Open, tmp_path: Path, durability: str) -> None:
    store = slots(open_store, tmp_path, 5, durability=durability)
    for number in range(30):
        tokens = conversation(number, 1 + number % (3 * CHUNK))
        assert store.put(tokens, cache(tokens)) == len(tokens)
        stats = store.stats()
        assert stats["used_areas"] <= 5
        assert stats["used_areas"] + stats["idle_areas"] + stats["freed_areas"] == 5
        assert same(store.load(store.lookup(tokens)), cache(tokens))
    store.flush()
    size = sum(path.stat().st_size for path in (tmp_path / "small").rglob("slab-*"))
    assert size <= 5 * store.slot_bytes


def test_a_full_store_makes_room_with_the_put_before(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 128)
    for number in range(132):
        store.put(conversation(number), cache(conversation(number)))
    assert store.stats()["used_areas"] == 126  # 1/64 is kept free
    before = store.stats()["commits"]
    for number in range(200, 220):
        assert store.put(conversation(number), cache(conversation(number))) == CHUNK
    assert store.stats()["commits"] == before + 20  # none for deletions alone
    assert store.stats()["used_areas"] == 126
    assert store.lookup(conversation(219)) and not store.lookup(conversation(5))


def test_the_least_recently_used_goes_first(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 4)
    for number in range(4):
        store.put(conversation(number), cache(conversation(number)))
    store.lookup(conversation(0)).release()
    store.put(conversation(9), cache(conversation(9)))
    assert [bool(store.lookup(conversation(n))) for n in (0, 1, 2, 3, 9)] == [
        True, False, True, True, True,
    ]  # fmt: skip


def test_use_is_remembered_over_a_restart(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 4)
    for number in range(4):
        store.put(conversation(number), cache(conversation(number)))
        time.sleep(0.002)  # times are kept in milliseconds
    store.lookup(conversation(0)).release()
    capacity = 4 * store.slot_bytes
    store.close()
    store = open_store(path=tmp_path / "small", capacity_bytes=capacity)
    store.put(conversation(9), cache(conversation(9)))
    assert store.lookup(conversation(0))
    assert not store.lookup(conversation(1))


def test_leaves_go_before_what_they_continue(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 4)
    long = conversation(1, 4 * CHUNK)
    store.put(long, cache(long))
    store.put(conversation(2), cache(conversation(2)))
    store.put(conversation(3), cache(conversation(3)))
    assert store.lookup(conversation(2))
    assert store.lookup(conversation(3))
    assert store.lookup(long).num_tokens == 2 * CHUNK


def test_a_prefix_longer_than_the_store_is_stored_as_far_as_it_fits(
    open_store: Open, tmp_path: Path
) -> None:
    store = slots(open_store, tmp_path, 2)
    long = conversation(1, 5 * CHUNK)
    assert store.put(long, cache(long)) == 2 * CHUNK
    assert same(store.load(store.lookup(long)), cache(long[: 2 * CHUNK]))
    assert store.stats()["declined"] == 1


def test_a_hit_is_not_evicted_while_it_is_held(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 2)
    store.put(conversation(0), cache(conversation(0)))
    hit = store.lookup(conversation(0))
    for number in range(1, 5):
        store.put(conversation(number), cache(conversation(number)))
    assert same(store.load(hit), cache(conversation(0)))
    hit.release()
    for number in range(5, 8):
        store.put(conversation(number), cache(conversation(number)))
    assert not store.lookup(conversation(0))


def test_pinned_prefixes_stay(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 2)
    store.put(conversation(0), cache(conversation(0)), pin=True)
    store.put(conversation(1), cache(conversation(1)))
    hit = store.lookup(conversation(1))
    store.pin(hit)
    hit.release()
    capacity = 2 * store.slot_bytes
    store.close()
    store = open_store(path=tmp_path / "small", capacity_bytes=capacity)
    assert store.put(conversation(2), cache(conversation(2))) == 0  # declined, no error
    store.pin(store.lookup(conversation(0)), False)
    assert store.put(conversation(2), cache(conversation(2))) == CHUNK
    assert not store.lookup(conversation(0))
    assert store.lookup(conversation(1))


def test_what_has_expired_is_a_miss(open_store: Open) -> None:
    store = open_store()
    long = conversation(1, 3 * CHUNK)
    store.put(long[:CHUNK], cache(long[:CHUNK]))
    store.put(long, cache(long), ttl=0.001)
    other = conversation(2)
    store.put(other, cache(other), ttl=3600)
    time.sleep(0.01)
    assert store.lookup(long).num_tokens == CHUNK
    assert store.lookup(other)
    assert store.gc() == 2
    assert store.stats()["entries"] == 2
    # Stored again for good, it stays.
    store.put(other, cache(other))
    assert [entry["expires_ms"] for entry in store.entries()] == [0, 0]


def test_what_another_prefix_continues_lives_as_long(open_store: Open) -> None:
    store = open_store()
    long = conversation(1, 3 * CHUNK)
    store.put(long[:CHUNK], cache(long[:CHUNK]), ttl=0.001)
    store.put(long, cache(long), ttl=3600)
    time.sleep(0.01)
    assert store.lookup(long).num_tokens == 3 * CHUNK


def test_a_quota_is_of_one_tenant(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 8)
    small = store.for_tenant("small", quota_bytes=2 * store.slot_bytes)
    for number in range(3):
        store.put(conversation(number), cache(conversation(number)))
    for number in range(5):
        assert small.put(conversation(number), cache(conversation(number))) == CHUNK
    assert [bool(small.lookup(conversation(n))) for n in range(5)] == [False] * 3 + [True] * 2
    assert all(store.lookup(conversation(n)) for n in range(3))
    none = store.for_tenant("none", quota_bytes=0)
    assert none.put(conversation(0), cache(conversation(0))) == 0


@pytest.mark.parametrize(("idle_seconds", "freed"), [(3600.0, 3), (0.001, 0)])
def test_freed_areas_age_into_the_first_queue(
    open_store: Open, tmp_path: Path, idle_seconds: float, freed: int
) -> None:
    store = slots(open_store, tmp_path, 6, idle_seconds=idle_seconds)
    for number in range(3):
        store.put(conversation(number), cache(conversation(number)), ttl=0.001)
    time.sleep(0.01)
    store.gc()
    time.sleep(0.01)
    capacity = 6 * store.slot_bytes
    store.close()
    store = open_store(path=tmp_path / "small", capacity_bytes=capacity,
                       idle_seconds=idle_seconds)  # fmt: skip
    stats = store.stats()
    assert (stats["idle_areas"], stats["freed_areas"]) == (6 - freed, freed)


def test_a_store_can_be_made_smaller(open_store: Open, tmp_path: Path) -> None:
    store = slots(open_store, tmp_path, 8)
    for number in range(8):
        store.put(conversation(number), cache(conversation(number)))
    size = store.slot_bytes
    store.close()
    store = open_store(path=tmp_path / "small", capacity_bytes=3 * size)
    assert store.stats()["entries"] == 3
    assert sum(path.stat().st_size for path in (tmp_path / "small").rglob("slab-*")) <= 3 * size
    assert not store.verify().damage
    for number in range(20, 24):
        assert store.put(conversation(number), cache(conversation(number))) == CHUNK
