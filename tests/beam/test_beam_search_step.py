"""The op that does a step of ``BeamSearch``, against the ops that it is made of."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmdecode import BeamRequest, BeamSearch, Trie
from lmdecode.beam.engine import search as beam_search
from lmdecode.beam.engine.step import Chooser, make_plan
from tests.support.beam_passes import PassChooser
from tests.support.beam_searches import random_request
from tests.support.cases import bits

VOCAB = 40


def random_life(seed: int) -> list[Any]:
    """Requests of every kind that come, go and are cancelled; return all that they gave."""
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    traces: list[Any] = []
    engine = BeamSearch(on_step=traces.append if seed % 2 else None)
    tries = [
        Trie([[choice.randrange(VOCAB) for _ in range(choice.randint(1, 4))] for _ in range(9)])
        for _ in range(2)
    ]
    source = 5 * (seed % 3 > 0)
    given: list[Any] = []
    for _ in range(40):
        if choice.random() < 0.3:
            engine.insert(_random_request(choice, tries, source > 0))
        if engine.running and choice.random() < 0.05:
            given.append(engine.cancel(choice.choice(engine.running)))
        logits = torch.randn(engine.num_rows, VOCAB, generator=generator) * 2
        if choice.random() < 0.3:
            logits = logits.round()
        if choice.random() < 0.1:
            logits[:, choice.randrange(VOCAB)] = choice.choice((float("nan"), float("inf")))
        if choice.random() < 0.1:
            logits[:, 2:] = -float("inf")
        options: dict[str, Any] = {}
        if source:
            options["attention"] = torch.rand(engine.num_rows, source, generator=generator)
        if choice.random() < 0.2:
            words = (engine.num_rows, -(-VOCAB // 32))
            options["token_bitmask"] = torch.randint(1 << 30, words, generator=generator).int()
        if choice.random() < 0.3:
            logits = logits.t().contiguous().t()
        dtype = choice.choice((torch.float32, torch.bfloat16))
        given += engine.step(logits.to(dtype), **options)
        given.append(engine.input_ids())
        for result in engine.pop_finished():
            given += [result.sequences, result.scores, result.log_probs, result.status]
    return [*given, repr(traces)]


def _random_request(choice: random.Random, tries: list[Trie], covers: bool) -> BeamRequest:
    request = random_request(choice, VOCAB)
    if request.dialect == "scorer":
        return request
    changes: dict[str, Any] = {"coverage_penalty": choice.choice((0.0, 0.3)) if covers else 0.0}
    if request.num_beam_groups == 1 and choice.random() < 0.4:
        changes["trie"] = choice.choice(tries)
    return replace(request, **changes)


def _assert_same(left: Any, right: Any, case: object) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(bits(left), bits(right)), case
    elif isinstance(left, tuple | list):
        assert len(left) == len(right), case
        for pair in zip(left, right, strict=True):
            _assert_same(*pair, case)
    else:
        assert left == right, case


@pytest.mark.parametrize("seed", range(12))
def test_op_chooses_as_the_ops_it_is_made_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_op = random_life(seed)
    monkeypatch.setattr(beam_search, "Chooser", PassChooser)
    _assert_same(by_op, random_life(seed), seed)


def step_arguments(**changes: Any) -> list[Any]:
    """Return arguments of the op: a search of two groups, and one that has just begun."""
    engine = BeamSearch(VOCAB)
    engine.insert(
        BeamRequest([1, 2], max_new_tokens=4, num_beams=4, num_beam_groups=2,
                    diversity_penalty=0.5, eos_token_id=[2], pad_token_id=0)
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    engine.step(torch.randn(1, VOCAB, generator=generator))
    engine.insert(
        BeamRequest([3], max_new_tokens=4, num_beams=3, eos_token_id=[2], pad_token_id=0,
                    trie=Trie([[4, 2], [5, 2]]), repetition_penalty=1.2)
    )  # fmt: skip
    store = engine._store
    plan = make_plan(engine._running)
    chooser = Chooser(plan, store, VOCAB)
    arguments = {
        "logits": torch.randn(engine.num_rows, VOCAB, generator=generator),
        "state": chooser._state,
        "parameters": chooser._parameters,
        "rules": chooser._rules,
        "searches": chooser._searches,
        "nodes": chooser._nodes,
        "passes": chooser._passes,
        "num_candidates": chooser._count,
        "next_rows": plan.num_next_rows,
        "token_bitmask": torch.full((engine.num_rows, 2), -1, dtype=torch.int32),
        "bonus": torch.zeros(3, store.num_beams),
        "fills_missing": False,
        "greedy": False,
        "trace": chooser._new_trace(),
    }
    assert not set(changes) - set(arguments)
    return list({**arguments, **changes}.values())


def _with(place: tuple[int, int], value: int) -> torch.Tensor:
    searches = step_arguments()[4].clone()
    searches[place] = value
    return searches


def _rules(number: int, value: torch.Tensor) -> list[torch.Tensor]:
    rules = list(step_arguments()[3])
    rules[number] = value
    return rules


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(5, 0)}, "expected a vocabulary of 1"),
    ({"state": []}, "state has 0 tensors; expected the 14"),
    ({"parameters": []}, "parameters has 0 tensors; expected the 8"),
    ({"rules": []}, "token_rules has 0 tensors"),
    ({"rules": _rules(0, torch.tensor([1.0, -1.0, 1.0]))}, r"repetition_penalty\[1\] is -1"),
    ({"rules": _rules(5, torch.ones(3, 4, dtype=torch.int64))}, r"timestamps\[0\] is"),
    ({"searches": _with((0, 0), 99)}, r"slots\[0\] is 99; expected 0 to"),
    ({"searches": _with((1, 0), 0)}, "expected each slot once"),
    ({"searches": _with((1, 1), 3)}, r"searches.rule_row\[1\] is 3; expected 0 to 2"),
    ({"searches": _with((1, 2), 3)}, r"searches.rules\[1\] is 3; expected 0 to 2"),
    ({"searches": _with((2, 3), -1)}, r"searches.first_row\[2\] is -1; expected 0 to 3"),
    ({"searches": _with((0, 4), 3)}, r"searches.num_rows\[0\] is 3; expected 2 to 2"),
    ({"searches": _with((1, 5), 0)}, r"searches.pass_row\[1\] is 0; expected 2 to 2"),
    ({"searches": _with((2, 6), 6)}, r"searches.next_row\[2\] is 6; expected 0 to 5"),
    ({"searches": _with((2, 7), 5)}, r"searches.next_end\[2\] is 5; expected 4 to 4"),
    ({"passes": [2, 3, 0, 1]}, "passes has 4 numbers; expected three for each pass"),
    ({"passes": [2, 3, 0]}, "passes has 2 searches; expected all of searches, 3"),
    ({"passes": [2, 4, 0, 1, 2, 2]}, r"passes.rows\[0\] is 4; expected 3 to 3"),
    ({"passes": [2, 3, 0, 1, 2, 2, 0, 1, 0]}, r"passes.rows\[2\] is 1; expected 0 to 0"),
    ({"passes": [2, 1 << 40, 0, 1, 2, 2]}, r"passes.rows\[0\] is 1099511627776; expected 2 to 7"),
    ({"passes": [2, 3, -1, 1, 2, 2]}, r"passes.num_earlier\[0\] is -1; expected 0 to 7"),
    ({"num_candidates": 0}, r"num_candidates\[0\] is 0"),
    ({"next_rows": 8}, "next_rows is 8; expected the beams of all searches, 7"),
    ({"searches": _with((2, 6), 3) + _with((2, 7), 5) - step_arguments()[4]},
     r"searches.next_row\[2\] is 3; expected beams of its own"),
    ({"searches": torch.zeros(0, 9, dtype=torch.int64), "passes": []},
     "next_rows is 7; expected the beams of all searches, 0"),
    ({"logits": torch.zeros(1, VOCAB).expand(1 << 40, VOCAB)}, "num_candidates is 6 for 10995116"),
    ({"trace": [torch.zeros(3, 8)]}, "trace has 1 tensors; expected 6"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments_change_nothing(changes: dict[str, Any], message: str) -> None:
    arguments = step_arguments(**changes)
    before = [tensor.clone() for tensor in arguments[1]]
    with pytest.raises(ValueError, match=message):
        torch.ops.lmdecode.beam_search_step_(*arguments)
    for kept, tensor in zip(before, arguments[1], strict=True):
        assert torch.equal(bits(tensor), bits(kept))


@pytest.mark.parametrize("name", ["searches", "parameters"])
def test_what_is_written_is_none_of_what_is_read(name: str) -> None:
    arguments = step_arguments()
    state, parameters, searches = arguments[1], list(arguments[2]), arguments[4]
    if name == "searches":
        arguments[4] = state[0].view(-1)[: searches.numel()].view_as(searches).copy_(searches)
    else:
        parameters[0] = state[4].copy_(parameters[0])
        arguments[2] = parameters
    with pytest.raises(ValueError, match=f"{name} shares memory with what is written"):
        torch.ops.lmdecode.beam_search_step_(*arguments)
