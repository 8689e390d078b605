"""``Engine`` with a budget of bytes: kept prompts, pauses, and the texts of a cold start."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from tests.engine.engine_cases import (
    CAPACITY,
    OddTokens,
    alone,
    check_interrupts,
    is_whole,
    live_of,
    options_of,
    outcome,
    prompt_of,
    run,
)
from tests.support.causal_models import VOCAB, random_model, random_tokens
from tests.support.mtp_models import agreeing_model, write_folder

MODELS = {
    "llama": ("llama", "plain"),
    "windows": ("gemma2", "plain"),
    "two sizes of heads": ("gemma4_text", "shared keys, inputs of layers"),
    "convolutions": ("lfm2", "convolutions at the ends"),
    "delta rule": ("qwen3_5_text", "delta rule last, biases"),
    "Mamba-2": ("granitemoehybrid", "experts, multipliers"),
}
TEXTS = 2.2  # of CAPACITY, which the budget holds


@pytest.fixture(scope="module", params=MODELS)
def decoding(request: pytest.FixtureRequest) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model(*MODELS[request.param]))


@pytest.fixture(scope="module")
def llama() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))


def bytes_of(decoding: lmdecode.Decoding, tokens: int = CAPACITY) -> int:
    """Return the bytes of a text, as the engine counts them."""
    caches: Any = decoding.engine(max_requests=1, capacity=CAPACITY)._model.caches
    return int(caches.bytes_for([tokens]))


def engine_of(decoding: lmdecode.Decoding, texts: float = TEXTS, **more: Any) -> lmdecode.Engine:
    given = {"max_requests": 4, "max_step_tokens": 24, **more}
    # Most bytes of a short text are states, of which searches have some for each beam.
    states: Any = decoding.decoder
    size = int(texts * (2 if states.state_size else 1) * bytes_of(decoding))
    return decoding.engine(capacity=CAPACITY, cache_bytes=size, **given)


def finish(engine: lmdecode.Engine, most: int) -> None:
    while engine.step():
        assert engine.stats.cache_bytes <= most


@pytest.mark.parametrize("seed", range(3))
def test_lives_of_an_engine(decoding: lmdecode.Decoding, seed: int) -> None:
    rng = random.Random(seed)
    shared = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (70, 40)]

    def options() -> dict[str, Any]:
        options = options_of(rng)
        # A search alone may take no more than there is.
        return options if "num_beams" not in options else options | {"max_new_tokens": 9}

    live_of(
        engine_of(decoding, rng.choice([2, TEXTS, 9]), max_step_tokens=rng.choice([8, 50])),
        rng,
        lambda: {"prompt_ids": prompt_of(rng, shared), **options()},
        lambda arguments: alone(decoding, **arguments),
    )


def conversations(decoding: lmdecode.Decoding, count: int, engine: lmdecode.Engine) -> None:
    """Hold conversations that part, come back and are forgotten: each text is that alone."""
    rng = random.Random(count)
    most = engine._model.caches.most_bytes  # type: ignore[attr-defined]
    texts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (60, 33)]
    asked = []
    for number in range(count):
        text = rng.choice(texts[:2] if rng.random() < 0.2 else texts[-12:])
        if rng.random() < 0.3:
            text = text[: rng.randrange(1, len(text))]
        prompt = text[-90:] if len(text) > 90 else text
        prompt = [*prompt, *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 9)))]
        options = {**options_of(rng), "max_new_tokens": rng.randrange(1, 20)}
        if "num_beams" in options:
            options["max_new_tokens"] = rng.randrange(1, 9)
        request = engine.submit(prompt, **options)
        asked.append((request, prompt, options))
        if number % rng.randrange(1, 6) == 0:
            finish(engine, most)
            texts.append([*prompt, *request.result().tokens])
    finish(engine, most)
    for request, prompt, options in asked:
        assert outcome(request.result()) == outcome(alone(decoding, prompt, **options))
    assert is_whole(engine)


def test_random_conversations(decoding: lmdecode.Decoding) -> None:
    engine = engine_of(decoding, 3)
    conversations(decoding, 60, engine)
    assert engine.stats.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("cache_dtype", "count"), [("float32", 500), ("int8", 150)])
def test_many_random_conversations(cache_dtype: str, count: int) -> None:
    model = random_model("llama", "plain")
    decoding = lmdecode.Decoding.from_pretrained(model, cache_dtype=cache_dtype)
    engine = engine_of(decoding, 2)
    conversations(decoding, count, engine)
    assert engine.stats.pauses > 0 and engine.stats.cached_tokens > 2 * count


@pytest.mark.parametrize("kind", ["lookup", "assistant", "mtp"])
def test_conversations_with_drafts(kind: str, llama: lmdecode.Decoding, tmp_path: Path) -> None:
    decoding, drafts = llama, dict[str, Any]()
    if kind == "lookup":
        drafts = {"prompt_lookup_num_tokens": 3}
    elif kind == "assistant":
        drafts = {"assistant_model": llama, "assistant_confidence_threshold": 0.0}
    else:
        write_folder(agreeing_model("qwen3_5_text", "delta rule last, biases", 0.05), tmp_path)
        decoding = lmdecode.Decoding.from_pretrained(tmp_path, mtp=True)
        drafts = {"assistant_model": "mtp"}
    texts = 2.4 if kind == "mtp" else 2.1
    engine = engine_of(decoding, texts, max_step_tokens=30, **drafts)
    conversations(decoding, 40, engine)
    assert engine.stats.accepted_tokens > 0 and engine.stats.pauses > 0


def test_an_assistant_keeps_prompts_for_its_slots_alone(llama: lmdecode.Decoding) -> None:
    drafting: dict[str, Any] = {"assistant_model": llama, "assistant_confidence_threshold": 0.0}
    engine = engine_of(llama, max_requests=2, **drafting)
    for row in range(9):
        run(engine, engine.submit(random_tokens(40, row).tolist(), max_new_tokens=12))
    assert engine.stats.accepted_tokens > 0
    drafts: Any = engine._model
    places = drafts._drafts._source._places
    assert len(drafts.places._prompts) > 2 and len(places._prompts) <= 2


def test_requests_pause_and_go_on(decoding: lmdecode.Decoding) -> None:
    engine = engine_of(decoding, 1.5)
    given: list[dict[str, Any]] = [
        {},
        {"seed": 5, "temperature": 2.0, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        {"seed": 1, "logprobs": 3},
        {"seed": 9, "grammar": OddTokens},
    ]
    requests, want = [], []
    for row, options in enumerate(given):
        prompt = random_tokens(40 + row, row).tolist()
        for to in (requests, want):
            now = dict(options)
            if "grammar" in now:
                now["grammar"] = OddTokens()
            now |= {"max_new_tokens": 70, "eos_token_id": ()}
            if to is requests:
                requests.append(engine.submit(prompt, **now))
            else:
                want.append(outcome(alone(decoding, prompt, **now)))
    seen = [[] for _ in requests]
    most = engine._model.caches.most_bytes  # type: ignore[attr-defined]
    while engine.step():
        assert engine.stats.cache_bytes <= most
        for request, tokens in zip(requests, seen, strict=True):
            now = list(request._state.tokens)
            assert now[: len(tokens)] == tokens  # none is taken back
            tokens[:] = now
    assert engine.stats.pauses > 0
    assert [outcome(request.result()) for request in requests] == want
    assert is_whole(engine)


def test_a_paused_request_is_cancelled(llama: lmdecode.Decoding) -> None:
    engine = engine_of(llama, 1.2)
    prompts = [random_tokens(30, row).tolist() for row in range(2)]
    first, second = (engine.submit(p, max_new_tokens=80, eos_token_id=()) for p in prompts)
    while not engine.stats.pauses:
        engine.step()
    tokens = list(second._state.tokens)
    assert tokens and not second.finished
    second.cancel()
    run(engine, first, second)
    assert second.result().finish_reason == "cancelled" and second.result().tokens == tokens
    assert is_whole(engine)


def test_prompts_are_kept_beyond_the_slots(llama: lmdecode.Decoding) -> None:
    """Twelve turns of four conversations in one slot: a turn computes what is new to it alone."""
    engine = engine_of(llama, 9, max_requests=1)
    texts = [random_tokens(64, row).tolist() for row in range(4)]
    for turn in range(3):
        for text in texts:
            before = engine.stats.prompt_tokens
            request = engine.submit(text, max_new_tokens=3, eos_token_id=())
            run(engine, request)
            computed = engine.stats.prompt_tokens - before
            assert computed == len(text) - request.stats.cached_tokens
            assert computed == (64 if turn == 0 else 9)
            text += [*request.result().tokens, *random_tokens(6, turn).tolist()]
    assert len(engine._model.places._prompts) == 4  # type: ignore[attr-defined]
    assert is_whole(engine)


def test_what_was_used_longest_ago_is_forgotten(llama: lmdecode.Decoding) -> None:
    engine = engine_of(llama, 2, max_requests=1)
    a, b, c = (random_tokens(96, row).tolist() for row in range(3))

    def cached(prompt: list[int]) -> int:
        request = engine.submit(prompt, max_new_tokens=1)
        run(engine, request)
        return request.stats.cached_tokens

    assert [cached(p) for p in (a, b, a)] == [0, 0, 95]
    assert [cached(p) for p in (c, a, b)] == [0, 95, 0]


def test_a_prompt_is_kept_where_its_reader_pauses(
    llama: lmdecode.Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        {"prompt_ids": random_tokens(40, row).tolist(), "max_new_tokens": 4, "num_beams": beams}
        for row, beams in ((0, 1), (1, 1), (2, 2))
    ]
    engine = engine_of(llama, 1.3)
    check_interrupts(
        monkeypatch,
        engine,
        lambda: [engine.submit(**arguments) for arguments in given],
        [outcome(alone(llama, **arguments)) for arguments in given],
    )


def test_a_search_that_fits_alone_does_not_fail(llama: lmdecode.Decoding) -> None:
    """Each beam copies the last block of the prompt, and goes on in another one."""
    block, prompt = bytes_of(llama, 1), random_tokens(31).tolist()
    options: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 8, "eos_token_id": ()}
    given = {"max_requests": 8, "capacity": 64}
    with pytest.raises(ValueError, match=rf"need {16 * block} bytes; expected at most {9 * block}"):
        llama.engine(**given, cache_bytes=9 * block).submit(prompt, **options)
    engine = llama.engine(**given, cache_bytes=16 * block)
    request = engine.submit(prompt, **options)
    finish(engine, 16 * block)
    want = llama.engine(**given).submit(prompt, **options)
    assert outcome(request.result()) == outcome(want.result()) and is_whole(engine)


def test_stored_prompts_are_loaded_where_there_is_room(
    llama: lmdecode.Decoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_tokens(100, row).tolist() for row in range(8)]
    most = 16 * bytes_of(llama, 1)
    peak = 0
    with lmdecode.KVStore(
        tmp_path, capacity_bytes=1 << 26, fingerprint=llama.fingerprint(), chunk_tokens=16
    ) as store:
        for turn in range(2):
            engine = engine_of(llama, 4, store=store)
            caches: Any = engine._model.caches
            assert caches.most_bytes == most
            for prompt in prompts[:4] if turn == 0 else prompts[4:]:
                engine.submit(prompt, max_new_tokens=2, eos_token_id=()).result()
            if turn == 0:
                engine.stop()  # waits for what is being written
        assert engine.stats.cache_bytes == most  # of the prompts that are kept
        write = caches.write

        def watched(*arguments: Any) -> None:
            nonlocal peak
            write(*arguments)
            peak = max(peak, engine.stats.cache_bytes)

        monkeypatch.setattr(caches, "write", watched)
        requests = [engine.submit(p, max_new_tokens=2, eos_token_id=()) for p in prompts[:3]]
        finish(engine, most)
        assert [request.stats.cached_tokens for request in requests] == [99, 99, 99]
        assert 0 < peak <= most
        engine.stop()


@pytest.mark.parametrize(("name", "texts"), [("windows", 1.0), ("Mamba-2", 2.2)])
def test_a_request_comes_back_where_it_can_go_on(
    name: str, texts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model(*MODELS[name]))
    size = int(texts * bytes_of(decoding))
    engine = decoding.engine(
        max_requests=4, capacity=CAPACITY, max_step_tokens=24, cache_bytes=size
    )
    pause, paused = engine._pause, list[tuple[Any, int, int]]()

    def watched(sequence: Any) -> None:
        paused.append((sequence, sequence.read, len(sequence.request.tokens)))
        pause(sequence)

    monkeypatch.setattr(engine, "_pause", watched)
    prompts = [random_tokens(50, row).tolist() for row in range(3)]
    requests = [engine.submit(p, max_new_tokens=60, eos_token_id=()) for p in prompts]
    finish(engine, size)
    assert all(request.finished for request in requests)
    assert len(set(paused)) == len(paused) <= 6, paused


def test_a_follower_that_pauses_shares_later(llama: lmdecode.Decoding) -> None:
    engine = engine_of(llama, max_step_tokens=8)
    prompt = random_tokens(80).tolist()
    first, second = (engine.submit(prompt, max_new_tokens=3) for _ in range(2))
    engine.step()
    with torch.no_grad():
        engine._pause(next(reversed(engine._seated)))
    run(engine, first, second)
    assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, 79)
    assert engine.stats.prompt_tokens == 81 and second.result().tokens == first.result().tokens


def test_bad_input(llama: lmdecode.Decoding) -> None:
    size = bytes_of(llama)
    with pytest.raises(TypeError, match="cache_bytes is of type str; expected an int"):
        llama.engine(max_requests=1, capacity=CAPACITY, cache_bytes="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cache_bytes is 0; expected 1 to"):
        llama.engine(max_requests=1, capacity=CAPACITY, cache_bytes=0)
    with pytest.raises(ValueError, match=rf"cache_bytes is {size - 1}; expected at least {size}"):
        llama.engine(max_requests=1, capacity=CAPACITY, cache_bytes=size - 1)
    engine = llama.engine(max_requests=4, capacity=CAPACITY, cache_bytes=size)
    prompt = random_tokens(40).tolist()
    with pytest.raises(ValueError, match=r"a prompt of 40 tokens and 4 texts of 70 tokens need"):
        engine.submit(prompt, max_new_tokens=70, num_beams=4)
    request = engine.submit(prompt, max_new_tokens=CAPACITY - 40)
    run(engine, request)
    assert request.finished and is_whole(engine)
