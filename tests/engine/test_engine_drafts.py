"""``Engine`` with drafts: texts and results of an engine without them, and nothing kept."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.decoder.engine.drafts import LookupDrafts
from lmdecode.decoder.engine.model_drafts import AssistantDrafts, MtpDrafts
from tests.engine.engine_cases import (
    CAPACITY,
    OddTokens,
    alone,
    check_interrupts,
    is_whole,
    options_of,
    outcome,
    prompt_of,
)
from tests.support.causal_models import POSITIONS, VOCAB, random_tokens
from tests.support.drafts import decoding_of, noisy, padded
from tests.support.mtp_models import MtpModel, agreeing_model, mtp_model, write_folder

LLAMA = ("llama", "plain")
CASES = [
    LLAMA, ("gemma3_text", "plain"), ("lfm2", "convolutions at the ends"),
    ("qwen3_5_text", "delta rule last, biases"), ("granitemoehybrid", "experts, multipliers"),
    ("falcon_h1", "multipliers"),
]  # fmt: skip
SURE: dict[str, Any] = {"assistant_confidence_threshold": 0.0}
LONG: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": ()}


def drafts_of(engine: lmdecode.Engine) -> AssistantDrafts:
    drafts: Any = engine._model
    found = drafts._drafts._source
    assert isinstance(found, AssistantDrafts)
    return found


def finish(engine: lmdecode.Engine) -> None:
    while engine.step():
        pass


def is_empty(drafts: AssistantDrafts) -> bool:
    """Whether nothing of any text is kept."""
    return (
        not drafts._texts
        and not drafts._reader.sequences
        and drafts._rows.is_empty
        and drafts._places.num_free == drafts._caches.sequences
    )


def draw(decoding: lmdecode.Decoding, **drafts: Any) -> tuple[list[Any], lmdecode.Engine]:
    """Return the results of requests of every kind that arrive at any time, and the engine."""
    rng = random.Random(4)
    shared = [[rng.randrange(3, 90) for _ in range(50)]]
    engine = decoding.engine(max_requests=4, capacity=CAPACITY, max_step_tokens=24, **drafts)
    requests = []
    for number in range(30):
        options = options_of(rng)
        requests.append(engine.submit(prompt_of(rng, shared), **options))
        if number % 9 == 5:
            requests[-1].cancel()
        for _ in range(rng.randrange(3)):
            engine.step()
    finish(engine)
    return [None if r._state.is_cancelled else outcome(r.result()) for r in requests], engine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_requests_of_every_kind_in_any_company(case: tuple[str, str]) -> None:
    decoding = decoding_of(*case)
    expected, _ = draw(decoding)
    for drafts in (
        {"assistant_model": noisy(*case), "num_assistant_tokens": 4, **SURE},
        {"assistant_model": noisy(*case), "assistant_confidence_threshold": 0.2},
        {"assistant_model": noisy(*LLAMA), **SURE},
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    ):
        got, engine = draw(decoding, **drafts)
        assert got == expected
        assert is_whole(engine)
        if "assistant_model" in drafts:
            assert is_empty(drafts_of(engine))


@pytest.mark.parametrize("assistant", CASES[2:], ids=lambda case: case[0])
def test_assistants_of_another_kind(assistant: tuple[str, str]) -> None:
    decoding = decoding_of(*LLAMA)
    got, engine = draw(decoding, assistant_model=noisy(*assistant), **SURE)
    assert got == draw(decoding)[0] and is_empty(drafts_of(engine))


@pytest.mark.parametrize("vocab", [VOCAB - 1, VOCAB + 1])
def test_assistants_with_other_padding(vocab: int) -> None:
    decoding = decoding_of(*LLAMA)
    got, engine = draw(decoding, assistant_model=padded(*LLAMA, vocab), **SURE)
    assert got == draw(decoding)[0] and is_empty(drafts_of(engine))
    assert engine.stats.accepted_tokens > 0.8 * engine.stats.drafted_tokens


def test_the_model_itself_is_always_right() -> None:
    decoding = decoding_of(*LLAMA)
    engine = decoding.engine(
        max_requests=3, capacity=CAPACITY, assistant_model=decoding, num_assistant_tokens=3, **SURE
    )
    requests = [engine.submit(random_tokens(9, n).tolist(), seed=n, **LONG) for n in range(3)]
    finish(engine)
    stats = engine.stats
    assert stats.drafted_tokens == stats.accepted_tokens == 3 * 29
    assert stats.new_tokens == 3 * 40
    assert stats.steps == 1 + 10  # a prompt's step, then 4 tokens a step but for the last ones
    for n, request in enumerate(requests):
        assert request.result().tokens == alone(decoding, list(request.prompt_ids), seed=n,
                                                **LONG).tokens  # fmt: skip


def test_many_texts_at_once_have_no_drafts() -> None:
    decoding = decoding_of(*LLAMA)
    engine = decoding.engine(
        max_requests=9, capacity=CAPACITY, assistant_model=noisy(*LLAMA), **SURE
    )
    lengths = [20] * 6 + [60, 70, 80]
    requests = [
        engine.submit(random_tokens(9, n).tolist(), max_new_tokens=length, eos_token_id=())
        for n, length in enumerate(lengths)
    ]
    for _ in range(19):
        engine.step()
    assert engine.stats.drafted_tokens == 0 and engine.stats.new_tokens == 9 * 19
    finish(engine)
    assert engine.stats.accepted_tokens > 10
    for request, length in zip(requests, lengths, strict=True):
        options = {"max_new_tokens": length, "eos_token_id": ()}
        assert request.result() == alone(decoding, list(request.prompt_ids), **options)


def test_grammars_and_log_probabilities() -> None:
    decoding, draft = decoding_of(*LLAMA), noisy(*LLAMA)
    prompts = [random_tokens(12, n).tolist() for n in range(4)]
    options: list[dict[str, Any]] = [{"logprobs": 2}, {}, {"seed": 3, "logprobs": 0}, {}]

    def results(**drafts: Any) -> tuple[list[Any], int]:
        engine = decoding.engine(max_requests=4, capacity=CAPACITY, **drafts)
        requests = [
            engine.submit(p, grammar=OddTokens() if n % 2 else None, **o, **LONG)
            for n, (p, o) in enumerate(zip(prompts, options, strict=True))
        ]
        finish(engine)
        return [outcome(request.result()) for request in requests], engine.stats.accepted_tokens

    got, accepted = results(assistant_model=draft, **SURE)
    assert got == results()[0] and accepted > 20


@pytest.mark.parametrize("breaks", ["ends_after", "breaks_after"])
def test_a_grammar_that_fails_within_a_draft(breaks: str) -> None:
    decoding = decoding_of(*LLAMA)
    prompt = random_tokens(12, 1).tolist()
    for drafts in ({}, {"assistant_model": decoding, **SURE}):
        engine = decoding.engine(max_requests=2, capacity=CAPACITY, **drafts)
        other = engine.submit(prompt, **LONG)
        request = engine.submit(prompt, grammar=OddTokens(**{breaks: 7}), **LONG)
        finish(engine)
        assert request.finish_reason == "error" and len(request._state.tokens) == 7
        assert other.result().tokens == alone(decoding, prompt, **LONG).tokens


def test_nan_within_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, prompt = decoding_of(*LLAMA), random_tokens(12, 1).tolist()
    expected = alone(decoding, prompt, **LONG).tokens
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, assistant_model=decoding, **SURE)
    steps: Any = engine._model
    forward, seen = steps.caches.forward, []

    def spoilt(*arguments: Any, **options: Any) -> Any:
        logits = forward(*arguments, **options)
        seen.append(len(logits))
        if len(seen) == 3:
            logits[3] = float("nan")  # of six: after the third token of the draft
        return logits

    monkeypatch.setattr(steps.caches, "forward", spoilt)
    request = engine.submit(prompt, **LONG)
    finish(engine)
    assert seen[:3] == [1, 6, 6] and request.finish_reason == "error"
    assert request._state.tokens == expected[: 1 + 6 + 3]
    with pytest.raises(RuntimeError, match="NaN in its logits"):
        request.result()
    assert is_empty(drafts_of(engine)) and is_whole(engine)


def test_cancelled_and_streamed() -> None:
    decoding = decoding_of(*LLAMA)
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, assistant_model=decoding, **SURE)
    prompt = random_tokens(12, 1).tolist()
    expected = alone(decoding, prompt, **LONG).tokens
    request, got = engine.submit(prompt, **LONG), list[int]()
    for token in request:
        assert isinstance(token, int)
        got.append(token)
        if len(got) == 10:
            request.cancel()
    assert got == expected[: len(got)] and 10 <= len(got) < 40
    finish(engine)
    assert is_empty(drafts_of(engine)) and is_whole(engine)
    assert engine.submit(prompt, **LONG).result().tokens == expected


def test_an_end_token_within_a_draft() -> None:
    decoding, prompt = decoding_of(*LLAMA), random_tokens(12, 1).tolist()
    tokens = alone(decoding, prompt, **LONG).tokens
    options = {**LONG, "eos_token_id": [tokens[8]]}
    expected = alone(decoding, prompt, **options)
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, prompt_lookup_num_tokens=9)
    assert engine.submit(prompt, **options).result() == expected
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, assistant_model=decoding, **SURE)
    assert engine.submit(prompt, **options).result() == expected
    assert expected.finish_reason == "stop" and len(expected.tokens) <= 9


def test_all_of_the_capacity() -> None:
    decoding, draft = decoding_of(*LLAMA), noisy(*LLAMA)
    prompt = random_tokens(30, 2).tolist()
    new = POSITIONS - 29
    expected = decoding.engine(max_requests=1, capacity=POSITIONS).submit(
        prompt, max_new_tokens=new, eos_token_id=()
    )
    for drafts in ({"assistant_model": draft, **SURE}, {"prompt_lookup_num_tokens": 9}):
        engine = decoding.engine(max_requests=1, capacity=POSITIONS, **drafts)
        got = engine.submit(prompt, max_new_tokens=new, eos_token_id=())
        assert got.result() == expected.result() and len(got.result().tokens) == new


def test_an_assistant_with_fewer_positions() -> None:
    decoding, draft = decoding_of(*LLAMA), noisy(*LLAMA)
    engine = decoding.engine(max_requests=2, capacity=90, assistant_model=draft, **SURE)
    drafts_of(engine)._capacity = 50
    prompts = [random_tokens(n, n).tolist() for n in (20, 60)]
    requests = [engine.submit(prompt, max_new_tokens=30, eos_token_id=()) for prompt in prompts]
    finish(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        expected = alone(decoding, prompt, max_new_tokens=30, eos_token_id=())
        assert request.result() == expected


def test_heuristic_schedule() -> None:
    decoding = decoding_of(*LLAMA)
    engine = decoding.engine(
        max_requests=1, capacity=CAPACITY, assistant_model=decoding, num_assistant_tokens=2,
        num_assistant_tokens_schedule="heuristic_transient", **SURE,
    )  # fmt: skip
    prompt = random_tokens(9).tolist()
    got = engine.submit(prompt, **LONG).result()
    assert got == alone(decoding, prompt, **LONG)
    assert engine.stats.steps == 1 + 6  # 3 + 5 + 7 + 9 + 9 + 6 tokens


def test_an_unsure_assistant_drafts_less() -> None:
    decoding, draft = decoding_of(*LLAMA), noisy(*LLAMA)
    counts = []
    for threshold in (0.0, 0.3, 1.0):
        engine = decoding.engine(
            max_requests=1, capacity=CAPACITY, assistant_model=draft,
            assistant_confidence_threshold=threshold,
        )  # fmt: skip
        engine.submit(random_tokens(9).tolist(), **LONG).result()
        counts.append(engine.stats.drafted_tokens / engine.stats.steps)
    assert counts[0] > counts[1] > counts[2] and counts[2] <= 1


@pytest.mark.parametrize("kind", [AssistantDrafts, LookupDrafts])
@pytest.mark.parametrize("method", ["begin", "propose", "end"])
def test_drafts_that_fail(kind: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = decoding_of(*LLAMA)
    prompts = [random_tokens(12, n).tolist() for n in range(3)]
    expected = [alone(decoding, prompt, seed=1, **LONG) for prompt in prompts]
    of = {"assistant_model": decoding, **SURE}
    if kind is LookupDrafts:
        of = {"prompt_lookup_num_tokens": 3}
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, **of)
    works = getattr(kind, method)
    calls = []

    def fails(*arguments: Any) -> Any:
        calls.append(method)
        if len(calls) > 2 or (method == "begin" and len(calls) > 1):
            raise MemoryError("no room for drafts")
        return works(*arguments)

    monkeypatch.setattr(kind, method, fails)
    with pytest.warns(RuntimeWarning, match="go on without drafts: no room for drafts"):
        requests = [engine.submit(prompt, seed=1, **LONG) for prompt in prompts]
        finish(engine)
    assert [request.result() for request in requests] == expected and is_whole(engine)


def test_prompts_that_begin_alike_are_read_once() -> None:
    decoding = decoding_of(*LLAMA)
    engine = decoding.engine(
        max_requests=4, capacity=CAPACITY, max_step_tokens=16, assistant_model=noisy(*LLAMA)
    )
    begin = random_tokens(64).tolist()
    requests = [
        engine.submit([*begin, n + 3], max_new_tokens=30, eos_token_id=()) for n in range(6)
    ]
    finish(engine)
    assert all(request.stats.new_tokens == 30 for request in requests)
    reader = drafts_of(engine)._reader
    assert reader.prompt_tokens == 64 + 6 and reader.cached_tokens == 5 * 64
    assert is_empty(drafts_of(engine))


def test_a_step_that_fails() -> None:
    decoding, prompt = decoding_of(*LLAMA), random_tokens(12, 1).tolist()
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, assistant_model=decoding, **SURE)
    steps: Any = engine._model
    forward = steps.caches.forward
    requests = [engine.submit(prompt, **LONG) for _ in range(2)]
    for _ in range(3):
        engine.step()

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    steps.caches.forward = fails
    with pytest.raises(MemoryError):
        engine.step()
    steps.caches.forward = forward
    assert all(request.finish_reason == "error" for request in requests)
    assert is_empty(drafts_of(engine)) and is_whole(engine)
    assert engine.submit(prompt, **LONG).result() == alone(decoding, prompt, **LONG)


def test_an_interrupt_at_any_line_holds_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, prompt = decoding_of(*LLAMA), random_tokens(12, 1).tolist()
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": ()}
    engine = decoding.engine(max_requests=2, capacity=CAPACITY, assistant_model=decoding, **SURE)
    check_interrupts(
        monkeypatch,
        engine,
        lambda: [engine.submit(prompt, **options)],
        [outcome(alone(decoding, prompt, **options))],
        lambda: is_empty(drafts_of(engine)),
    )


def test_bad_input() -> None:
    decoding = decoding_of(*LLAMA)
    other: Any = lmdecode.Decoding.__new__(lmdecode.Decoding)
    config = dataclasses.replace(decoding.decoder.config, vocab_size=50)  # type: ignore[type-var]
    other.decoder = object.__new__(type(decoding.decoder))
    other.decoder.config = config
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"assistant_model": "x"}, TypeError, "assistant_model is of type str; expected a lmdeco"),
        ({"assistant_model": torch.nn.Linear(2, 2)}, TypeError, "assistant_model is of type Line"),
        ({"assistant_model": other}, ValueError, "a vocabulary of 50 tokens; expected 101"),
        ({"assistant_model": decoding, "num_assistant_tokens": 0}, ValueError, "s is 0; expec"),
        ({"assistant_model": decoding, "num_assistant_tokens": 1.0}, TypeError, "type float"),
        ({"assistant_model": decoding, "assistant_confidence_threshold": 1.5}, ValueError,
         "assistant_confidence_threshold is 1.5; expected 0 to 1"),
        ({"assistant_model": decoding, "num_assistant_tokens_schedule": "heuristic"}, ValueError,
         "num_assistant_tokens_schedule is 'heuristic'"),
        ({"assistant_model": decoding, "prompt_lookup_num_tokens": 3}, ValueError,
         "prompt_lookup_num_tokens is 3; expected None with an assistant_model"),
        ({"prompt_lookup_num_tokens": 0}, ValueError, "prompt_lookup_num_tokens is 0"),
    ]  # fmt: skip
    for arguments, error, message in wrong:
        with pytest.raises(error, match=f"^Decoding.engine: .*{message}"):
            decoding.engine(max_requests=1, capacity=9, **arguments)


MTP_CASES = [
    ("qwen3_5_text", "plain"), ("qwen3_5_text", "delta rule last, biases"),
    ("qwen3_next", "experts and dense layers"),
]  # fmt: skip
MTP: dict[str, Any] = {"assistant_model": "mtp"}


@functools.cache
def loaded(case: tuple[str, str], size: float | None = None) -> tuple[MtpModel, lmdecode.Decoding]:
    """Return a model with random weights, or one that agrees by ``size``, and its ``Decoding``."""
    model = mtp_model(*case) if size is None else agreeing_model(*case, size)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(model, Path(folder))
        return model, lmdecode.Decoding.from_pretrained(folder, mtp=True)


def mtp_drafts_of(engine: lmdecode.Engine) -> MtpDrafts:
    drafts: Any = engine._model
    found = drafts._drafts._source
    assert isinstance(found, MtpDrafts)
    return found


def chained(model: MtpModel, tokens: list[int], count: int) -> list[int]:
    """Return the tokens that are drafted greedily behind a text, from plain torch."""
    text = torch.tensor(tokens)
    ids, hidden = text[1:], model.hidden(text[:-1])
    drafted = []
    for _ in range(count):
        logits, own = model.read(ids, hidden)
        drafted.append(int(logits[-1].argmax()))
        ids = torch.cat((ids, torch.tensor(drafted[-1:])))
        hidden = torch.cat((hidden, own[-1:]))
    return drafted


@pytest.mark.parametrize("case", MTP_CASES, ids=", ".join)
@pytest.mark.parametrize("size", [None, 0.02])
def test_mtp_in_any_company(case: tuple[str, str], size: float | None) -> None:
    _, decoding = loaded(case, size)
    expected, _ = draw(decoding)
    for options in (
        {"num_assistant_tokens": 4, **SURE},
        {"assistant_confidence_threshold": 0.2},
        {"num_assistant_tokens_schedule": "heuristic_transient", **SURE},
    ):
        got, engine = draw(decoding, **MTP, **options)
        assert got == expected
        assert is_whole(engine)
        drafts = mtp_drafts_of(engine)
        assert not drafts._texts and drafts._sampled.is_empty
        assert engine.stats.drafted_tokens > 0
        assert size is None or engine.stats.accepted_tokens > engine.stats.drafted_tokens / 3


@pytest.mark.parametrize("case", MTP_CASES, ids=", ".join)
def test_drafts_are_those_of_plain_torch(
    case: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, decoding = loaded(case, 0.3 if case[0] == "qwen3_5_text" else None)
    engine = decoding.engine(
        max_requests=2, capacity=CAPACITY, max_step_tokens=11, num_assistant_tokens=3, **MTP, **SURE
    )
    found: list[tuple[list[int], list[int]]] = []
    texts: dict[int, list[int]] = {}
    begin, propose = MtpDrafts.begin, MtpDrafts.propose

    def note_begin(self: MtpDrafts, row: int, prompt: Any, *others: Any) -> None:
        texts[row] = list(prompt)
        begin(self, row, prompt, *others)

    def note(self: MtpDrafts, asks: Any) -> list[list[int]]:
        drafts = propose(self, asks)
        for ask, draft in zip(asks, drafts, strict=True):
            texts[ask.row] += ask.new
            if draft:
                found.append((list(texts[ask.row]), draft))
        return drafts

    monkeypatch.setattr(MtpDrafts, "begin", note_begin)
    monkeypatch.setattr(MtpDrafts, "propose", note)
    prompts = [random_tokens(30 + number, number).tolist() for number in range(2)]
    requests = [engine.submit(p, max_new_tokens=24, eos_token_id=()) for p in prompts]
    finish(engine)
    assert all(request.finished for request in requests) and len(found) > 10
    for text, draft in found:
        assert draft == chained(model, text, len(draft))


def test_a_layer_that_agrees_saves_steps() -> None:
    _, decoding = loaded(MTP_CASES[0], 0.0)
    engine = decoding.engine(
        max_requests=2, capacity=CAPACITY, num_assistant_tokens=3, **MTP, **SURE
    )
    prompts = [random_tokens(9, number).tolist() for number in range(2)]
    requests = [engine.submit(p, max_new_tokens=41, eos_token_id=()) for p in prompts]
    finish(engine)
    assert all(request.finished for request in requests)
    stats = engine.stats
    assert stats.accepted_tokens == stats.drafted_tokens == 60
    assert stats.steps == 1 + 10


def test_prefixes_are_shared() -> None:
    """The layer has of a shared prefix what it read, but for the pair at its end."""
    _, decoding = loaded(MTP_CASES[0])
    engine = decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=40, **MTP, **SURE)
    prefix = random_tokens(64).tolist()
    plain = decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=40)
    for tail in ([5], [6, 7, 8], [9, 4]):
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ()}
        got = engine.submit(prefix + tail, **options)
        finish(engine)
        assert got.result().tokens == plain.submit(prefix + tail, **options).result().tokens
    assert engine.stats.cached_tokens > 100
    rows = [row for row in mtp_drafts_of(engine)._rows if row.position]
    assert all(row.gap <= 2 < 60 < row.read for row in rows)


def test_chat_goes_on_and_beams_run_beside() -> None:
    _, decoding = loaded(MTP_CASES[0], 0.05)
    given: dict[str, Any] = {"max_requests": 6, "capacity": CAPACITY, "max_step_tokens": 40}
    engines = [decoding.engine(**given, **MTP, **SURE), decoding.engine(**given)]
    texts = []
    for engine in engines:
        first = engine.submit(random_tokens(40).tolist(), max_new_tokens=20, eos_token_id=())
        search = engine.submit(random_tokens(40).tolist(), max_new_tokens=20, num_beams=3)
        finish(engine)
        prompt = [*random_tokens(40).tolist(), *first.result().tokens, 5, 6]
        second = engine.submit(prompt, max_new_tokens=20, eos_token_id=())
        finish(engine)
        texts.append([first.result().tokens, search.result().tokens, second.result().tokens])
    assert texts[0] == texts[1]


def test_what_is_refused() -> None:
    model, decoding = loaded(MTP_CASES[0])
    sizes: dict[str, Any] = {"max_requests": 1, "capacity": 90}
    with pytest.raises(TypeError, match=r"assistant_model is of type str; expected .*'mtp'"):
        decoding.engine(**sizes, assistant_model="eagle")
    without = lmdecode.Decoding.from_pretrained(model.model)
    with pytest.raises(ValueError, match="assistant_model is 'mtp' for a model without these wei"):
        without.engine(**sizes, **MTP)
