"""``Engine``: texts of ``generate()``, in any company; prompts that begin alike; what fails."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.engine.prompts import PromptReader
from lmdecode.decoder.engine.request import RequestState
from lmdecode.sampling.sampler import CompactSampler
from tests.engine.engine_cases import (
    CAPACITY,
    OddTokens,
    alone,
    check_interrupts,
    check_step_fails,
    greedy,
    is_whole,
    live_of,
    options_of,
    outcome,
    prompt_of,
    run,
)
from tests.support.causal_models import EOS, PAD, VOCAB, random_model, random_tokens

MODELS = [("llama", "plain"), ("gemma2", "plain"), ("mistral", "window")]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model[0])
def decoding(request: pytest.FixtureRequest) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model(*request.param))


@pytest.fixture(scope="module")
def llama() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))


@pytest.mark.parametrize(
    ("options", "of_generate"),
    [
        ({}, {"do_sample": False}),
        ({"seed": 7}, {"do_sample": True, "top_k": 0, "seed": 7}),
        (
            {"seed": 1, "temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
            {
                "do_sample": True, "seed": 1, "temperature": 1.4, "top_k": 9, "top_p": 0.9,
                "min_p": 0.01,
            },
        ),
        (
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_tokens": 9},
            {
                "do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2,
                "min_new_tokens": 9,
            },
        ),
        ({"num_beams": 4}, {"num_beams": 4, "do_sample": False}),
        (
            {"num_beams": 3, "length_penalty": 0.3, "early_stopping": True, "min_tokens": 4},
            {
                "num_beams": 3, "length_penalty": 0.3, "early_stopping": True, "do_sample": False,
                "min_new_tokens": 4,
            },
        ),
    ],
    ids=["greedy", "drawn", "filters", "rules", "beams", "beams that stop"],
)  # fmt: skip
def test_the_text_of_generate(
    decoding: lmdecode.Decoding, options: dict[str, Any], of_generate: dict[str, Any]
) -> None:
    engine = decoding.engine(max_requests=6, capacity=CAPACITY, max_step_tokens=7)
    for length in (1, 12, 40):
        prompt = random_tokens(length, length)
        want = decoding.generate(
            prompt[None], attention_mask=torch.ones(1, length), max_new_tokens=20,
            eos_token_id=[EOS, 5], pad_token_id=PAD, **of_generate,
        )[0, length:].tolist()  # fmt: skip
        request = engine.submit(prompt, max_new_tokens=20, eos_token_id=[EOS, 5], **options)
        assert list(request) == want
        assert request.finish_reason == ("stop" if want[-1] in (EOS, 5) else "length")
        assert request.result().tokens == want
    assert is_whole(engine)


def live(decoding: lmdecode.Decoding, seed: int, store: lmdecode.KVStore | None) -> None:
    """One random life of an engine of a decoder-only model."""
    rng = random.Random(seed)
    shared = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (33, 50, 64)]
    engine = decoding.engine(
        max_requests=rng.choice([4, 7]),
        capacity=CAPACITY,
        max_step_tokens=rng.choice([8, 50]),
        store=store,
    )
    live_of(
        engine,
        rng,
        lambda: {"prompt_ids": prompt_of(rng, shared), **options_of(rng)},
        lambda arguments: alone(decoding, **arguments),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_store", [False, True])
def test_lives_of_an_engine(
    decoding: lmdecode.Decoding, seed: int, has_store: bool, tmp_path: Path
) -> None:
    if not has_store:
        live(decoding, seed, None)
        return
    with lmdecode.KVStore(
        tmp_path, capacity_bytes=1 << 26, fingerprint=decoding.fingerprint(), chunk_tokens=16
    ) as store:
        for life in (seed, seed, seed + 1000):  # the second finds what the first has kept
            live(decoding, life, store)


def test_the_texts_of_a_batch_without_an_engine(decoding: lmdecode.Decoding) -> None:
    prompts = [random_tokens(n, n).tolist() for n in (3, 50, 33)]
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, max_step_tokens=16)
    requests = [engine.submit(p, max_new_tokens=15, eos_token_id=()) for p in prompts]
    assert [list(r) for r in requests] == [greedy(decoding, p, 15) for p in prompts]


@pytest.mark.parametrize("options", [{}, {"seed": 1, "temperature": 1.4}, {"num_beams": 2}])
def test_steps_ahead_give_what_steps_give(
    llama: lmdecode.Decoding, options: dict[str, Any]
) -> None:
    """Texts end at different steps, one by an end token, and a request waits for a place."""

    def written(method: str) -> tuple[list[Any], Any, int]:
        engine, calls = llama.engine(max_requests=4, capacity=CAPACITY), 0
        requests = [
            engine.submit(random_tokens(9 + n, n), max_new_tokens=n, eos_token_id=[5], **options)
            for n in (20, 1, 7, 13, 30)
        ]
        while getattr(engine, method)():
            calls += 1
        assert is_whole(engine)
        return [outcome(request.result()) for request in requests], engine.stats, calls

    ahead, stepped = written("run_ahead"), written("step")
    assert ahead[:2] == stepped[:2]
    assert ahead[2] < stepped[2] / 2 or "num_beams" in options


def test_a_request_is_cancelled_between_parts(llama: lmdecode.Decoding) -> None:
    engine = llama.engine(max_requests=2, capacity=CAPACITY)
    first, second = (engine.submit(random_tokens(9, n), max_new_tokens=40) for n in range(2))
    for _ in range(4):
        engine.run_ahead(0.0)  # a step at least
    assert len(first._state.tokens) == 4
    first.cancel()
    assert second.result().tokens == greedy(llama, random_tokens(9, 1).tolist(), 40)
    assert first.finish_reason == "cancelled" and is_whole(engine)


@pytest.mark.parametrize(
    ("of", "method", "at", "options"),
    [
        (CausalCaches, "truncate", 1, {}),  # as a place becomes free
        (CompactSampler, "remove", 1, {}),
        (PromptReader, "advance", 2, {}),  # the second of two prompts
        (RequestState, "end", 1, {"num_beams": 2}),
    ],
)
def test_an_interrupt_between_any_two_lines(
    llama: lmdecode.Decoding,
    monkeypatch: pytest.MonkeyPatch,
    of: Any,
    method: str,
    at: int,
    options: dict[str, Any],
) -> None:
    """The step fails: all requests that have places end, and their places are free."""
    engine = llama.engine(max_requests=4, capacity=CAPACITY)
    requests = [
        engine.submit(random_tokens(9, n), max_new_tokens=9 + n, **options) for n in range(2)
    ]
    run_once, calls = getattr(of, method), list[None]()

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        if len(calls) == at:
            raise KeyboardInterrupt
        return run_once(*arguments, **keywords)

    monkeypatch.setattr(of, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        requests[0].result()
    assert [request.finish_reason for request in requests] == ["error", "error"]
    assert is_whole(engine)
    prompt = random_tokens(9, 1).tolist()
    again = engine.submit(prompt, max_new_tokens=5, eos_token_id=())
    assert again.result().tokens == greedy(llama, prompt, 5)


def test_an_interrupt_at_any_line_holds_no_place(
    llama: lmdecode.Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_tokens(9, n).tolist() for n in range(2)]
    given: list[dict[str, Any]] = [
        {"prompt_ids": prompt, "max_new_tokens": 4, "num_beams": beams}
        for prompt, beams in zip(prompts, (1, 2), strict=True)
    ]
    engine = llama.engine(max_requests=4, capacity=CAPACITY)
    check_interrupts(
        monkeypatch,
        engine,
        lambda: [engine.submit(**arguments) for arguments in given],
        [outcome(alone(llama, **arguments)) for arguments in given],
    )


def test_seconds_ahead_are_a_number(llama: lmdecode.Decoding) -> None:
    engine = llama.engine(max_requests=1, capacity=CAPACITY)
    with pytest.raises(TypeError, match="run_ahead's seconds"):
        engine.run_ahead("0.1")


def test_prompts_that_begin_alike_are_computed_once(decoding: lmdecode.Decoding) -> None:
    system = random_tokens(70, 0).tolist()
    prompts = [[*system, i] for i in range(20, 28)]
    engine = decoding.engine(max_requests=8, capacity=CAPACITY, max_step_tokens=32)
    requests = [engine.submit(p, max_new_tokens=6, eos_token_id=()) for p in prompts]
    run(engine, *requests)
    assert engine.stats.prompt_tokens == 70 + 8 and engine.stats.cached_tokens == 7 * 70
    assert [r.stats.cached_tokens for r in requests] == [0] + [70] * 7
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.result().tokens == greedy(decoding, prompt, 6)


def test_a_prompt_of_one_that_has_ended_is_shared(llama: lmdecode.Decoding) -> None:
    system = random_tokens(70, 0).tolist()
    engine = llama.engine(max_requests=2, capacity=CAPACITY)
    for i in range(4):  # more than places: what is kept makes room
        request = engine.submit([*system, 30 + i], max_new_tokens=4, eos_token_id=())
        assert request.result().tokens == greedy(llama, [*system, 30 + i], 4)
        assert request.stats.cached_tokens == (70 if i else 0)
    other = engine.submit(random_tokens(60, 3), max_new_tokens=4)
    third = engine.submit(random_tokens(60, 4), max_new_tokens=4)
    run(engine, other, third)
    again = engine.submit([*system, 31], max_new_tokens=4, eos_token_id=())
    assert again.result().tokens == greedy(llama, [*system, 31], 4)
    assert again.stats.cached_tokens == 0 and is_whole(engine)  # its place was taken


def test_a_leader_that_is_cancelled(llama: lmdecode.Decoding) -> None:
    prompt = random_tokens(80, 1).tolist()
    engine = llama.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=8)
    first, second = (engine.submit(prompt, max_new_tokens=3) for _ in range(2))
    engine.step()
    first.cancel()
    run(engine, second)
    assert second.result().tokens == greedy(llama, prompt, 3)[: len(second.result().tokens)]
    assert first.finish_reason == "cancelled" and is_whole(engine)


def test_logprobs_are_those_of_the_logits(llama: lmdecode.Decoding) -> None:
    prompt = random_tokens(9, 2).tolist()
    engine = llama.engine(max_requests=3, capacity=CAPACITY)
    plain = engine.submit(prompt, max_new_tokens=8, eos_token_id=(), seed=4, temperature=2.0)
    none = engine.submit(
        prompt, max_new_tokens=8, eos_token_id=(), seed=4, temperature=2.0, logprobs=0
    )
    three = engine.submit(
        prompt, max_new_tokens=8, eos_token_id=(), seed=4, temperature=2.0, logprobs=3
    )
    got = list(three)
    assert [item.token for item in got] == plain.result().tokens
    batch = llama.batch(max_requests=1, capacity=CAPACITY)
    id_, tokens = batch.add(prompt), dict[Any, int]()
    for item, other in zip(got, none.result().logprobs, strict=True):
        want = batch.step(tokens)[id_].log_softmax(-1)
        best = want.topk(3)
        assert item.logprob == pytest.approx(float(want[item.token]), abs=1e-5)
        assert [token for token, _ in item.top] == best.indices.tolist()
        assert [p for _, p in item.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert other == item._replace(top=())
        tokens = {id_: item.token}
    assert plain.result().logprobs is None


def test_a_grammar_limits_its_request_alone(llama: lmdecode.Decoding) -> None:
    prompt = random_tokens(9, 2).tolist()
    engine = llama.engine(max_requests=8, capacity=CAPACITY)
    common = {"max_new_tokens": 8, "eos_token_id": ()}
    free = engine.submit(prompt, **common)
    odd = engine.submit(prompt, grammar=OddTokens(), seed=1, logprobs=1, **common)
    stuck = engine.submit(prompt, grammar=OddTokens(ends_after=3), seed=1, **common)
    broken = engine.submit(prompt, grammar=OddTokens(breaks_after=2), seed=1, **common)
    run(engine, free, odd, stuck, broken)
    assert free.result().tokens == greedy(llama, prompt, 8)
    tokens = odd.result().tokens
    assert [token % 2 for token in tokens] == [0, 1] * 4
    with pytest.raises(RuntimeError, match=r"the request has no logit above -inf"):
        stuck.result()
    seen = []
    with pytest.raises(LookupError, match="no such state"):
        for token in broken:
            seen.append(token)
    assert seen == tokens[:2] and stuck.stats.new_tokens == 3
    assert stuck.finish_reason == broken.finish_reason == "error" and is_whole(engine)


def nan_at(token: int) -> lmdecode.Decoding:
    """A model whose hidden states are NaN from this token on."""
    model = copy.deepcopy(random_model("llama", "plain"))
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    return lmdecode.Decoding.from_pretrained(model)


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"num_beams": 2}, {"num_beams": 3}])
def test_nan_ends_its_request_alone(options: dict[str, Any]) -> None:
    broken, base = nan_at(3), random_tokens(50, 1).clamp(min=4).tolist()
    engine = broken.engine(max_requests=6, capacity=CAPACITY)
    common = {"max_new_tokens": 8, "suppress_tokens": [3], "eos_token_id": ()}
    fine = engine.submit(base[:20], **common)
    bad = engine.submit([*base[:40], 3, 5, 6], **common, **options)
    run(engine, fine, bad)
    with pytest.raises(RuntimeError, match=r"no token can be chosen: the request has NaN"):
        bad.result()
    prompt = [*base[:40], 9, 8]
    for request, ids in ((fine, base[:20]), (engine.submit(prompt, **common), prompt)):
        assert outcome(request.result()) == outcome(alone(broken, ids, **common))
    assert is_whole(engine)


def test_searches_without_a_result(llama: lmdecode.Decoding) -> None:
    prompt = random_tokens(9, 2).tolist()
    engine = llama.engine(max_requests=6, capacity=CAPACITY)
    other = engine.submit(prompt, max_new_tokens=9, eos_token_id=())
    nothing = engine.submit(prompt, max_new_tokens=9, num_beams=2, suppress_tokens=range(VOCAB))
    trie = lmdecode.Trie([[5, 6, 7], [5, 6, 8, 9]])
    held = engine.submit(prompt, max_new_tokens=5, eos_token_id=EOS, trie=trie)
    run(engine, other, nothing, held)
    with pytest.raises(RuntimeError, match=r"the request has no logit above -inf"):
        nothing.result()
    assert held.result().tokens == [] and held.finish_reason == "stop"
    assert other.result().tokens == greedy(llama, prompt, 9) and is_whole(engine)


def test_what_a_grammar_must_not_do(llama: lmdecode.Decoding) -> None:
    engine = llama.engine(max_requests=3, capacity=CAPACITY)
    prompt = random_tokens(9, 2).tolist()
    other = engine.submit(prompt, max_new_tokens=6, eos_token_id=())

    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("a panic")

    for call, kind in (
        (engine.step, RuntimeError), (engine.stop, RuntimeError), (other.result, RuntimeError),
        (panic, Panic),
    ):  # fmt: skip
        grammar = OddTokens()
        grammar.fill_bitmask = lambda _, call=call: call()  # type: ignore[method-assign]
        request = engine.submit(prompt, max_new_tokens=6, grammar=grammar)
        with pytest.raises(kind, match=r"from within a step|a panic"):
            request.result()
    assert other.result().tokens == greedy(llama, prompt, 6) and is_whole(engine)


def test_bad_words_may_end_a_text(llama: lmdecode.Decoding) -> None:
    prompt = random_tokens(12, 12)
    end = greedy(llama, prompt.tolist(), 4)[3]
    want = llama.generate(
        prompt[None], max_new_tokens=12, eos_token_id=end, bad_words_ids=[[end]],
        do_sample=False, pad_token_id=PAD, attention_mask=torch.ones(1, 12),
    )[0, 12:].tolist()  # fmt: skip
    engine = llama.engine(max_requests=1, capacity=CAPACITY)
    got = engine.submit(prompt, max_new_tokens=12, eos_token_id=end, bad_words_ids=[[end]])
    assert got.result().tokens == want and want[-1] == end


def test_those_who_follow_share_when_the_leader_goes(llama: lmdecode.Decoding) -> None:
    system = random_tokens(100, 5).tolist()
    engine = llama.engine(max_requests=4, capacity=CAPACITY, max_step_tokens=40)
    requests = [engine.submit([*system, 40 + i], max_new_tokens=3) for i in range(4)]
    engine.step()
    engine.step()
    requests[0].cancel()
    run(engine, *requests)
    assert engine.stats.prompt_tokens <= 80 + 101 + 2
    for i, request in enumerate(requests[1:], 1):
        want = greedy(llama, [*system, 40 + i], 3)
        assert request.result().tokens == want[: len(request.result().tokens)]
    assert is_whole(engine)


def test_a_step_that_fails_ends_those_that_run(
    llama: lmdecode.Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llama.engine(max_requests=2, capacity=CAPACITY)
    prompt = random_tokens(40, 2).tolist()
    requests = [engine.submit(prompt, max_new_tokens=9, num_beams=n) for n in (1, 1, 2)]
    engine.step()
    check_step_fails(monkeypatch, engine, (CausalCaches, "forward"), requests[:2])
    assert outcome(requests[2].result()) == outcome(
        alone(llama, prompt, max_new_tokens=9, num_beams=2)
    )
    assert is_whole(engine)


def test_who_is_cancelled_while_waiting(llama: lmdecode.Decoding) -> None:
    engine = llama.engine(max_requests=1, capacity=CAPACITY)
    first, second = (engine.submit([7, 8], max_new_tokens=5) for _ in range(2))
    engine.step()
    assert engine.stats.waiting == 1 and engine.stats.running == 1
    second.cancel()
    assert second.result().tokens == [] and second.finish_reason == "cancelled"
    assert second.stats.queued is None and second.stats.total is not None
    second.cancel()  # again, and after the end: nothing
    assert first.result().finish_reason in ("length", "stop") and is_whole(engine)


def test_a_search_that_cannot_begin_ends_with_the_step(
    llama: lmdecode.Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llama.engine(max_requests=4, capacity=CAPACITY)
    other = engine.submit([5, 6, 7], max_new_tokens=4)
    search = engine.submit([5, 6], max_new_tokens=4, num_beams=2)

    def no_memory(*arguments: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(engine._searched._search._store, "acquire", no_memory)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.undo()
    for request in (other, search):
        with pytest.raises(RuntimeError, match="a step failed"):
            request.result(timeout=1)
    assert is_whole(engine)
    assert engine.submit([5, 6], max_new_tokens=4, num_beams=2).result().tokens


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ("x", TypeError, "token_rules is of type str; expected a TokenRules"),
        ({"repetition_penalty": torch.zeros(1)}, ValueError, "repetition_penalty is .0.0."),
        ({"repetition_penalty": torch.ones(2)}, ValueError, r"repetition_penalty is \[2\]"),
        ({"bias": torch.zeros(VOCAB + 1)}, ValueError, "token_rules.bias is"),
        ({"bans": torch.zeros(1, 2, 3)}, ValueError, "token_rules.bans is"),
        ({"timestamps": torch.ones(1, 4).long()}, ValueError, "timestamps are on"),
    ],
)
def test_token_rules_are_checked_when_submitted(
    llama: lmdecode.Decoding, changes: Any, error: type[Exception], message: str
) -> None:
    engine = llama.engine(max_requests=4, capacity=CAPACITY)
    rules = changes if isinstance(changes, str) else new_token_rules(1)._replace(**changes)
    request = lmdecode.BeamRequest([5], max_new_tokens=3, num_beams=2)
    with pytest.raises(error, match=f"^Engine.submit: .*{message}"):
        engine.submit_search(request, token_rules=rules)
    assert not engine.has_work


def test_why_searches_end(llama: lmdecode.Decoding) -> None:
    engine = llama.engine(max_requests=4, capacity=CAPACITY)
    cut = engine.submit([5], max_new_tokens=2, num_beams=2, trie=lmdecode.Trie([[4, 5, 6, EOS]]))
    item = engine.submit([5], max_new_tokens=4, num_beams=2, trie=lmdecode.Trie([[4, 5, 6]]))
    assert cut.result().finish_reason == "length" and item.result().finish_reason == "stop"
    found = engine.submit(
        [5], max_new_tokens=12, num_beams=2, dialect="scorer", eos_token_id=range(3, VOCAB),
        pad_token_id=0,
    ).result()  # fmt: skip
    assert found.finish_reason == "stop" and 3 <= found.tokens[-1] < VOCAB
