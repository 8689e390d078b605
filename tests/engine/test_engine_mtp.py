"""``Engine`` with ``assistant_model="mtp"``: the texts of an engine without, and its drafts."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.decoder.engine.model_drafts import MtpDrafts
from tests.engine.engine_cases import CAPACITY, is_whole
from tests.engine.test_engine_drafts import draw, finish
from tests.support.causal_models import random_tokens
from tests.support.mtp_models import MtpModel, agreeing_model, mtp_model, write_folder

CASES = [
    ("qwen3_5_text", "plain"), ("qwen3_5_text", "delta rule last, biases"),
    ("qwen3_next", "experts and dense layers"),
]  # fmt: skip
SURE: dict[str, Any] = {"assistant_confidence_threshold": 0.0}
MTP: dict[str, Any] = {"assistant_model": "mtp"}


@functools.cache
def loaded(case: tuple[str, str], size: float | None = None) -> tuple[MtpModel, lmdecode.Decoding]:
    """Return a model with random weights, or one that agrees by ``size``, and its ``Decoding``."""
    model = mtp_model(*case) if size is None else agreeing_model(*case, size)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(model, Path(folder))
        return model, lmdecode.Decoding.from_pretrained(folder, mtp=True)


def drafts_of(engine: lmdecode.Engine) -> MtpDrafts:
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


@pytest.mark.parametrize("case", CASES, ids=", ".join)
@pytest.mark.parametrize("size", [None, 0.02])
def test_requests_of_every_kind_in_any_company(case: tuple[str, str], size: float | None) -> None:
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
        drafts = drafts_of(engine)
        assert not drafts._texts and drafts._sampled.is_empty
        assert engine.stats.drafted_tokens > 0
        assert size is None or engine.stats.accepted_tokens > engine.stats.drafted_tokens / 3


@pytest.mark.parametrize("case", CASES, ids=", ".join)
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
    _, decoding = loaded(CASES[0], 0.0)
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
    _, decoding = loaded(CASES[0])
    engine = decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=40, **MTP, **SURE)
    prefix = random_tokens(64).tolist()
    plain = decoding.engine(max_requests=3, capacity=CAPACITY, max_step_tokens=40)
    for tail in ([5], [6, 7, 8], [9, 4]):
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ()}
        got = engine.submit(prefix + tail, **options)
        finish(engine)
        assert got.result().tokens == plain.submit(prefix + tail, **options).result().tokens
    assert engine.stats.cached_tokens > 100
    rows = [row for row in drafts_of(engine)._rows if row.position]
    assert all(row.gap <= 2 < 60 < row.read for row in rows)


def test_chat_goes_on_and_beams_run_beside() -> None:
    _, decoding = loaded(CASES[0], 0.05)
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
    model, decoding = loaded(CASES[0])
    sizes: dict[str, Any] = {"max_requests": 1, "capacity": 90}
    with pytest.raises(TypeError, match=r"assistant_model is of type str; expected .*'mtp'"):
        decoding.engine(**sizes, assistant_model="eagle")
    without = lmdecode.Decoding.from_pretrained(model.model)
    with pytest.raises(ValueError, match="assistant_model is 'mtp' for a model without these wei"):
        without.engine(**sizes, **MTP)
