"""What belongs to others never hits, and what a store cannot do never changes a text."""

import errno
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("lmdecode.store")

import transformers
from store_models import CHUNK, SHIPPED, answer, converse, fingerprint_of, ids, model_of, store_of

from lmdecode.store import Fingerprint, KVStore, StoreError, StoreLockedError
from tests.support.store_faults import replaced_call

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


def _llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**model_of("llama").config.to_dict(), **changes})
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config).eval()


def _mistral(**changes: Any) -> Any:
    config = transformers.MistralConfig(**{**model_of("mistral").config.to_dict(), **changes})
    torch.manual_seed(3)
    return transformers.MistralForCausalLM(config).eval()


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
