"""``Decoding.batch()`` of a decoder-only model: sequences that come, go and share."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.decoder.causal_batch import CausalBatch
from tests.support.causal_models import VOCAB, random_model, random_tokens

MODEL = ("gemma2", "plain")  # local and global layers
LENGTHS = (40, 3, 17, 1, 25)
NEW = 12


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model(*MODEL))


def _alone(decoding: lmdecode.Decoding, prompt: torch.Tensor, new: int = NEW) -> list[Any]:
    """Logits of each step of greedy search, with nothing else in the batch."""
    batch = decoding.batch(max_requests=1, capacity=100)
    request, kept = batch.add(prompt), []
    tokens: dict[Any, int] = {}
    for _ in range(new):
        logits = batch.step(tokens)[request]
        kept.append(logits)
        tokens = {request: int(logits.argmax())}
    return kept


@pytest.mark.parametrize("max_step_tokens", [3, 8, 512])
def test_any_company_and_any_parts_of_prompts(
    decoding: lmdecode.Decoding, max_step_tokens: int
) -> None:
    """Requests wait for a place, and leave when they have their tokens; bits are those alone."""
    prompts = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    batch = decoding.batch(max_requests=3, capacity=100, max_step_tokens=max_step_tokens)
    waiting, kept = list(range(len(prompts))), [list[Any]() for _ in prompts]
    tokens: dict[Any, int] = {}
    while waiting or batch.running:
        while waiting and batch.free_places:
            number = waiting.pop(0)
            assert batch.add(prompts[number].tolist(), request_id=number) == number
        logits, tokens = batch.step(tokens), {}
        for number, row in logits.items():
            kept[number].append(row)
            assert batch.length(number) == LENGTHS[number] + len(kept[number]) - 1
            if len(kept[number]) == NEW:
                batch.remove(number)
            else:
                tokens[number] = int(row.argmax())
    for prompt, rows in zip(prompts, kept, strict=True):
        assert torch.equal(torch.stack(rows), torch.stack(_alone(decoding, prompt)))


def test_a_long_prompt_does_not_hold_others_up(decoding: lmdecode.Decoding) -> None:
    batch = decoding.batch(max_requests=2, capacity=100, max_step_tokens=10)
    short = batch.add(random_tokens(4))
    row = batch.step()[short]
    long = batch.add(random_tokens(60, 1))
    for step in range(1, 7):
        logits = batch.step({short: int(row.argmax())})
        assert list(logits) == [short]
        assert batch.unread(long) == 60 - 9 * step
        row = logits[short]
    assert list(batch.step({short: int(row.argmax())})) == [short, long]
    assert list(batch.step()) == []  # both wait for their tokens


def test_forks_go_on_from_what_was_read(decoding: lmdecode.Decoding) -> None:
    prompt = random_tokens(21)
    batch = decoding.batch(max_requests=3, capacity=60)
    first = batch.add(prompt)
    batch.step()
    second = batch.fork(first, request_id="second")
    assert second == "second" and batch.length(second) == 21
    ends = {first: [5, 6, 7], second: [8, 9, 10]}
    for step in range(3):
        logits = batch.step({request: tokens[step] for request, tokens in ends.items()})
    batch.remove(first)  # what they share stays
    for request, tokens in ends.items():
        other = decoding.batch(max_requests=1, capacity=60)
        alone = other.add(prompt)
        other.step()
        for token in tokens:
            row = other.step({alone: token})[alone]
        assert torch.equal(row, logits[request])


def test_tokens_are_taken_back_and_a_talk_goes_on(decoding: lmdecode.Decoding) -> None:
    prompt, turn = random_tokens(10), random_tokens(6, 3)
    batch = decoding.batch(max_requests=1, capacity=60)
    request = batch.add(prompt)
    batch.step()
    for token in (5, 6):
        batch.step({request: token})
    batch.truncate(request, 11)
    row = batch.step({request: 7})[request]
    other = decoding.batch(max_requests=1, capacity=60)
    alone = other.add(prompt)
    other.step()
    for token in (5, 7):
        expected = other.step({alone: token})[alone]
    assert torch.equal(row, expected)
    batch.extend(request, turn)
    assert batch.unread(request) == 6
    other.extend(alone, turn.tolist()[:2])
    other.extend(alone, turn.tolist()[2:])
    assert torch.equal(batch.step()[request], other.step()[alone])


def test_what_is_refused(decoding: lmdecode.Decoding) -> None:
    batch = decoding.batch(max_requests=2, capacity=20, max_step_tokens=8)
    assert isinstance(batch, CausalBatch)
    request = batch.add([3, 4], request_id="a")
    cases: list[tuple[Any, str]] = [
        (lambda: batch.add([]), "there are no tokens"),
        (lambda: batch.add([VOCAB]), f"a token is {VOCAB}; expected 0 to {VOCAB - 1}"),
        (lambda: batch.add([3] * 21), "21 tokens behind 0; expected at most 20"),
        (lambda: batch.add([3], request_id="a"), "request_id 'a' is in use"),
        (lambda: batch.add(torch.zeros(2)), "tensor of shape .2. and dtype torch.float32"),
        (lambda: batch.step({"b": 3}), "there is no request 'b'"),
        (lambda: batch.step({"a": 3}), "whose prompt have not been read"),
        (lambda: batch.fork("a"), "2 tokens of request 'a' have not been read"),
        (lambda: batch.truncate("a", 1), "length is 1; expected 0 to 0"),
        (lambda: batch.remove("b"), "there is no request 'b'"),
        (lambda: decoding.batch(max_requests=0, capacity=9), "max_requests is 0"),
        (lambda: decoding.batch(max_requests=1, capacity=0), "capacity is 0"),
        (lambda: decoding.batch(max_requests=1, capacity=9, num_beams=2), "num_beams is given"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    for prompt in ("text", 3, [1.5]):
        with pytest.raises(TypeError, match="expected"):
            batch.add(prompt)
    for tokens in ([5, 6], 5, "a"):
        with pytest.raises(TypeError, match=r"^CausalBatch\.step: tokens is of type .* a mapping"):
            batch.step(tokens)  # type: ignore[arg-type]
    other = batch.add([5])
    with pytest.raises(ValueError, match="2 sequences run; expected a free place"):
        batch.add([5])
    assert list(batch.step()) == [request, other]
    with pytest.raises(ValueError, match=r"^CausalBatch\.fork: 2 sequences run; expected a free"):
        batch.fork(request)
    before = batch.length(request)
    with pytest.raises(ValueError, match="a token is -1"):
        batch.step({request: 3, other: -1})
    assert batch.length(request) == before
    learned = lmdecode.Decoding.from_pretrained(random_model("gpt2", "plain"))
    with pytest.raises(ValueError, match="capacity is 257; expected 1 to 256"):
        learned.batch(max_requests=1, capacity=257)


def test_threads_take_turns(decoding: lmdecode.Decoding) -> None:
    """Their steps share caches and scratch: each gets the logits that it gets alone."""
    prompts = [random_tokens(30, seed) for seed in range(4)]
    batch = decoding.batch(max_requests=len(prompts), capacity=200)
    first = {batch.add(prompt): None for prompt in prompts}
    logits = batch.step()
    assert logits.keys() == first.keys()

    def answer(request: Any) -> list[torch.Tensor]:
        kept = [logits[request]]
        for _ in range(NEW * 8 - 1):
            kept.append(batch.step({request: int(kept[-1].argmax())})[request])
        return kept

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(answer, first))
    for prompt, rows in zip(prompts, answers, strict=True):
        alone = decoding.batch(max_requests=1, capacity=200)
        request, tokens = alone.add(prompt), dict[Any, int]()
        for row in rows:
            assert torch.equal(row, alone.step(tokens)[request])
            tokens = {request: int(row.argmax())}


def test_a_length_behind_which_a_window_has_let_go(decoding: lmdecode.Decoding) -> None:
    batch = decoding.batch(max_requests=1, capacity=200)
    batch.add(random_tokens(150), request_id="a")
    batch.step()
    message = r"^CausalBatch\.truncate: length is 5 for request 'a', which has 150 tokens; expected"
    with pytest.raises(ValueError, match=message):
        batch.truncate("a", 5)
    assert batch.length("a") == 150


Trace = tuple[tuple[bool, tuple[int, ...]], ...]  # (whether of a prompt, tokens), in order


def _replayed(decoding: lmdecode.Decoding, trace: Trace) -> torch.Tensor:
    """Return the logits after the last token of a sequence that is alone in a batch."""
    batch, request = decoding.batch(max_requests=1, capacity=200), None
    row: dict[Any, torch.Tensor] = {}
    for is_prompt, tokens in trace:
        if request is None:
            request = batch.add(tokens)
            row = batch.step()
        elif is_prompt:
            batch.extend(request, tokens)
            row = batch.step()
        else:
            for token in tokens:
                row = batch.step({request: token})
    return row[request]


def _cut(trace: Trace, length: int) -> Trace:
    kept = []
    for is_prompt, tokens in trace:
        if tokens[:length]:
            kept.append((is_prompt, tokens[:length]))
        length -= len(tokens[:length])
    return tuple(kept)


@pytest.mark.parametrize("seed", range(6))
def test_prompts_with_common_prefixes_in_any_order_of_calls(seed: int) -> None:
    """What sequences share, extend and take back changes no bit of another."""
    decoding = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))
    choice = random.Random(seed)
    common = [random_tokens(70, 1).tolist(), random_tokens(40, 2).tolist()]
    batch = decoding.batch(
        max_requests=4, capacity=200, max_step_tokens=choice.choice((9, 33, 512))
    )
    traces, ready, checked = dict[Any, Trace](), dict[Any, torch.Tensor](), 0
    for number in range(150):
        what, names = choice.random(), list(batch.running)
        name = choice.choice(names) if names else None
        tail = tuple(choice.randrange(5, VOCAB) for _ in range(choice.randint(1, 6)))
        if what < 0.25 and batch.free_places:
            prompt = (*choice.choice(common)[: choice.randint(30, 70)], *tail)
            name = batch.add(prompt, request_id=number)
            traces[name] = ((True, prompt),)
        elif what < 0.35 and name is not None and batch.length(name) < 120:
            batch.extend(name, tail)
            traces[name] = (*traces[name], (True, tail))
            ready.pop(name, None)
        elif what < 0.45 and name in ready and batch.free_places:
            traces[batch.fork(name, request_id=number)] = traces[name]
        elif what < 0.55 and name is not None and batch.length(name) > 1:
            length = choice.randint(1, batch.length(name) - 1)
            batch.truncate(name, length)
            traces[name] = _cut(traces[name], length)
            ready[name] = torch.empty(0)
        elif what < 0.62 and name is not None:
            batch.remove(name)
            ready.pop(name, None)
            del traces[name]
        else:
            tokens = {one: choice.randrange(5, VOCAB) for one in ready if choice.random() < 0.7}
            for one, row in batch.step(tokens).items():
                if one in tokens:
                    traces[one] = (*traces[one], (False, (tokens[one],)))
                ready[one] = row
                assert torch.equal(row, _replayed(decoding, traces[one]))
                checked += 1
    assert checked > 40


def test_a_sequence_that_waits_for_a_prefix_is_taken_back(decoding: lmdecode.Decoding) -> None:
    first, other = random_tokens(40, 1).tolist(), random_tokens(40, 2).tolist()
    batch = decoding.batch(max_requests=2, capacity=100)
    batch.add(first)
    waiting = batch.add(first)
    batch.truncate(waiting, 0)
    batch.extend(waiting, other)
    rows = batch.step() | batch.step()
    assert torch.equal(rows[waiting], _alone(decoding, torch.tensor(other), 1)[0])


def test_an_extended_prompt_keeps_its_turn(decoding: lmdecode.Decoding) -> None:
    batch = decoding.batch(max_requests=2, capacity=100, max_step_tokens=8)
    batch.add([3, 4], request_id="a")
    batch.step()
    batch.add(random_tokens(20), request_id="long")
    batch.extend("a", [5])
    assert [list(batch.step()) for _ in range(3)] == [["a"], [], ["long"]]
