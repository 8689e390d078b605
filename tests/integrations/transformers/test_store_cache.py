"""Between stores and caches: what is read goes on as what was written."""

import copy
import errno
import functools
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

pytest.importorskip("lmdecode.store")

import transformers
from store_models import CHUNK, SHIPPED, answer, converse, fingerprint_of, ids, model_of, store_of
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, cache_utils

from lmdecode.attention.ring_cache import RingKVCache, RingSnapshot
from lmdecode.integrations.transformers import (
    BeamDynamicCache,
    DynamicRingCache,
    StaticRingCache,
    cache_from_kv,
    cache_to_kv,
    generate_with_store,
    load_cache,
    prefill,
)
from lmdecode.integrations.transformers.store import cache as store_cache
from lmdecode.integrations.transformers.store.__main__ import main as why_of_a_model
from lmdecode.store import (
    Fingerprint,
    FingerprintMismatchError,
    KVStore,
    StoreError,
    StoreLockedError,
    weights_mark,
)
from lmdecode.store.__main__ import main
from tests.support.releases import BEFORE_5_3, READS_DRAFTS
from tests.support.store_faults import replaced_call
from tests.support.tiny_models import seeded_model

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


TURNS = (ids(37), ids(5, seed=1))


@pytest.fixture
def expected(tmp_path: Path) -> list[int]:
    """The conversation with a store that is well."""
    model = model_of("llama")
    with store_of(model, tmp_path / "well") as store:
        return converse(model, store, "a", TURNS)[0]


def test_tenants_and_contexts_never_meet(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        first, _ = answer(model, store, "a", TURNS[0], context=b"adapter 1")
        for other, options in (
            (store, {}),
            (store, {"context": b"adapter 2"}),
            (store.for_tenant("somebody"), {"context": b"adapter 1"}),
        ):
            assert answer(model, other, "a", TURNS[0], **options)[0] == first
            assert store.stats()["hits"] == 0
        assert store.session("a", context=b"adapter 1").tokens == first
        assert answer(model, store, "b", TURNS[0], context=b"adapter 1")[0] == first
        assert store.stats()["hits"] == 1


def _changed(name: str, kind: str, **changes: Any) -> Any:
    return seeded_model(kind, 3, **{**model_of(name).config.to_dict(), **changes})


_llama = functools.partial(_changed, "llama", "LlamaForCausalLM")
_mistral = functools.partial(_changed, "mistral", "MistralForCausalLM")


def _revised() -> Any:
    model = _llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-4
    return model


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_llama, _revised),
        (_llama, lambda: _llama().to(torch.bfloat16)),
        (_llama, lambda: _llama(num_hidden_layers=3)),
        (_llama, lambda: _llama(rms_norm_eps=1e-3)),
        (_llama, lambda: _llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        (_mistral, lambda: _mistral(sliding_window=9)),
        (_mistral, lambda: _mistral(sliding_window=None)),
    ],
    ids=["weights", "dtype", "layers", "epsilon", "rope", "window", "no window"],
)
def test_another_model_never_hits(one: Any, other: Any, tmp_path: Path) -> None:
    """Both in one directory, each with its own store."""
    for number, model in enumerate((one(), other())):
        with store_of(model, tmp_path) as store:
            answer(model, store, "a", TURNS[0])
            assert store.stats()["hits"] == 0
            assert len(list(tmp_path.iterdir())) == number + 1


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gemma3", "bart", "t5"])
def test_a_saved_model_has_the_same_fingerprint(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    before = Fingerprint.from_model(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert Fingerprint.from_model(loaded) == before
    cache = transformers.DynamicCache(config=model.config)
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    assert list(before.windows or [None] * before.num_layers) == windows


@pytest.mark.skipif(not SHIPPED.exists(), reason="the model is in source checkouts only")
def test_the_fingerprint_of_the_shipped_model() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    one = Fingerprint.from_model(model, tokenizer)
    assert (one.num_layers, one.num_kv_heads, one.head_size) == (4, 2, 32)
    assert (one.window, one.dtype, one.model_id) == (128, "bfloat16", "MistralForCausalLM")
    assert one.tokenizer_hash is not None
    assert one != Fingerprint.from_model(model)
    assert one.weights_hash != Fingerprint.from_model(model.float(), tokenizer).weights_hash


def test_a_store_that_is_only_read(expected: list[int], tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path / "store") as store:
        converse(model, store, "a", TURNS[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with store_of(model, tmp_path / "store", readonly=True) as store:
            assert converse(model, store, "a", TURNS, rewind=True)[0] == expected
            assert store.stats()["hits"] == 1
            assert converse(model, store, "b", TURNS)[0] == expected
    with store_of(model, tmp_path / "store") as store:
        assert len(store.session("a")) == 46 and len(store.session("b")) == 0


def test_a_store_that_was_closed(expected: list[int], tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path / "store") as store:
        store.close()
        with pytest.warns(
            RuntimeWarning, match="generate_with_store goes on without the store"
        ) as w:
            assert converse(model, store, "a", TURNS)[0] == expected
    assert len(w) == len(TURNS)  # one a call


def test_damaged_slots(expected: list[int], tmp_path: Path) -> None:
    model = model_of("llama")
    said = expected[:46]
    with store_of(model, tmp_path / "store") as store:
        converse(model, store, "a", TURNS[:1])
        slot_bytes = store.slot_bytes
    (slab,) = (tmp_path / "store").rglob("slab-*")
    content = bytearray(slab.read_bytes())
    for slot in range(0, len(content), slot_bytes):
        content[slot + slot_bytes // 2] ^= 1
    slab.write_bytes(content)
    with store_of(model, tmp_path / "store") as store:
        assert converse(model, store, "a", TURNS[1:], said)[0] == expected
        assert store.stats()["damaged"] > 0
    with store_of(model, tmp_path / "store") as store:  # stored again
        again = converse(model, store, "a", [ids(3)], expected)[0]
        assert again[: len(expected)] == expected
        assert store.stats()["hits"] == 1 and store.stats()["damaged"] == 0


def test_slabs_that_are_gone(expected: list[int], tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path / "store") as store:
        converse(model, store, "a", TURNS[:1])
    for slab in (tmp_path / "store").rglob("slab-*"):
        slab.unlink()
    with store_of(model, tmp_path / "store") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert converse(model, store, "a", TURNS[1:], expected[:46])[0] == expected


def test_no_room(expected: list[int], tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path / "probe") as store:
        one_slot = store.slot_bytes
    with store_of(model, tmp_path / "store", capacity_bytes=one_slot) as store:
        assert converse(model, store, "a", TURNS)[0] == expected
        assert store.session("a").tokens == expected
        assert len(store.entries()) <= 1
    with store_of(model, tmp_path / "store", capacity_bytes=one_slot) as store:
        assert converse(model, store, "a", [], expected)[0] == store.session("a").tokens


@pytest.mark.parametrize("call", ["lookup", "load", "commit_session", "read_session"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "no space"), OSError(errno.EIO, "broken"), StoreError("closed")]
)
def test_calls_that_fail(call: str, error: Exception, expected: list[int], tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path / "store") as store:
        converse(model, store, "a", TURNS[:1])
    with store_of(model, tmp_path / "store") as store:
        message = f"goes on without the store: .*{error.args[-1]}"
        with (
            replaced_call(store, call, Mock(side_effect=error)),
            pytest.warns(RuntimeWarning, match=message),
        ):
            assert converse(model, store, "a", TURNS[1:], expected[:46])[0] == expected


def test_stores_that_cannot_be_opened(tmp_path: Path) -> None:
    """Clear errors, before any model runs."""
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        answer(model, store, "a", TURNS[0])
        with pytest.raises(StoreLockedError), store_of(model, tmp_path):
            pass
    index = next(tmp_path.rglob("index.sqlite"))
    index.write_bytes(b"\0" * index.stat().st_size)
    for left in (*tmp_path.rglob("*-wal"), *tmp_path.rglob("*-shm")):
        left.unlink()
    with pytest.raises(StoreError), store_of(model, tmp_path):
        pass
    shutil.rmtree(tmp_path)
    tmp_path.write_bytes(b"")
    with pytest.raises(OSError):
        KVStore(tmp_path, fingerprint=fingerprint_of(model), capacity_bytes=1 << 24)


def test_files_are_private_and_not_pickled(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path / "store") as store:
        answer(model, store, "a", TURNS[0])
        for path in (tmp_path / "store").rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
            if path.is_file():
                assert not path.read_bytes().startswith((b"\x80\x02", b"\x80\x04", b"PK"))


def test_loads_only_what_is_faster(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        tokens, _ = answer(model, store, "a", TURNS[0])
    with store_of(model, tmp_path) as store:
        store.load(store.lookup(tokens[:CHUNK]))  # a load was measured
        store.record_prefill(1 << 40, 1e-9)  # and a model that is faster than any disk
        read = store.stats()["bytes_read"]
        assert answer(model, store, "b", TURNS[0], if_faster=True)[0] == tokens
        assert store.stats()["bytes_read"] == read
        assert answer(model, store, "c", TURNS[0])[0] == tokens
        assert store.stats()["bytes_read"] > read


_IDS = torch.tensor([[3, 7, 11, 5]])


def _open(folder: Path, fingerprint: Fingerprint, **options: object) -> KVStore:
    settings: dict[str, object] = {"capacity_bytes": 1 << 26, "chunk_tokens": CHUNK, **options}
    return KVStore(folder, fingerprint=fingerprint, **settings)  # type: ignore[arg-type]


def _fine_tuned(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.01
    return other


def test_a_fine_tune_with_the_base_models_store_is_an_error(tmp_path: Path) -> None:
    base = copy.deepcopy(model_of("llama"))
    base.config._name_or_path, tuned = "base-model", _fine_tuned(base)
    tuned.config._name_or_path = "tuned-model"
    with _open(tmp_path, Fingerprint.from_model(base)) as store:
        expected = generate_with_store(base, store, "a", _IDS, max_new_tokens=4)
        with pytest.raises(FingerprintMismatchError, match=r"base-model.*tuned-model") as raised:
            generate_with_store(tuned, store, "b", _IDS, max_new_tokens=4)
        assert isinstance(raised.value, ValueError)
        assert weights_mark(base) in str(raised.value) and weights_mark(tuned) in str(raised.value)
        assert [name for name, _ in store.sessions()] == ["a"]
        again = generate_with_store(base, store, "c", _IDS, max_new_tokens=4)
    assert torch.equal(again, expected)


def test_weights_changed_in_place_are_an_error(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of("llama"))
    with _open(tmp_path, Fingerprint.from_model(model)) as store:
        ids = generate_with_store(model, store, "a", _IDS, max_new_tokens=4)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        with pytest.raises(FingerprintMismatchError):
            generate_with_store(model, store, "a", ids, max_new_tokens=4)


def test_a_fingerprint_of_ones_own_remembers_the_first_model(tmp_path: Path) -> None:
    model = model_of("llama")
    own = replace(Fingerprint.from_model(model), weights_hash="mine", mark=None)
    with _open(tmp_path, own) as store:
        generate_with_store(model, store, "a", _IDS, max_new_tokens=2)
    with _open(tmp_path, own) as store, pytest.raises(FingerprintMismatchError):
        generate_with_store(_fine_tuned(model), store, "a", _IDS, max_new_tokens=2)
    with pytest.raises(FingerprintMismatchError, match=r"KVStore: .*weights"):
        _open(tmp_path, replace(own, mark="0" * 32))
    with _open(tmp_path, own, readonly=True) as reader:
        reader.check_model(model)
        with pytest.raises(FingerprintMismatchError):
            reader.check_model(_fine_tuned(model))


def test_stores_of_old_open_and_learn_the_mark(tmp_path: Path) -> None:
    model = model_of("llama")
    fingerprint = Fingerprint.from_model(model)
    # The fields that a store of the first format has, and no others: its name stays.
    assert set(json.loads(fingerprint.encoded())) == {
        "model_id", "weights_hash", "dtype", "num_layers", "num_kv_heads", "head_size", "rope",
        "window", "layout", "tensor_parallel_rank", "tokenizer_hash",
    }  # fmt: skip
    assert Fingerprint.decoded(fingerprint.encoded()) == fingerprint
    with _open(tmp_path, fingerprint) as store:
        generate_with_store(model, store, "a", _IDS, max_new_tokens=2)
    (tmp_path / fingerprint.name / "model.json").unlink()
    with _open(tmp_path, fingerprint) as store:
        assert store.session("a").tokens
    known = json.loads((tmp_path / fingerprint.name / "model.json").read_bytes())
    assert known["mark"] == weights_mark(model)
    with _open(tmp_path, fingerprint) as store:
        store.backup(tmp_path / "copy")
    copied = tmp_path / "copy" / fingerprint.name / "model.json"
    assert json.loads(copied.read_bytes()) == known


def test_every_weight_is_looked_at() -> None:
    model = copy.deepcopy(model_of("llama"))
    mark = weights_mark(model)
    assert weights_mark(copy.deepcopy(model)) == mark
    for parameter in model.parameters():
        with torch.no_grad():
            parameter += 1
        assert weights_mark(model) != mark
        with torch.no_grad():
            parameter -= 1
    # The same numbers in other strides.
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weights_mark(model)
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous() and weights_mark(model) == before


def test_adapters_are_the_contexts_matter() -> None:
    class Adapted(nn.Module):
        adapter_layer_names = ("lora_A",)

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 4)})

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mark = weights_mark(model)
    model[0] = Adapted(model[0])
    assert weights_mark(model) == mark


def test_ls_and_why_name_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(
        Fingerprint.from_model(model_of("llama")), model_name="people/llama", revision="r1"
    )
    other = replace(one, tokenizer_hash="t")
    for fingerprint in (one, other):
        _open(tmp_path, fingerprint).close()
    assert main(["ls", str(tmp_path)]) == 0
    assert "people/llama at r1" in capsys.readouterr().out
    assert main(["why", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "differ in" in out and "tokenizer_hash" in out and "weights_hash" not in out


def test_why_tells_a_model_with_and_without_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from store_models import SHIPPED
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    _open(tmp_path, Fingerprint.from_model(model)).close()
    assert why_of_a_model([str(tmp_path), str(SHIPPED)]) == 0
    out = capsys.readouterr().out
    assert "without its tokenizer\n" in out and "with its tokenizer, nothing stored" in out
    assert "tokenizer_hash" in out
