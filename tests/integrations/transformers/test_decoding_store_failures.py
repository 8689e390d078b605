"""What belongs to others never hits, what a call cannot do is refused, a store never fails one."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("lmdecode.store")

from stored_decoding import (
    GEMMA,
    LFM,
    LLAMA,
    MISTRAL,
    MODELS,
    PROMPT,
    QWEN,
    TURNS,
    answer,
    decoding_of,
    same,
    store_of,
)

from lmdecode import Decoding, causal_fingerprint
from lmdecode.integrations.transformers.decoding import causal_store
from lmdecode.store import Fingerprint, FingerprintMismatchError, KVStore, StoreError
from tests.support.causal_models import PAD, model_of, random_config, random_model
from tests.support.store_faults import replaced_call
from tests.support.tiny_models import build_model

# --- what belongs to others -----------------------------------------------------------------------


def _llama(**changes: Any) -> Any:
    return model_of(random_config(*LLAMA, **changes))


def _revised() -> Any:
    model = _llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-4
    return model


OTHERS: dict[str, Callable[[], Decoding]] = {
    "weights": lambda: Decoding.from_pretrained(_revised()),
    "epsilon": lambda: Decoding.from_pretrained(_llama(rms_norm_eps=0.03)),
    "rotary": lambda: Decoding.from_pretrained(
        _llama(rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    ),
    "int8": lambda: Decoding.from_pretrained(_llama(), "int8"),
    "bfloat16": lambda: Decoding.from_pretrained(_llama(), "bfloat16"),
    "cache": lambda: Decoding.from_pretrained(_llama(), cache_dtype="bfloat16"),
    "cache of int8": lambda: Decoding.from_pretrained(_llama(), cache_dtype="int8"),
    "window": lambda: decoding_of(MISTRAL),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_never_hits(name: str, tmp_path: Path) -> None:
    one, other = Decoding.from_pretrained(_llama()), OTHERS[name]()
    expected = answer(other, PROMPT)
    for decoding in (one, other):
        with store_of(decoding, tmp_path) as store:
            answer(decoding, PROMPT, store=store, session="chat")
            assert store.stats()["hits"] == 0
    assert len(list(tmp_path.iterdir())) == 2
    with (
        store_of(one, tmp_path) as store,
        pytest.raises(FingerprintMismatchError, match="the store has another fingerprint"),
    ):
        answer(other, PROMPT, store=store, session="chat")
    with store_of(other, tmp_path) as store:
        assert same(answer(other, PROMPT, store=store), expected)


@pytest.mark.parametrize(("case", "name"), [(LFM, "conv.conv"), (QWEN, "A_log")], ids=str)
def test_other_states_never_hit(case: tuple[str, str], name: str, tmp_path: Path) -> None:
    """A weight on which the states alone depend."""
    model = model_of(random_config(*case))
    one = Decoding.from_pretrained(model)
    with torch.no_grad():
        weight = next(w for key, w in model.named_parameters() if name in key)
        weight.view(-1)[0] += 1e-3
    other = Decoding.from_pretrained(model)
    expected = answer(other, PROMPT)
    with store_of(one, tmp_path) as store:
        answer(one, PROMPT, store=store)
        with pytest.raises(FingerprintMismatchError, match="the store has another fingerprint"):
            answer(other, PROMPT, store=store)
    with store_of(other, tmp_path) as store:
        assert same(answer(other, PROMPT, store=store), expected)
        assert store.stats()["hits"] == 0


def test_another_capability_never_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = decoding_of(LLAMA)
    with store_of(decoding, tmp_path) as store:
        monkeypatch.setattr(causal_fingerprint, "cpu_capability", lambda: "another")
        with pytest.raises(FingerprintMismatchError):
            answer(decoding, PROMPT, store=store)


def test_caches_of_transformers_never_hit(tmp_path: Path) -> None:
    model = random_model(*LLAMA)
    theirs = Fingerprint.from_model(model)
    with (
        KVStore(tmp_path, fingerprint=theirs, capacity_bytes=1 << 24) as store,
        pytest.raises(FingerprintMismatchError),
    ):
        answer(Decoding.from_pretrained(model), PROMPT, store=store)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_the_same_model_has_the_same_fingerprint(case: tuple[str, str], tmp_path: Path) -> None:
    for dtype in ("float32", "int8"):
        one = decoding_of(case, dtype)
        assert decoding_of(case, dtype).fingerprint() == one.fingerprint()
        one.save(tmp_path / dtype)
        assert Decoding.load(tmp_path / dtype).fingerprint() == one.fingerprint()


def test_the_tokenizer_is_no_matter_of_bits(tmp_path: Path) -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 1}

    decoding = decoding_of(LLAMA)
    fingerprint = decoding.fingerprint(Tokenizer())
    assert fingerprint != decoding.fingerprint() and fingerprint.tokenizer_hash is not None
    with KVStore(tmp_path, fingerprint=fingerprint, capacity_bytes=1 << 24) as store:
        answer(decoding, PROMPT, store=store)
        answer(decoding, PROMPT, store=store)
        assert store.stats()["hits"] == 1


# --- what a call with a store does not do ---------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (PROMPT.repeat(2, 1), {}, r"input_ids has shape \[2, 37\]; expected \[1, n\]"),
        (PROMPT[:, :0], {}, r"input_ids has shape \[1, 0\]; expected \[1, n\]"),
        (PROMPT, {"attention_mask": torch.cat([torch.zeros(1, 1), torch.ones(1, 36)], 1)},
         "attention_mask has zeros"),
        (torch.full((1, 3), PAD), {}, "the tokens have the padding token 0.*attention_mask=torch"),
        (PROMPT, {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
        (PROMPT, {"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens is given"),
        (PROMPT, {"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds is given"),
        (PROMPT, {"use_cache": False}, "use_cache is False"),
    ],
)  # fmt: skip
def test_refused(ids: torch.Tensor, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    decoding = decoding_of(LLAMA)
    with store_of(decoding, tmp_path) as store:
        with pytest.raises(ValueError, match=f"Decoding.generate: {message}"):
            decoding.generate(ids, store=store, session="chat", **options)
        assert store.sessions() == [] and store.stats()["misses"] == 0


def test_refused_stores_and_sessions(tmp_path: Path) -> None:
    decoding = decoding_of(LLAMA)
    with pytest.raises(TypeError, match="store is str; expected a KVStore"):
        decoding.generate(PROMPT, store="folder")
    with pytest.raises(TypeError, match="store is NoneType; expected a KVStore, which a session"):
        decoding.generate(PROMPT, session="chat")
    with store_of(decoding, tmp_path) as store:
        with pytest.raises(TypeError, match="session is of type int; expected str or None"):
            decoding.generate(PROMPT, store=store, session=5)  # type: ignore[arg-type]
        other = Decoding.from_pretrained(build_model("marian", 61, torch.float32))
        with pytest.raises(ValueError, match="store is given; expected None for an encoder-dec"):
            other.generate(PROMPT, store=store)
    with pytest.raises(ValueError, match="encoder-decoder model has no fingerprint"):
        other.fingerprint()


def test_where_it_stands_in_for_the_model_s_own(tmp_path: Path) -> None:
    decoding = Decoding.from_pretrained(_llama())
    expected = answer(decoding, PROMPT)[0]
    decoding.model.generate = decoding.generate
    length = {"max_new_tokens": 9, "min_new_tokens": 9}
    with store_of(decoding, tmp_path) as store:
        for _ in range(2):
            found = decoding.model.generate(
                input_ids=PROMPT, store=store, session="a", rewind=True, **length
            )
            assert found.equal(expected)
        assert store.stats()["hits"] == 1


# --- what a store cannot do -----------------------------------------------------------------------


@pytest.fixture(params=[GEMMA, QWEN], ids=str)
def talk(
    request: pytest.FixtureRequest,
) -> tuple[Decoding, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A model, a second turn of a conversation, and its answer."""
    decoding = decoding_of(request.param)
    ids = torch.cat([answer(decoding, PROMPT)[0], TURNS[0]], dim=1)
    return decoding, ids, answer(decoding, ids)


def test_a_store_that_is_only_read(talk: Any, tmp_path: Path) -> None:
    decoding, ids, expected = talk
    with store_of(decoding, tmp_path) as store:
        answer(decoding, PROMPT, store=store, session="chat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with store_of(decoding, tmp_path, readonly=True) as store:
            assert same(answer(decoding, ids, store=store, session="chat"), expected)
            assert same(answer(decoding, ids, store=store), expected)
            assert store.stats()["hits"] == 2
    with store_of(decoding, tmp_path) as store:
        assert len(store.session("chat")) == 46


@pytest.mark.parametrize("session", ["chat", None])
def test_a_store_that_was_closed(session: str | None, talk: Any, tmp_path: Path) -> None:
    decoding, ids, expected = talk
    with store_of(decoding, tmp_path) as store:
        store.close()
        with pytest.warns(RuntimeWarning, match="Decoding.generate goes on without the store") as w:
            assert same(answer(decoding, ids, store=store, session=session), expected)
    assert len(w) == 1


def test_damaged_slots(talk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that is lost while it is read leaves nothing in what is stored anew."""
    monkeypatch.setattr(causal_store, "_COMMIT_PROMPT", 3)  # fewer tokens than a window
    decoding, ids, expected = talk
    with store_of(decoding, tmp_path) as store:
        answer(decoding, PROMPT, store=store, session="chat")
        slot_bytes = store.slot_bytes
    (slab,) = tmp_path.rglob("slab-*")
    content = bytearray(slab.read_bytes())
    for slot in range(0, len(content), slot_bytes):
        content[slot + 64] ^= 1
    slab.write_bytes(content)
    with store_of(decoding, tmp_path) as store:
        assert same(answer(decoding, ids, store=store, session="chat"), expected)
        assert store.stats()["damaged"] > 0
    for length in (4, 7, 10, 51):
        prompt = torch.cat([ids[:, :length], TURNS[1]], dim=1)
        with store_of(decoding, tmp_path) as store:
            assert same(answer(decoding, prompt, store=store), answer(decoding, prompt))
            assert store.stats()["hits"] == 1 and store.stats()["damaged"] == 0


def test_no_room(talk: Any, tmp_path: Path) -> None:
    decoding, ids, expected = talk
    with store_of(decoding, tmp_path / "probe") as store:
        one_slot = store.slot_bytes
    with store_of(decoding, tmp_path / "store", capacity_bytes=one_slot) as store:
        for _ in range(2):
            assert same(answer(decoding, ids, store=store, session="chat", rewind=True), expected)
        assert store.session("chat").tokens == expected[0][0].tolist()
        assert len(store.entries()) <= 1


@pytest.mark.parametrize("call", ["lookup", "load", "commit_session", "put", "read_session"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "no space"), StoreError("closed")],
    ids=["disk", "store"],
)
def test_calls_that_fail(call: str, error: Exception, talk: Any, tmp_path: Path) -> None:
    decoding, ids, expected = talk
    session = None if call == "put" else "chat"
    with store_of(decoding, tmp_path) as store:
        answer(decoding, PROMPT, store=store, session=session)
    with store_of(decoding, tmp_path) as store:
        message = f"goes on without the store: .*{error.args[-1]}"
        with (
            replaced_call(store, call, Mock(side_effect=error)),
            pytest.warns(RuntimeWarning, match=message),
        ):
            assert same(answer(decoding, ids, store=store, session=session), expected)
