"""Between stores and caches: what is read goes on as what was written."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmdecode.store")

from store_models import ids, model_of, store_of
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, cache_utils

from lmdecode.attention.ring_cache import RingKVCache, RingSnapshot
from lmdecode.integrations.transformers import (
    BeamDynamicCache,
    DynamicRingCache,
    StaticRingCache,
    cache_from_kv,
    cache_to_kv,
    load_cache,
    prefill,
)
from lmdecode.integrations.transformers.store import cache as store_cache
from tests.support.releases import BEFORE_5_3, READS_DRAFTS

CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "beam": lambda config: BeamDynamicCache(config=config),
    "dynamic ring": DynamicRingCache,
    "static ring": lambda config: StaticRingCache(config, 60),
    "static": lambda config: StaticCache(config, 60),
}


def logits(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 30])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_cache_goes_on_as_the_one_it_was_read_from(
    name: str, kind: str, length: int, tmp_path: Path
) -> None:
    """Lengths around the windows of 5 and 6 tokens."""
    model = model_of(name)
    tokens, more = ids(length), [ids(1, seed=1), ids(3, seed=2), ids(1, seed=3)]
    first = CACHES[kind](model.config)
    prefill(model, first, tokens)
    kv = cache_to_kv(first)
    copied = cache_from_kv(model.config, kv, length, cache=CACHES[kind](model.config))
    loaded = CACHES[kind](model.config)
    with store_of(model, tmp_path) as store:
        assert store.put(tokens, kv) == length
        assert load_cache(store, store.lookup(tokens), loaded)
    for some in more:
        expected = logits(model, first, some)
        for cache in (copied, loaded):
            assert torch.equal(logits(model, cache, some), expected)
            assert int(cache.get_seq_length()) == int(first.get_seq_length())


def test_a_new_cache_grows_in_place() -> None:
    model = model_of("llama")
    cache = DynamicCache(config=model.config)
    prefill(model, cache, ids(9))
    kv = cache_to_kv(cache)
    copied = cache_from_kv(model.config, kv)
    assert isinstance(copied, BeamDynamicCache)
    assert torch.equal(logits(model, copied, ids(1)), logits(model, cache, ids(1)))
    assert kv[0][0].shape == (2, 9, 8)  # what came later is not in what was read


def test_the_first_tokens_of_a_cache() -> None:
    model = model_of("llama")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache, length in zip(caches, (20, 12), strict=True):
        prefill(model, cache, ids(20)[:, :length], chunk_size=4)
    for pair, other in zip(cache_to_kv(caches[0], 12), cache_to_kv(caches[1]), strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])
    with pytest.raises(ValueError, match="num_tokens is 21; expected 1 to 20"):
        cache_to_kv(caches[0], 21)
    for make in (CACHES["dynamic"], CACHES["static"]):
        cache = make(model_of("mistral").config)
        prefill(model_of("mistral"), cache, ids(20))
        assert cache_to_kv(cache, 20)[0][0].shape[1] in (4, 5)
        with pytest.raises(ValueError, match=r"layers\[0\] has a window and went on to token 20"):
            cache_to_kv(cache, 15)


@READS_DRAFTS
def test_a_ring_has_some_tokens_more_than_its_window() -> None:
    ring = DynamicRingCache(model_of("mistral").config)
    ring.activate_past_recording()
    prefill(model_of("mistral"), ring, ids(20))
    short = DynamicCache(config=model_of("mistral").config)
    prefill(model_of("mistral"), short, ids(20)[:, :15])
    kept, expected = cache_to_kv(ring, 15)[0][0], cache_to_kv(short)[0][0]
    torch.testing.assert_close(kept, expected)


def test_rows_of_a_batch() -> None:
    model = model_of("llama")
    both = torch.cat([ids(9), ids(9, seed=1)])
    cache = DynamicCache(config=model.config)
    logits(model, cache, both)
    for row in (0, 1):
        keys, values = cache_to_kv(cache, row=row)[1]
        assert torch.equal(keys, cache.layers[1].keys[row])
        assert torch.equal(values, cache.layers[1].values[row])


def test_cross_attention() -> None:
    model = model_of("bart")
    source, given = ids(11), ids(4, seed=1)
    cache = EncoderDecoderCache(
        DynamicCache(config=model.config), DynamicCache(config=model.config)
    )
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=source)
        prefill(model, cache, given, encoder_outputs=encoded)
        cross = cache_to_kv(cache.cross_attention_cache)
        copied = cache_from_kv(model.config, cache_to_kv(cache), cross=cross)
        expected, got = (
            model(
                encoder_outputs=encoded, decoder_input_ids=ids(1), past_key_values=of,
                use_cache=True,
            ).logits
            for of in (cache, copied)
        )  # fmt: skip
    assert torch.equal(got, expected)
    assert [keys.shape[1] for keys, _ in cross] == [11, 11]
    with pytest.raises(ValueError, match="cross is None and the cache a EncoderDecoderCache"):
        cache_from_kv(model.config, cross, cache=EncoderDecoderCache(*(
            DynamicCache(config=model.config) for _ in range(2)
        )))  # fmt: skip


def test_layer_by_layer(tmp_path: Path) -> None:
    """The way to devices other than the CPU."""
    model = model_of("gemma2")
    cache = DynamicCache(config=model.config)
    prefill(model, cache, ids(20))
    kv = cache_to_kv(cache)
    with store_of(model, tmp_path) as store:
        store.put(ids(20), kv)
        targets = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in kv]
        assert store_cache._copy_by_layer(store.load_layers(store.lookup(ids(20))), targets)
        for pair, other in zip(targets, kv, strict=True):
            assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])
        hit = store.lookup(ids(20))
        next(tmp_path.rglob("slab-*")).write_bytes(b"")
        assert not store_cache._copy_by_layer(store.load_layers(hit), targets)


@pytest.mark.parametrize("kind", CACHES)
def test_a_load_that_fails_leaves_an_empty_cache(kind: str, tmp_path: Path) -> None:
    model = model_of("gemma2")
    cache = CACHES[kind](model.config)
    prefill(model, cache, ids(20))
    expected = logits(model, CACHES[kind](model.config), ids(9))
    with store_of(model, tmp_path) as store:
        store.put(ids(20), cache_to_kv(cache))
        hit = store.lookup(ids(20))
        next(tmp_path.rglob("slab-*")).write_bytes(b"")
        other = CACHES[kind](model.config)
        assert not load_cache(store, hit, other)
        assert not load_cache(store, store.lookup(ids(20)), other)
        assert int(other.get_seq_length()) == 0
        assert torch.equal(logits(model, other, ids(9)), expected)


def test_what_does_not_fit(tmp_path: Path) -> None:
    model = model_of("llama")
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="num_tokens is 0; expected 1 to 0"):
        cache_to_kv(cache)
    prefill(model, cache, ids(20))
    kv = cache_to_kv(cache)
    config = model.config
    with pytest.raises(ValueError, match="the cache holds tokens already"):
        cache_from_kv(config, kv, cache=cache)
    with pytest.raises(ValueError, match="the cache has 2 layers; expected 1"):
        cache_from_kv(config, kv[:1])
    with pytest.raises(ValueError, match="kv has no layers"):
        cache_from_kv(config, [])
    with pytest.raises(
        ValueError, match=r"layer 0 has keys and values of 20 tokens; expected .* 21"
    ):
        cache_from_kv(config, kv, 21)
    with pytest.raises(ValueError, match="room for 19 tokens; expected at least 20"):
        cache_from_kv(config, kv, cache=StaticCache(config, 19))
    with pytest.raises(TypeError, match="cache is of type list; expected a Cache"):
        cache_to_kv([])
    if not BEFORE_5_3:  # later releases have layers of other kinds
        mixed = DynamicCache(config=config)
        mixed.layers[1] = cache_utils.LinearAttentionLayer()
        with pytest.raises(ValueError, match=r"layers\[1\] of the cache is of type LinearAtten"):
            cache_from_kv(config, kv, cache=mixed)
    offloaded = DynamicCache(config=config)
    offloaded.offloading = True  # as with offloading=True, for which CUDA builds need a device
    with pytest.raises(ValueError, match="the cache is offloaded"):
        cache_from_kv(config, kv, cache=offloaded)
    with store_of(model_of("mistral"), tmp_path) as store:
        with pytest.raises(ValueError, match="layer 0 has keys and values of 4 tokens"):
            store.put(ids(20), [(k[:, -4:], v[:, -4:]) for k, v in kv])
            load_cache(store, store.lookup(ids(20)), DynamicCache(config=config))


def test_a_ring_goes_on_without_the_first_token_of_its_window() -> None:
    rings = [RingKVCache(1, 2, 8, window=5) for _ in range(2)]
    keys, values, query = torch.randn(3, 1, 2, 12, 8)
    rings[0].append(keys[:, :, :9], values[:, :, :9])
    whole = rings[0].snapshot()
    part = RingSnapshot(whole.num_tokens, whole.keys[:, :, 1:], whole.values[:, :, 1:])
    rings[1].restore(part)
    for position in range(9, 12):
        step = [states[:, :, position : position + 1] for states in (query, keys, values)]
        assert torch.equal(rings[0].attend(*step), rings[1].attend(*step))
    rings[1].rollback(1)  # what is needed has come since
    rings[1].restore(part)
    with pytest.raises(ValueError, match="q has 1 tokens; expected at most 0"):
        rings[1].attend(query[:, :, :1])  # the last token again: its window is not there
    with pytest.raises(ValueError, match=r"keys of the snapshot are .* \[1, 2, 3, 8\]; expected"):
        rings[0].restore(RingSnapshot(9, whole.keys[:, :, 2:], whole.values[:, :, 2:]))
