"""The second tier of stores with states: entries with a state, entries without, the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from redis_server import Server
from remote_cases import entry_names, remote_stats
from store_cases import CHUNK, fingerprint
from test_states import OF, TOKENS, found, put, same, with_state

import lmdecode
from lmdecode.store import Fingerprint, KVStore
from tests.support.causal_models import random_model, random_tokens

Host = Callable[..., KVStore]
# With a state an image of this one has two values, and without it one.
LARGE = fingerprint(state_size=300_000)
ROOM = 1 << 25


def test_another_host_finds_a_prefix_where_a_state_is(host: Host, server: Server) -> None:
    lengths = [5, CHUNK, 2 * CHUNK + 3, len(TOKENS)]
    store = host(server.url, fingerprint=OF)
    for length in lengths:
        put(store, length)
    assert store.flush_remote(20)
    for length in range(len(TOKENS) + 1):
        other = host(server.url, fingerprint=OF)
        assert found(other, length) == max((n for n in lengths if n <= length), default=0)
        other.close()
    server.kill()
    assert found(store, 2 * CHUNK + 3) == 2 * CHUNK + 3


def test_it_continues_what_is_stored_here(host: Host, server: Server) -> None:
    store, other = (host(server.url, fingerprint=OF) for _ in range(2))
    put(store, len(TOKENS))
    store.flush_remote(20)
    put(other, CHUNK + 2)
    other.flush_remote(20)
    assert found(other, len(TOKENS)) == len(TOKENS)
    assert found(other, CHUNK + 4) == CHUNK + 2


@pytest.mark.parametrize("of", [OF, LARGE])
def test_a_state_is_added_to_what_the_server_has(
    host: Host, server: Server, of: Fingerprint
) -> None:
    """And is not taken away by a host that lacks it."""
    end, options = 2 * CHUNK, {"fingerprint": of, "capacity_bytes": ROOM}
    first, second, third = (host(server.url, **options) for _ in range(3))
    first.put(TOKENS, with_state(TOKENS, of))
    first.flush_remote(20)
    assert not first.lookup(TOKENS[:end])
    second.put(TOKENS[:end], with_state(TOKENS[:end], of))
    second.flush_remote(20)
    third.put(TOKENS, with_state(TOKENS, of))
    third.flush_remote(20)
    assert remote_stats(third)["entries_written"] == 0
    for store in (first, host(server.url, **options)):  # the first one has the chunk without it
        hit = store.lookup(TOKENS[:end])
        assert hit.num_tokens == end
        assert same(store.load(hit), with_state(TOKENS[:end], of))
        assert same(store.load(store.lookup(TOKENS)), with_state(TOKENS, of))


def test_an_entry_without_a_state_is_small(host: Host, server: Server) -> None:
    store = host(server.url, fingerprint=LARGE, capacity_bytes=ROOM)
    store.put(TOKENS, with_state(TOKENS, LARGE))
    store.flush_remote(20)
    client = server.client()
    sizes = sorted(client.strlen(name) for name in entry_names(client))
    assert len(sizes) == 3 + 2 and sizes[2] < 10_000 < 600_000 < sizes[3]


@pytest.mark.parametrize("piece", [0, 1])
def test_what_is_left_of_an_entry(host: Host, server: Server, piece: int) -> None:
    """A state whose other half is gone: a miss; a host without it writes what it has."""
    options = {"fingerprint": LARGE, "capacity_bytes": ROOM}
    store, other = (host(server.url, **options) for _ in range(2))
    store.put(TOKENS[:CHUNK], with_state(TOKENS[:CHUNK], LARGE))
    store.flush_remote(20)
    client = server.client()
    (gone,) = (name for name in entry_names(client) if name.endswith(b":%d" % piece))
    client.delete(gone)
    assert not host(server.url, **options).lookup(TOKENS)
    other.put(TOKENS, with_state(TOKENS, LARGE))
    other.flush_remote(20)
    assert len(entry_names(client)) == 3 + 2  # nothing is left of the state
    assert not host(server.url, **options).lookup(TOKENS[:CHUNK])
    assert host(server.url, **options).lookup(TOKENS).num_tokens == len(TOKENS)


@pytest.mark.parametrize("at", [30, 90, 200, -1])
def test_damage_is_a_miss_and_is_mended(host: Host, server: Server, at: int) -> None:
    store = host(server.url, fingerprint=OF)
    put(store, CHUNK)
    store.flush_remote(20)
    client = server.client()
    (name,) = entry_names(client)
    value = bytearray(client.get(name))
    value[at] ^= 1
    client.set(name, bytes(value))
    other = host(server.url, fingerprint=OF)
    assert not other.lookup(TOKENS) and remote_stats(other)["damaged"] == 1
    put(store, CHUNK)
    store.flush_remote(20)
    assert found(host(server.url, fingerprint=OF), len(TOKENS)) == CHUNK


@pytest.mark.parametrize(
    "case", [("lfm2", "convolutions at the ends"), ("qwen3_5_text", "delta rule last, biases")]
)
def test_a_model_goes_on_with_the_bits_of_another_host(
    host: Host, server: Server, case: tuple[str, str]
) -> None:
    pytest.importorskip("transformers")
    decoding = lmdecode.Decoding.from_pretrained(random_model(*case), cache_dtype="bfloat16")
    of = {"fingerprint": decoding.fingerprint(), "capacity_bytes": ROOM, "chunk_tokens": 16}
    options: dict[str, Any] = {
        "max_new_tokens": 9, "min_new_tokens": 9, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    prompt = random_tokens(300)[None]
    other = torch.cat([prompt[:, :280], random_tokens(40, 1)[None]], 1)
    first = host(server.url, **of)
    decoding.generate(prompt, store=first, **options)
    assert first.flush_remote(20)
    for ids, stored in ((prompt, 299), (other, 256)):
        expected = decoding.generate(ids, **options)
        assert host(server.url, **of).lookup(ids[0, :-1]).num_tokens == stored
        store = host(server.url, **of)
        got = decoding.generate(ids, store=store, **options)
        assert store.stats()["hits"] == 1 and remote_stats(store)["entries_fetched"] > 0
        assert got.sequences.equal(expected.sequences)
        assert all(map(torch.equal, got.logits, expected.logits))
        engine = decoding.engine(max_requests=1, capacity=400, store=host(server.url, **of))
        request = engine.submit(ids[0], max_new_tokens=9, eos_token_id=())
        assert request.result().tokens == expected.sequences[0, ids.shape[1] :].tolist()
        assert request.stats.cached_tokens >= stored


def test_erase(host: Host, server: Server) -> None:
    store = host(server.url, fingerprint=LARGE, capacity_bytes=ROOM)
    other = [1, 2, 3]
    for tokens in (TOKENS[:5], TOKENS[:CHUNK], TOKENS, other):
        store.put(tokens, with_state(tokens, LARGE))
    store.flush_remote(20)
    client = server.client()
    assert store.erase(TOKENS[:CHUNK]) == 5 and len(entry_names(client)) == 2
    third = host(server.url, fingerprint=LARGE, capacity_bytes=ROOM)
    assert not third.lookup(TOKENS) and third.lookup(other)
    store.erase(everything=True)
    assert not client.keys()
