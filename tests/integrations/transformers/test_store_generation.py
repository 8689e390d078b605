"""``generate_with_store``: the same text and logits, whatever was stored, lost or shared."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmdecode.store")

import transformers
from store_models import (
    ANSWER,
    DECODERS,
    ENCODER_DECODERS,
    SHIPPED,
    answer,
    converse,
    ids,
    model_of,
    store_of,
)
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
)

from lmdecode.integrations.transformers import (
    DynamicRingCache,
    StaticRingCache,
    beam_search,
    encoder_context,
    generate_with_store,
    prefill,
    sample,
)
from lmdecode.integrations.transformers.generate_call import CACHE
from tests.support.releases import BEFORE_5_18
from tests.support.store_faults import kill_behind
from tests.support.tiny_models import PAD

TURNS = (ids(37), ids(5, seed=1), ids(21, seed=2))
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "dynamic ring": DynamicRingCache,
    "static ring": lambda config: StaticRingCache(config, 120),
    "static": lambda config: StaticCache(config, 120),
}


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def plain(model: Any, tokens: torch.Tensor, **options: Any) -> list[int]:
    """What ``generate()`` says."""
    mask = {} if model.config.is_encoder_decoder else {"attention_mask": torch.ones_like(tokens)}
    return model.generate(tokens, **mask, **{**ANSWER, **options})[0].tolist()


def lookups(store: Any) -> int:
    stats = store.stats()
    return stats["hits"] + stats["misses"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DECODERS)
def test_a_resumed_conversation_has_the_logits_of_an_uninterrupted_one(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = model_of(name, dtype)
    with store_of(model, tmp_path / "one") as store:
        tokens, logits = converse(model, store, "chat", TURNS)
        assert lookups(store) == 1  # of the first turn: the others continue it
    again: list[int] = []
    others: list[torch.Tensor] = []
    for number, turn in enumerate(TURNS):
        with store_of(model, tmp_path / "two") as store:
            again, some = converse(model, store, "chat", [turn], again)
            assert store.stats()["hits"] == (number > 0)
        others += some
    assert again == tokens
    assert equal(logits, others)
    if dtype == torch.float32:
        first = TURNS[0].shape[1] + ANSWER["max_new_tokens"]
        assert tokens[:first] == plain(model, TURNS[0])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_every_kind_of_cache_is_resumed(name: str, kind: str, tmp_path: Path) -> None:
    model = model_of(name)
    cache = CACHES[kind](model.config)
    with store_of(model, tmp_path / "one") as store:
        tokens, logits = converse(model, store, "chat", TURNS, past_key_values=cache)
        assert lookups(store) == 1
    again: list[int] = []
    others: list[torch.Tensor] = []
    for turn in TURNS:
        with store_of(model, tmp_path / "two") as store:
            cache = CACHES[kind](model.config)
            again, some = converse(model, store, "chat", [turn], again, past_key_values=cache)
            others += some
            assert int(cache.get_seq_length()) == len(again) - 1
    assert again == tokens
    assert equal(logits, others)


def test_a_shared_beginning_changes_no_bit(tmp_path: Path) -> None:
    model = model_of("llama")
    system = ids(29, seed=7)
    prompts = [torch.cat([system, ids(14, seed=seed)], dim=1) for seed in (8, 9)]
    with store_of(model, tmp_path / "alone") as store:
        expected = answer(model, store, "a", prompts[1])
    with store_of(model, tmp_path / "shared") as store:
        answer(model, store, "a", prompts[0])
        before = store.stats()["bytes_read"]
        tokens, logits = answer(model, store, "b", prompts[1])
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])
        # Found 29 tokens, used the chunks that are whole: 24 of them.
        read = store.stats()["bytes_read"] - before
        per_token = 2 * model.config.num_hidden_layers * 2 * 8 * 4
        assert read == 24 * per_token
        # Asked again, all but the last token are found, and that one is computed as before.
        again, logits = answer(model, store, "c", prompts[1])
        assert again == tokens
        assert torch.equal(logits, expected[1])


def test_chunks_end_where_they_ended_before() -> None:
    model = model_of("llama")
    tokens = ids(30)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    ends: list[int] = []
    prefill(model, caches[0], tokens, chunk_size=8, on_chunk=ends.append)
    assert ends == [8, 16, 24, 30]
    prefill(model, caches[1], tokens[:, :13], chunk_size=1)
    ends.clear()
    prefill(model, caches[1], tokens, chunk_size=8, on_chunk=ends.append)
    assert ends == [16, 24, 30]
    assert [cache.get_seq_length() for cache in caches] == [30, 30]
    with pytest.raises(ValueError, match=r"prefill: chunk_size is 0; expected 1 or more"):
        prefill(model, caches[0], tokens, chunk_size=0)


def test_the_prompt_in_one_piece(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        tokens, _ = answer(model, store, "a", TURNS[0], prefill_chunk_size=None)
        assert tokens == plain(model, TURNS[0])
        other = torch.cat([TURNS[0][:, :21], ids(4, seed=3)], dim=1)
        assert answer(model, store, "b", other, prefill_chunk_size=None)[0] == plain(model, other)


def test_only_a_switch_queries(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        a, _ = converse(model, store, "a", TURNS[:1])
        b, _ = converse(model, store, "b", TURNS[1:2])
        before = store.stats()
        b, _ = converse(model, store, "b", TURNS[2:], b)  # goes on where the model is
        assert lookups(store) == before["hits"] + before["misses"]
        a, _ = converse(model, store, "a", TURNS[1:2], a)  # the model was at b
        assert store.stats()["hits"] == before["hits"] + 1
        assert store.session("a").tokens == a
        assert store.session("b").tokens == b


def test_interleaved_conversations_do_not_mix(tmp_path: Path) -> None:
    model = model_of("gemma2")
    alone = {}
    for name, seed in (("a", 3), ("b", 4)):
        turns = [ids(9, seed=seed), ids(6, seed=seed + 2), ids(3, seed=seed + 4)]
        with store_of(model, tmp_path / name) as store:
            alone[name] = (turns, *converse(model, store, name, turns))
    said: dict[str, list[int]] = {"a": [], "b": []}
    with store_of(model, tmp_path / "both") as store:
        for turn, name in itertools.product(range(3), "ab"):
            turns, _, logits = alone[name]
            said[name], some = converse(model, store, name, turns[turn : turn + 1], said[name])
            assert torch.equal(some[0], logits[turn])
    assert {name: alone[name][1] for name in alone} == said


def test_another_model_does_not_get_the_cache_that_was_left(tmp_path: Path) -> None:
    model = model_of("llama")
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    with store_of(model, tmp_path) as store:
        tokens, _ = converse(model, store, "a", TURNS[:1])
        before = store.stats()["hits"]
        converse(twin, store, "a", TURNS[1:2], tokens)
        assert store.stats()["hits"] == before + 1


def test_threads_have_sessions_of_their_own(tmp_path: Path) -> None:
    model = model_of("llama")
    prompts = {f"session {seed}": ids(20 + seed, seed=seed) for seed in range(4)}
    expected = {name: plain(model, prompt) for name, prompt in prompts.items()}

    def talk(name: str) -> list[int]:
        said, _ = answer(model, store, name, prompts[name])
        return converse(model, store, name, [ids(3)], said)[0][: len(said)]

    with store_of(model, tmp_path) as store, ThreadPoolExecutor(4) as threads:
        for name, said in zip(prompts, threads.map(talk, prompts), strict=True):
            assert said == expected[name]
            assert store.session(name).tokens[: len(said)] == said


def test_a_session_that_two_calls_use_at_once(tmp_path: Path) -> None:
    model = model_of("llama")
    one, other = ids(37), ids(37, seed=1)

    class Meanwhile(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == 41:
                answer(model, store, "a", other, rewind=True)
            return torch.zeros(1, dtype=torch.bool)

    with store_of(model, tmp_path) as store:
        expected = plain(model, one)
        tokens, _ = answer(model, store, "a", one, stopping_criteria=[Meanwhile()])
        assert tokens == expected == store.session("a").tokens
        # Keys and values are stored for the tokens that they are of.
        for prompt in (one, other):
            assert answer(model, store, "b", prompt, rewind=True)[0] == plain(model, prompt)
        assert store.stats()["hits"] > 0


def test_the_cache_that_is_left_is_let_go(tmp_path: Path) -> None:
    model = model_of("llama")

    def talk(store: Any, name: str) -> weakref.ref[Any]:
        cache = DynamicCache(config=model.config)
        answer(model, store, name, TURNS[0], past_key_values=cache, rewind=True)
        return weakref.ref(cache)

    with store_of(model, tmp_path) as store:
        kept = store.session("a")
        first, second = talk(store, "a"), talk(store, "b")
        gc.collect()
        assert first() is None and second() is not None
        third = talk(store, "a")
        assert third() is not None
    del kept
    gc.collect()
    assert second() is None and third() is None


def test_fork_and_rewind(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        said, _ = converse(model, store, "a", TURNS[:1])
        store.session("a").fork("b")
        b, _ = converse(model, store, "b", TURNS[1:2], said)
        assert store.stats()["hits"] == 1
        a, _ = converse(model, store, "a", TURNS[2:], said)
        assert store.session("b").tokens == b and store.session("a").tokens == a
        assert b == plain(model, torch.tensor([[*said, *TURNS[1][0].tolist()]]))
        # Another answer to an earlier question.
        session = store.session("a")
        session.rewind(20)
        again, _ = converse(model, store, "a", [ids(4, seed=5)], said[:20])
        assert session.tokens == again
        # Asked otherwise: the session follows where it is told to.
        edited = torch.tensor([[*said[:10], *ids(12, seed=6)[0].tolist()]])
        with pytest.raises(ValueError, match=r"first 10 of the 33 tokens of session 'a'"):
            answer(model, store, "a", edited)
        assert session.tokens == again
        tokens, _ = answer(model, store, "a", edited, rewind=True)
        assert tokens == plain(model, edited)
        assert session.tokens == tokens


def test_samples_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    model = model_of("llama")
    options = {"do_sample": True, "top_k": 20, "seed": 11, "custom_generate": sample}
    with store_of(model, tmp_path / "one") as store:
        tokens, logits = answer(model, store, "a", TURNS[0], **options)
    for count in (1, 4, 8):
        with store_of(model, tmp_path / str(count)) as store:
            rest = ANSWER["max_new_tokens"] - count
            first = {"max_new_tokens": count, "min_new_tokens": count}
            some, _ = answer(model, store, "a", TURNS[0], **options, **first)
        with store_of(model, tmp_path / str(count)) as store:
            assert store.session("a").tokens == some
            last = {"max_new_tokens": rest, "min_new_tokens": rest}
            again, others = answer(model, store, "a", torch.tensor([some]), **options, **last)
            assert again == tokens
            assert torch.equal(others, logits[count:])


class _InterruptAfter(LogitsProcessor):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_an_exception_loses_nothing_that_was_said(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    expected = plain(model, TURNS[0])
    with store_of(model, tmp_path) as store:
        with pytest.raises(KeyboardInterrupt):
            answer(model, store, "a", TURNS[0], commit_every=None,
                   logits_processor=[_InterruptAfter(42)])  # fmt: skip
        tokens = store.session("a").tokens
        assert tokens == expected[:42]
    with store_of(model, tmp_path) as store:
        rest = {"max_new_tokens": 4, "min_new_tokens": 4}
        assert answer(model, store, "a", torch.tensor([tokens]), **rest)[0] == expected
        assert store.stats()["hits"] == 1


@pytest.mark.parametrize("loop", [None, beam_search])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", *ENCODER_DECODERS])
def test_beams(name: str, loop: Any, tmp_path: Path) -> None:
    model = model_of(name)
    options = {**ANSWER, "num_beams": 3, "num_return_sequences": 2, "custom_generate": loop}
    prompt = TURNS[0][:, :19]
    mask = None if model.config.is_encoder_decoder else torch.ones_like(prompt)
    expected = model.generate(prompt, attention_mask=mask, **options)
    context = encoder_context(prompt) if model.config.is_encoder_decoder else b""
    for turn in range(2):
        with store_of(model, tmp_path) as store:
            got = generate_with_store(
                model, store, "a", prompt, prefill_chunk_size=8, rewind=turn > 0, **options
            )
            assert torch.equal(got, expected)
            session = store.session("a", context=context)
            assert session.tokens == expected[0].tolist()
            if model.config.is_encoder_decoder:
                continue
            if turn == 0:  # of the answer, the tokens alone
                assert session.resume()[0] == prompt.shape[1] - 1
            longer = torch.cat([expected[:1], ids(3)], dim=1)
            assert answer(model, store, "a", longer)[0] == plain(model, longer)
            session.rewind(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_decoder_model_is_resumed(
    name: str, dtype: torch.dtype, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = model_of(name, dtype)
    source, start = ids(23), model.generation_config.decoder_start_token_id
    runs: list[int] = []
    encoder = model.get_encoder()
    hook = encoder.register_forward_hook(lambda *_: runs.append(1))
    request.addfinalizer(hook.remove)

    def turn(folder: str, said: list[int], more: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        given = torch.tensor([[*said, *more[0].tolist()]])
        with store_of(model, tmp_path / folder) as store:
            return answer(model, store, "a", source, decoder_input_ids=given)

    with store_of(model, tmp_path / "one") as store:
        tokens, logits = [start], []
        for number in (1, 2):
            given = torch.tensor([[*tokens, *TURNS[number][0].tolist()]])
            tokens, some = answer(model, store, "a", source, decoder_input_ids=given)
            logits.append(some)
        assert store.session("a", context=encoder_context(source)).tokens == tokens
    assert len(runs) == 1  # the second turn has the cross-attention in its cache
    first, some = turn("two", [start], TURNS[1])
    second, others = turn("two", first, TURNS[2])
    assert len(runs) == 2  # and here it was loaded
    assert second == tokens
    assert equal(logits, [some, others])
    if dtype == torch.float32:
        given = torch.cat([torch.tensor([[start]]), TURNS[1]], dim=1)
        assert first == plain(model, source, decoder_input_ids=given)
        # Without the start token, which is put in front.
        with store_of(model, tmp_path / "three") as store:
            assert answer(model, store, "a", source, decoder_input_ids=TURNS[1])[0] == first


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_another_input_of_the_encoder_never_hits(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    source = ids(23)
    other = source.clone()
    other[0, -1] += 1
    given = {"decoder_input_ids": TURNS[0]}
    mask = torch.ones_like(source)
    with store_of(model, tmp_path) as store:
        answer(model, store, "a", source, **given)
        hits = store.stats()["hits"]
        assert answer(model, store, "a", other, **given)[0] == plain(model, other, **given)
        half = mask.clone()
        half[0, :4] = 0
        masked = answer(model, store, "a", source, attention_mask=half, **given)[0]
        assert masked == plain(model, source, attention_mask=half, **given)
        assert store.stats()["hits"] == hits
        answer(model, store, "b", source, attention_mask=mask, **given)
        assert store.stats()["hits"] == hits + 2  # self-attention and cross-attention


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_mask_of_the_decoder_without_tokens(name: str, tmp_path: Path) -> None:
    """It is of the token that every answer begins with."""
    model, source = model_of(name), TURNS[0]
    with store_of(model, tmp_path) as store:
        ones = torch.ones(1, 1, dtype=torch.int64)
        tokens = answer(model, store, "a", source, decoder_attention_mask=ones)[0]
        assert tokens == plain(model, source)
        with pytest.raises(ValueError, match=r"decoder_attention_mask has zeros or another shape"):
            answer(model, store, "b", source, decoder_attention_mask=0 * ones)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)},
         r"input_ids has shape \[2, 3\]; expected \[1, n\]"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, r"input_ids has shape \[1, 0\]"),
        ({"attention_mask": torch.tensor([[0, *[1] * 36]])}, "attention_mask has zeros"),
        ({"input_ids": torch.tensor([[0, 4, 5]])}, "the padding token 0; expected none"),
        ({"inputs_embeds": torch.zeros(1, 37, 32)}, "inputs_embeds is given"),
        ({"position_ids": torch.arange(37)[None]}, "position_ids is given"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2; expected 1"),
        ({"use_cache": False}, "use_cache is False"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is given"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0; expected 1 or more, or None"),
        ({"commit_every": 0}, "commit_every is 0; expected 1 or more, or None"),
    ],
)  # fmt: skip
def test_what_a_session_cannot_do(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        given = {"input_ids": TURNS[0], **ANSWER, **options}
        with pytest.raises(ValueError, match=message):
            generate_with_store(model, store, "a", **given)


def test_wrong_stores_and_caches(tmp_path: Path) -> None:
    llama, mistral = model_of("llama"), model_of("mistral")
    with store_of(mistral, tmp_path / "mistral") as store:
        with pytest.raises(ValueError, match=r"windows of the store's fingerprint is \(5, 5\)"):
            generate_with_store(llama, store, "a", TURNS[0], **ANSWER)
        with pytest.raises(ValueError, match="dtype of the store's fingerprint is float32"):
            generate_with_store(model_of("mistral", torch.bfloat16), store, "a", TURNS[0], **ANSWER)
    with store_of(llama, tmp_path / "llama") as store:
        cache = DynamicCache(config=llama.config)
        prefill(llama, cache, TURNS[1])
        for name in {"past_key_values", CACHE}:
            with pytest.raises(ValueError, match=f"{name} holds 5 tokens; expected an empty"):
                answer(llama, store, "a", TURNS[0], **{name: cache})
        with pytest.raises(TypeError, match="input_ids is list; expected a tensor of token ids"):
            generate_with_store(llama, store, "a", [[1]], **ANSWER)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="past_key_values is list; expected a Cache"):
            answer(llama, store, "a", TURNS[0], past_key_values=[])
        with pytest.raises(TypeError, match="session: id is Session; expected a str"):
            answer(llama, store, store.session("a"), TURNS[0])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="store is str; expected a KVStore"):
            answer(llama, "folder", "a", TURNS[0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="past_key_values is a EncoderDecoderCache; expected"):
            pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
            answer(llama, store, "a", TURNS[0], past_key_values=pair)
        # The caller's own cache, left by one session, is not that of another one.
        cache.reset()
        if BEFORE_5_18:
            assert cache.get_seq_length() == 5
            cache = DynamicCache(config=llama.config)
        answer(llama, store, "a", TURNS[0], past_key_values=cache)
        with pytest.raises(ValueError, match="past_key_values holds 45 tokens"):
            answer(llama, store, "b", TURNS[0], past_key_values=cache)
        # Of the same session that begins anew, it is filled again.
        tokens, _ = answer(llama, store, "a", TURNS[2], past_key_values=cache, rewind=True)
        assert tokens == plain(llama, TURNS[2])


_TURNS = [ids(11), ids(5, seed=1), ids(7, seed=2)]


def _say(model: Any, store: Any, tokens: torch.Tensor, **options: Any) -> list[int]:
    result = generate_with_store(model, store, "a", tokens, **{**ANSWER, **options})
    return list(result[0].tolist())


@pytest.mark.parametrize("name", DECODERS)
def test_new_tokens_alone_are_the_whole_conversation(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    with store_of(model, tmp_path / "whole") as store:
        tokens: list[int] = []
        for turn in _TURNS:
            whole = torch.tensor([[*tokens, *turn[0].tolist()]])
            tokens = _say(model, store, whole, attention_mask=torch.ones_like(whole))
    for turn in _TURNS:  # each in a new store object: the session comes from the disk
        with store_of(model, tmp_path / "append") as store:
            appended = _say(model, store, turn, append=True)
    assert appended == tokens


def test_a_mask_is_that_of_the_new_tokens(tmp_path: Path) -> None:
    model = model_of("llama")
    padded = torch.tensor([[PAD, 5]])
    with store_of(model, tmp_path) as store:
        _say(model, store, _TURNS[0], append=True)
        with pytest.raises(ValueError, match="padding token"):
            _say(model, store, padded, append=True)
        with pytest.raises(ValueError, match=r"another shape than the new tokens.*\[1, 2\]"):
            _say(model, store, padded, append=True, attention_mask=torch.ones(1, 20))
        before = store.session("a").tokens
        tokens = _say(model, store, padded, append=True, attention_mask=torch.ones(1, 2))
    assert tokens[: len(before) + 2] == [*before, PAD, 5]


def test_an_encoder_has_no_new_tokens(tmp_path: Path) -> None:
    model = model_of("t5")
    with store_of(model, tmp_path) as store, pytest.raises(ValueError, match="append is True"):
        _say(model, store, _TURNS[0], append=True)


def test_a_shorter_or_another_text_is_an_error(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        tokens = _say(model, store, _TURNS[0])
        for other in (_TURNS[1], torch.tensor([tokens[:-1]]), _TURNS[0]):
            with pytest.raises(ValueError, match="of the 20 tokens of session 'a'; expected all"):
                _say(model, store, other)
            assert store.session("a").tokens == tokens
        again = _say(model, store, _TURNS[0], rewind=True)
        assert again == tokens
        assert _say(model, store, _TURNS[1], rewind=True) == store.session("a").tokens


def test_the_tokens_of_an_unknown_session_are_none(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        assert store.session("a").input_ids is None
        with pytest.raises(TypeError, match=r"input_ids is a torch.float32 tensor; expected"):
            _say(model, store, torch.tensor([store.session("a").tokens]))
        tokens = _say(model, store, _TURNS[0])
        known = store.session("a").input_ids
        assert known.dtype == torch.int64 and known.tolist() == [tokens]


_ANSWER = 48
_KILLED_AFTER = 21

_CHILD = """
import torch
torch.set_num_threads(1)
from test_store_generation import build, prompt_of, settings
from store_models import answer, store_of
from tests.support.store_faults import Progress
model = build({name!r}, {dtype})
with store_of(model, __import__("pathlib").Path({store!r}), **settings({name!r})) as store:
    answer(model, store, "chat", prompt_of({name!r}), streamer=Progress(), **{options!r})
"""


def build(name: str, dtype: torch.dtype) -> Any:
    if name != "shipped":
        return model_of(name, dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=dtype).eval()


def prompt_of(name: str) -> torch.Tensor:
    # Of the shipped model, longer than its window of 128.
    return ids(150 if name == "shipped" else 37)


def settings(name: str) -> dict[str, Any]:
    return {"chunk_tokens": None} if name == "shipped" else {}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the child: with another number of threads, sums are made in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    [
        *(
            pytest.param(
                "shipped", dtype, way,
                marks=[
                    pytest.mark.skipif(not SHIPPED.exists(), reason="in source checkouts only"),
                    pytest.mark.slow,
                ],
            )
            for dtype in (torch.float32, torch.bfloat16)
            for way in ("greedy", "sampled")
        ),
        ("llama", torch.float32, "sampled"),
        pytest.param("gemma2", torch.bfloat16, "greedy", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_killed_while_it_answers(name: str, dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    model, prompt = build(name, dtype), prompt_of(name)
    length = {"max_new_tokens": _ANSWER, "min_new_tokens": _ANSWER}
    options: dict[str, Any] = {"prefill_chunk_size": 32, "commit_every": 5}
    if way == "sampled":
        options.update(do_sample=True, top_p=0.9, temperature=0.9)
    loop = {"seed": 5, "custom_generate": sample} if way == "sampled" else {}
    with store_of(model, tmp_path / "whole", **settings(name)) as store:
        tokens, logits = answer(model, store, "chat", prompt, **options, **length, **loop)

    code = _CHILD.format(
        name=name, dtype=dtype, store=str(tmp_path / "killed"), options={**options, **length}
    )  # fmt: skip
    if way == "sampled":
        code = code.replace(
            "streamer=Progress()",
            "streamer=Progress(), seed=5, custom_generate="
            "__import__('lmdecode.integrations.transformers', fromlist=['']).sample",
        )
    kill_behind(_KILLED_AFTER, code, Path(__file__).parent)

    with store_of(model, tmp_path / "killed", **settings(name)) as store:
        said = store.session("chat").tokens
        assert store.session("chat").resume()[0] >= min(len(said), prompt.shape[1]) - 1
        said = said or prompt[0].tolist()  # a disk that is slower than all that
        kept = len(said) - prompt.shape[1]
        assert 0 <= kept <= _ANSWER
        assert said == tokens[: len(said)]
        rest = {"max_new_tokens": _ANSWER - kept, "min_new_tokens": _ANSWER - kept}
        again, others = answer(
            model, store, "chat", torch.tensor([said]), **options, **rest, **loop
        )
        assert again == tokens
        assert torch.equal(others, logits[kept:])
        # Asked from the beginning by somebody who saw nothing: the prompt is there.
        again, others = answer(model, store, "other", prompt, **options, **length, **loop)
        assert again == tokens
        assert torch.equal(others, logits)
        assert store.verify().damage == ()
