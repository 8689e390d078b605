"""Decoding.generate(store=, session=): nothing is computed twice, and what may go wrong."""

from __future__ import annotations

import errno
import itertools
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
    WITH_STATES,
    answer,
    decoding_of,
    same,
    store_of,
)

from lmdecode import Decoding, causal_fingerprint
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.integrations.transformers.decoding import causal_store
from lmdecode.store import Fingerprint, FingerprintMismatchError, KVStore, StoreError
from tests.support.causal_models import (
    PAD,
    model_of,
    random_config,
    random_model,
    random_tokens,
)
from tests.support.store_faults import Progress, kill_behind, replaced_call
from tests.support.tiny_models import build_model


@pytest.fixture
def prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each forward pass over a prompt: how many of its tokens were read."""
    seen: list[int] = []
    forward = CausalCaches.forward

    def counted(
        self: Any, tokens: Any, entries: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        seen.extend(entries[entries[:, 2] == 1, 1].tolist())
        return forward(self, tokens, entries, *others, **named)

    monkeypatch.setattr(CausalCaches, "forward", counted)
    return seen


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("float32", "float32"), ("int8", "bfloat16"), ("int4", "int8")]
)
def test_turns_of_a_conversation(
    case: tuple[str, str], dtype: str, cache_dtype: str, tmp_path: Path, prompt_tokens: list[int]
) -> None:
    """Each turn by a store that was opened again: what it has came from the disk."""
    decoding = decoding_of(case, dtype, cache_dtype=cache_dtype)
    has_checkpoints = decoding.fingerprint().has_checkpoints
    ids, stored = PROMPT, 0
    for turn in [*TURNS, None]:
        expected = answer(decoding, ids)
        del prompt_tokens[:]
        with store_of(decoding, tmp_path) as store:
            assert same(answer(decoding, ids, store=store, session="chat"), expected)
            assert store.session("chat").tokens == expected[0][0].tolist()
            assert store.stats()["hits"] == (stored > 0) and store.failure == ""
        length = ids.shape[1]
        assert sum(prompt_tokens) == length - stored
        # With windows or states, a prompt is found again where its last token begins.
        stored = length - 1 if has_checkpoints else length
        if turn is not None:
            ids = torch.cat([expected[0], turn], dim=1)


@pytest.mark.parametrize("case", [LLAMA, GEMMA, *WITH_STATES], ids=str)
def test_a_prompt_once_more(
    case: tuple[str, str], tmp_path: Path, prompt_tokens: list[int]
) -> None:
    """Whoever asks finds all but the token whose logits are wanted; sampled, and with beams."""
    decoding = decoding_of(case)
    ways: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 3, "top_p": 0.9},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {},
    ]
    with store_of(decoding, tmp_path) as store:
        answer(decoding, PROMPT, store=store)
        assert store.sessions() == []
        for i, way in enumerate(ways):
            expected = answer(decoding, PROMPT, **way)
            del prompt_tokens[:]
            session = None if i == 0 else f"session {i}"
            assert same(answer(decoding, PROMPT, store=store, session=session, **way), expected)
            assert prompt_tokens == [1]
            if session is not None:
                assert store.session(session).tokens == expected[0][0].tolist()
        assert len(store.sessions()) == len(ways) - 1


def test_a_prompt_that_others_begin_with(tmp_path: Path, prompt_tokens: list[int]) -> None:
    decoding = decoding_of(LLAMA)
    other = torch.cat([PROMPT[:, :30], TURNS[2]], dim=1)
    expected, short = answer(decoding, other), answer(decoding, PROMPT[:, :1])
    with store_of(decoding, tmp_path) as store:
        answer(decoding, PROMPT, store=store)
        del prompt_tokens[:]
        assert same(answer(decoding, other, store=store), expected)
        assert prompt_tokens == [40]
        assert same(answer(decoding, PROMPT[:, :1], store=store, session="a"), short)
        # A session that goes on otherwise: back to what both have in common.
        with pytest.raises(ValueError, match="append=True, or rewind=True"):
            answer(decoding, other, store=store, session="a")
        assert same(answer(decoding, other, store=store, session="a", rewind=True), expected)
        assert store.session("a").tokens == expected[0][0].tolist()


@pytest.mark.parametrize("case", [LLAMA, MISTRAL, GEMMA, *WITH_STATES], ids=str)
@pytest.mark.parametrize("size", [4, 16])
def test_long_prompts_are_stored_while_they_are_read(
    case: tuple[str, str], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    prompt_tokens: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr(causal_store, "_COMMIT_PROMPT", size)
    decoding = decoding_of(case)
    expected = answer(decoding, PROMPT)
    forward = CausalCaches.forward

    def stopped(
        self: Any, tokens: Any, entries: torch.Tensor, num_logits: int, **options: Any
    ) -> torch.Tensor:
        if num_logits > 0:
            raise KeyboardInterrupt
        return forward(self, tokens, entries, num_logits)

    with store_of(decoding, tmp_path) as store:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(CausalCaches, "forward", stopped)
            answer(decoding, PROMPT, store=store, session="chat")
        assert store.session("chat").tokens == PROMPT[0].tolist()
    with store_of(decoding, tmp_path) as store:
        for _ in range(2):
            del prompt_tokens[:]
            found = answer(decoding, PROMPT, store=store, session="chat", rewind=True)
            assert same(found, expected)
            assert sum(prompt_tokens) <= size
        assert prompt_tokens == [1]


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_beginning_is_found_at_a_checkpoint(
    case: tuple[str, str], tmp_path: Path, prompt_tokens: list[int]
) -> None:
    """The longest one whose state was stored, and not damaged since."""
    decoding = decoding_of(case)
    prompt = random_tokens(600, 5)[None]
    other = torch.cat([prompt[:, :550], TURNS[2]], dim=1)
    expected, once_more = answer(decoding, other), answer(decoding, prompt)
    with store_of(decoding, tmp_path) as store:
        answer(decoding, prompt, store=store)
        del prompt_tokens[:]
        assert same(answer(decoding, other, store=store), expected)
        assert sum(prompt_tokens) == 590 - 512
        places = {entry["num_tokens"]: entry for entry in store.entries()}
        slot_bytes, state_bytes = store.slot_bytes, store.fingerprint.state_bytes
    (slab,) = tmp_path.rglob("slab-*")
    for length, found in ((599, 512), (512, 256), (256, 0)):
        entry = places[length]
        # The state is the last plane.
        at = entry["area"] * slot_bytes + entry["bytes"] - state_bytes // 64 * 64
        with slab.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        del prompt_tokens[:]
        with store_of(decoding, tmp_path, readonly=True) as store:
            assert same(answer(decoding, prompt, store=store), once_more)
            assert store.stats()["damaged"] >= 1
        assert sum(prompt_tokens) == 600 - found


def test_checkpoints_are_the_ends_of_slots(tmp_path: Path) -> None:
    decoding, prompt = decoding_of(QWEN), random_tokens(700, 5)
    for chunk, found in ((100, [0, 300, 600, 699]), (512, [0, 0, 512, 699])):
        with store_of(decoding, tmp_path / str(chunk), chunk_tokens=chunk) as store:
            answer(decoding, prompt[None], store=store)
            lengths = (299, 300, 650, 700)
            assert [store.lookup(prompt[:n]).num_tokens for n in lengths] == found


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_drafts_and_batches_beside(case: tuple[str, str], tmp_path: Path) -> None:
    """Calls without the store between those with it, of the same model."""
    decoding = decoding_of(case)
    prompt = torch.cat([PROMPT, PROMPT, PROMPT[:, :5]], dim=1)
    ways: list[dict[str, Any]] = [
        {"prompt_lookup_num_tokens": 4}, {"num_beams": 3}, {"do_sample": True, "seed": 1}
    ]  # fmt: skip
    alone = [answer(decoding, prompt, **way) for way in ways]
    ids, expected = prompt, answer(decoding, prompt)
    with store_of(decoding, tmp_path) as store:
        for way, want in zip(ways, alone, strict=True):
            assert same(answer(decoding, ids, store=store, session="chat"), expected)
            assert same(answer(decoding, prompt, **way), want)
            ids = torch.cat([expected[0], TURNS[0]], dim=1)
            expected = answer(decoding, ids)
        assert store.stats()["hits"] == 2


# --- processes that end ---------------------------------------------------------------------------

_CHILD = """
import torch
from stored_decoding import answer, decoding_of, store_of
from tests.support.store_faults import Progress
from pathlib import Path
decoding = decoding_of({case!r}, {dtype!r}, cache_dtype={cache_dtype!r})
with store_of(decoding, Path({store!r})) as store:
    ids = torch.tensor([{ids!r}])
    answer(decoding, ids, store=store, session="chat", max_new_tokens=60, min_new_tokens=60,
           streamer=Progress())
"""


@pytest.mark.parametrize(
    ("case", "dtype", "cache_dtype"),
    [
        (LLAMA, "int8", "int8"),
        (GEMMA, "float32", "bfloat16"),
        (LFM, "int8", "int8"),
        (QWEN, "float32", "float32"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_killed_while_it_answers(
    case: tuple[str, str], dtype: str, cache_dtype: str, tmp_path: Path, prompt_tokens: list[int]
) -> None:
    decoding = decoding_of(case, dtype, cache_dtype=cache_dtype)
    length = {"max_new_tokens": 60, "min_new_tokens": 60}
    whole = answer(decoding, PROMPT, **length)
    code = _CHILD.format(
        case=case, dtype=dtype, cache_dtype=cache_dtype,
        store=str(tmp_path), ids=PROMPT[0].tolist(),
    )  # fmt: skip
    kill_behind(45, code, Path(__file__).parent)

    with store_of(decoding, tmp_path) as store:
        said = store.session("chat").tokens
        assert said == whole[0][0, : len(said)].tolist()
        assert len(said) >= 37  # the prompt was stored before the first token of the answer
        ids = torch.tensor([said])
        expected = answer(decoding, ids)
        del prompt_tokens[:]
        assert same(answer(decoding, ids, store=store, session="chat"), expected)
        assert store.stats()["hits"] == 1 and sum(prompt_tokens) <= 1 + len(said) - 36
        assert same(answer(decoding, PROMPT, store=store, session="other", **length), whole)
        assert store.verify().damage == ()


class Stops:
    """Fails with the ``count``-th token of the answer."""

    def __init__(self, count: int) -> None:
        self.left = count + 1  # the prompt too

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


def test_an_answer_that_was_interrupted(tmp_path: Path) -> None:
    decoding = decoding_of(LLAMA)
    tokens = answer(decoding, PROMPT)[0][0].tolist()
    with store_of(decoding, tmp_path) as store:
        with pytest.raises(KeyboardInterrupt):
            answer(decoding, PROMPT, store=store, session="chat", streamer=Stops(5))
        assert store.session("chat").tokens == tokens[: 37 + 4]
    with store_of(decoding, tmp_path) as store:
        assert store.session("chat").tokens == tokens[: 37 + 4]


@pytest.mark.parametrize("case", [LLAMA, GEMMA, QWEN], ids=str)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_long_answer_is_kept_by_and_by(
    case: tuple[str, str], is_known: bool, tmp_path: Path
) -> None:
    """Behind the prompt, which belongs to the session even where all of it was found."""
    decoding = decoding_of(case)
    written: list[int] = []
    with store_of(decoding, tmp_path) as store:
        if is_known:
            answer(decoding, PROMPT, store=store)
        commit = store._handle.native.commit_session

        def watched(*arguments: Any) -> Any:
            written.append(len(arguments[2]))
            return commit(*arguments)

        length = {"max_new_tokens": 100, "min_new_tokens": 100}
        with replaced_call(store, "commit_session", watched):
            answer(decoding, PROMPT, store=store, session="chat", streamer=Progress(), **length)
    assert written[0] == 37 and written[-1] == 137
    between = written[1:-1]  # as many as the disk takes
    assert 1 <= len(between) <= 4
    assert all(30 < after - before for before, after in itertools.pairwise([37, *between]))


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
