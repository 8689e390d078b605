"""``beam_step``: equal to the reference bit by bit, and a request's result is its own alone."""

import math
import re
from typing import Any

import pytest
import torch
from random_searches import DIALECTS, Search, check_refused, clone, new_search, random_search
from torch import Tensor

from lmdecode import BeamParameters, BeamState, BeamStep, beam_parameters, beam_step, new_beam_state
from lmdecode.beam.state import DECISIONS
from lmdecode.beam.types import STATUS_CONTINUATIONS
from lmdecode.reference import beam_step as reference
from tests.support.cases import assert_same_bits

INF, NAN = float("inf"), float("nan")


def to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def on_device(search: Search, arguments: dict[str, Any], device: torch.device) -> tuple:
    """State, parameters and arguments of a call on a device, the state's tensors copied."""
    state = BeamState(*(part.clone().to(device) for part in search.state))
    parameters = BeamParameters(*(part.to(device) for part in search.parameters))
    given = {name: to(value, device) for name, value in arguments.items()}
    if device.type != "cpu" and "row_offsets" in given:
        given["rows"] = int(arguments["row_offsets"][-1])
    return state, parameters, given


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))]
)
def test_equals_the_reference(part: int, device: torch.device) -> None:
    """Hundreds of searches, many steps each; every fourth brings its own sequences."""
    seen: set[str] = set()

    def check(search: Search, arguments: dict[str, Any]) -> BeamStep:
        state, parameters, given = on_device(search, arguments, device)
        got = beam_step(state, parameters, **given)
        want = reference(search.state, search.parameters, **arguments)
        assert_same_bits(got, want, arguments)
        assert_same_bits(state, search.state, arguments)
        seen.update(DECISIONS[value] for value in (want.decisions & 7).flatten().tolist())
        return want

    for seed in range(part * 500, (part + 1) * 500):
        random_search(seed, check, kept=seed % 4 != 0)
    assert seen == set(DECISIONS)


def test_rows_of_zero_requests_and_zero_candidates() -> None:
    state, parameters = new_beam_state(2, 3, 5), beam_parameters(2, 3)
    none = torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int64)
    step = beam_step(state, parameters, none[0], none[1], none[1])
    assert [tuple(part.shape) for part in step] == [(0,), (0,), (0,), (0, 4)]
    no_candidates = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64)
    want_state = clone(state)
    step = beam_step(state, parameters, no_candidates[0], no_candidates[1], no_candidates[1])
    want = reference(want_state, parameters, no_candidates[0], no_candidates[1], no_candidates[1])
    assert_same_bits(step, want)
    assert_same_bits(state, want_state)
    assert step.scores.tolist() == [-INF] * 6 and state.done.tolist() == [1, 1]


def one_request(
    dialect: str, scores: list[float], tokens: list[int], beams: list[int], **options: Any
) -> tuple[BeamState, BeamStep]:
    """Two beams of a prompt of two tokens; the end token is 9."""
    state = new_beam_state(1, 2, 6, keep_beam_indices=True, keep_log_probs=True)
    state.sequences[0, :, :2] = torch.tensor([[1, 2], [3, 4]])
    state.lengths.fill_(2)
    step_options = {k: options.pop(k) for k in ("bonus", "stopped", "status") if k in options}
    parameters = beam_parameters(1, 2, prompt_lengths=1, end_tokens=[9], pad_tokens=7, **options)
    step = beam_step(
        state, parameters, torch.tensor([scores]), torch.tensor([tokens]), torch.tensor([beams]),
        dialect=dialect, **step_options,
    )  # fmt: skip
    return state, step


def names(step: BeamStep) -> list[str]:
    return [DECISIONS[value & 7] for value in step.decisions[0].tolist()]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_end_token_among_the_first_closes_a_hypothesis(dialect: str) -> None:
    state, step = one_request(dialect, [-1.0, -2.0, -3.0, -4.0], [9, 5, 9, 6], [1, 0, 0, 1])
    assert names(step) == ["closed", "continued", "end_token_too_low", "continued"]
    assert step.tokens.tolist() == [5, 6]
    assert step.parents.tolist() == [0, 1]
    assert step.scores.tolist() == [-2.0, -4.0]
    assert state.sequences[0, :, :3].tolist() == [[1, 2, 5], [3, 4, 6]]
    assert state.beam_indices[0, :, 2].tolist() == [0, 1]
    held = [3, 4] if dialect == "scorer" else [3, 4, 9]
    assert state.hypothesis_lengths[0].tolist() == [len(held), 0]
    assert state.hypothesis_sequences[0, 0, : len(held)].tolist() == held
    assert state.hypothesis_scores[0, 0] == -0.5  # over two generated tokens
    assert state.hypothesis_beam_indices[0, 0].tolist() == [-1, -1, 1, -1, -1, -1]


def test_scorer_ends_a_search_without_enough_continuations() -> None:
    state, step = one_request("scorer", [-1.0, -2.0, -3.0, -4.0], [9, 5, 9, 9], [1, 0, 0, 1])
    assert state.status.tolist() == [STATUS_CONTINUATIONS]
    assert state.done.tolist() == [1]
    assert step.tokens.tolist() == [7, 7] and step.parents.tolist() == [0, 0]


@pytest.mark.parametrize("dialect", ["generate", "fairseq"])
def test_stopped_beams_go_on_far_below_where_too_few_do(dialect: str) -> None:
    _, step = one_request(dialect, [-1.0, -2.0, -3.0, -4.0], [9, 5, 9, 9], [1, 0, 0, 1])
    assert names(step) == ["closed", "continued", "end_token_too_low", "end_token_too_low"]
    assert step.tokens.tolist() == [5, 9]
    assert step.scores[1] == torch.tensor(-1e9)


def test_what_a_score_may_be() -> None:
    """Not NaN, and 'generate' knows none at -1e9 or below."""
    bonus = torch.tensor([[0.0, NAN]])
    for dialect in DIALECTS:
        state, step = one_request(
            dialect, [-1.0, -2.0, -3.0, -4.0], [9, 5, 6, 6], [1, 0, 0, 1], bonus=bonus
        )
        assert names(step)[0] == "not_better"
        assert state.hypothesis_numbers.tolist() == [[-1, -1]]
    state, step = one_request(
        "generate", [-2.5e9, -3e9, -3e9, -3e9], [9, 5, 6, 6], [1, 0, 0, 1], length_penalty=0.0
    )
    assert names(step)[0] == "not_better"


def test_fairseq_evicts_nothing_and_is_done_when_the_places_are_taken() -> None:
    for dialect, decision, first in (("fairseq", "not_better", -5.0), ("generate", "closed", -1.5)):
        state = new_beam_state(1, 3, 6)
        state.hypothesis_numbers[0, 0] = 0
        state.hypothesis_scores[0, 0] = state.worst_scores[0] = -5.0
        parameters = beam_parameters(1, 3, num_hypotheses=2, end_tokens=[9], length_penalty=0.0)
        scores = torch.tensor([[-1.0, -1.5, -2.0, -2.5, -3.0]])
        tokens, beams = torch.tensor([[9, 9, 3, 4, 5]]), torch.tensor([[0, 1, 2, 0, 1]])
        step = beam_step(state, parameters, scores, tokens, beams, dialect=dialect)
        assert names(step)[:2] == ["closed", decision]
        assert state.hypothesis_scores[0, :2].tolist() == [first, -1.0]
        assert state.done.tolist() == [1]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "done"),
    [(True, 1.0, 1), (False, 1.0, 1), ("never", 1.0, 0), ("never", 0.0, 1), (False, -1.0, 1)],
)
def test_when_a_search_is_done(early_stopping: Any, length_penalty: float, done: int) -> None:
    """Two good hypotheses; "never" without a maximum hopes for endless sequences."""
    state, _ = one_request(
        "generate", [-1.0, -1.5, -8.0, -9.0], [9, 9, 6, 6], [1, 0, 0, 1],
        early_stopping=early_stopping, length_penalty=length_penalty,
    )  # fmt: skip
    assert state.done.tolist() == [done]


def test_a_failed_request_is_padded_and_the_others_go_on() -> None:
    state, parameters = new_beam_state(2, 2, 6), beam_parameters(2, 2, pad_tokens=7)
    scores = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    tokens, beams = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[1, 1], [1, 0]])
    status = torch.tensor([1, 0], dtype=torch.uint8)
    step = beam_step(state, parameters, scores, tokens, beams, status=status)
    assert state.status.tolist() == [1, 0] and state.done.tolist() == [1, 0]
    assert step.tokens.tolist() == [7, 7, 5, 6]
    assert step.parents.tolist() == [0, 1, 3, 2]
    assert step.scores.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_unused_rows_are_beams_of_no_search() -> None:
    state, parameters = new_beam_state(2, 3, 4), beam_parameters(2, [1, 2], pad_tokens=7)
    scores, tokens = torch.tensor([[-1.0, -2.0]] * 2), torch.tensor([[3, 4]] * 2)
    step = beam_step(state, parameters, scores, tokens, torch.tensor([[0, 0]] * 2))
    assert step.scores.tolist() == [-1.0, -INF, -INF, -1.0, -2.0, -INF]
    assert step.parents.tolist() == [0, 1, 2, 3, 3, 5]
    assert step.tokens.tolist() == [3, 7, 7, 3, 4, 7]


def test_a_search_that_was_done_stays_where_its_sequences_are_full() -> None:
    state, parameters = new_beam_state(1, 2, 3), beam_parameters(1, 2)
    state.lengths.fill_(3)
    state.done.fill_(1)
    before = state.sequences.clone()
    scores, tokens = torch.tensor([[-1.0, -2.0]]), torch.tensor([[3, 4]])
    step = beam_step(state, parameters, scores, tokens, torch.tensor([[1, 0]]))
    assert step.tokens.tolist() == [3, 4] and state.lengths.tolist() == [3]
    assert torch.equal(state.sequences, before)


@pytest.mark.parametrize("penalty", [4000.0, -4000.0, INF, -INF, NAN, 0.3, -1e-300])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_any_penalty(penalty: float, dialect: str, early_stopping: Any) -> None:
    state, _ = one_request(
        dialect, [-1.0, -1.5, -8.0, -9.0], [9, 9, 6, 6], [1, 0, 0, 1],
        length_penalty=penalty, early_stopping=early_stopping,
    )  # fmt: skip
    want = new_beam_state(1, 2, 6, keep_beam_indices=True, keep_log_probs=True)
    want.sequences[0, :, :2] = torch.tensor([[1, 2], [3, 4]])
    want.lengths.fill_(2)
    parameters = beam_parameters(
        1, 2, prompt_lengths=1, end_tokens=[9], pad_tokens=7, length_penalty=penalty,
        early_stopping=early_stopping,
    )  # fmt: skip
    reference(
        want, parameters, torch.tensor([[-1.0, -1.5, -8.0, -9.0]]), torch.tensor([[9, 9, 6, 6]]),
        torch.tensor([[1, 0, 0, 1]]), dialect=dialect,
    )  # fmt: skip
    assert_same_bits(state, want)


def rows_of(search: Search, request: int) -> slice:
    offsets = search.options.get("row_offsets")
    width = search.state.scores.shape[1]
    if offsets is None:
        return slice(request * width, (request + 1) * width)
    return slice(int(offsets[request]), int(offsets[request + 1]))


@pytest.mark.parametrize("first", [0, 300])
def test_a_request_alone_gives_the_same(first: int) -> None:
    """In a state of its own, in another slot, and in a batch."""
    for seed in range(first, first + 300):
        alone: dict[int, BeamState] = {}

        def check(search: Search, arguments: dict[str, Any], alone: Any = alone) -> BeamStep:
            slots = search.slots
            if not alone:
                for r, slot in enumerate(slots):
                    own = [
                        part[slot : slot + 1].expand(3, *part.shape[1:]) for part in search.state
                    ]
                    alone[r] = clone(own)
            step = beam_step(search.state, search.parameters, **arguments)
            for r, slot in enumerate(slots):
                given = {
                    name: value[r : r + 1]
                    for name, value in arguments.items()
                    if isinstance(value, Tensor) and "offsets" not in name and name != "slots"
                }
                parameters = [p[slot : slot + 1].expand(3, *p.shape[1:]) for p in search.parameters]
                got = beam_step(
                    alone[r], BeamParameters(*(p.contiguous() for p in parameters)), **given,
                    slots=torch.tensor([2]), dialect=search.dialect,
                )  # fmt: skip
                width = rows_of(search, r).stop - rows_of(search, r).start
                assert torch.equal(got.scores[:width], step.scores[rows_of(search, r)])
                assert torch.equal(got.tokens[:width], step.tokens[rows_of(search, r)])
                assert torch.equal(got.decisions[0], step.decisions[r])
                for part, whole in zip(alone[r], search.state, strict=True):
                    assert torch.equal(part[2], whole[slot])
            return step

        random_search(seed, check, kept=seed % 4 != 0)


def valid_call() -> dict[str, Any]:
    state = new_beam_state(3, 2, 6, keep_log_probs=True)
    state.lengths.fill_(1)
    return {
        "state": state,
        "parameters": beam_parameters(3, 2, end_tokens=[1]),
        "scores": torch.tensor([[-1.0, -2.0, -3.0]] * 3),
        "tokens": torch.tensor([[4, 5, 6]] * 3),
        "beams": torch.tensor([[0, 1, 0]] * 3),
    }


def wrong_call(message: str, wrong: Any) -> dict[str, Any]:
    """Return the call with what is wrong: a dict, or the argument that the message begins with."""
    call = valid_call()
    if isinstance(wrong, dict):
        return {**call, **wrong}
    name, _, part = re.match(r"[\w.]+", message)[0].partition(".")
    return {**call, name: call[name]._replace(**{part: wrong}) if part else wrong}


LONG = torch.int64
WRONG: list[tuple[str, Any]] = [
    ("state.log_probs has shape [3, 2, 5]; expected [slots, beams, capacity or 0]",
     torch.zeros(3, 2, 5)),
    ("state.beam_indices has dtype int64; expected int32", torch.zeros(3, 2, 0, dtype=LONG)),
    ("state.scores has shape [3, 3]; expected [slots, beams], here [3, 2]", torch.zeros(3, 3)),
    ("state.lengths[1] is 6; expected less than the capacity", torch.tensor([1, 6, 1])),
    ("state.hypothesis_sequences has shape [3, 2, 5]", torch.zeros(3, 2, 5, dtype=LONG)),
    ("state.hypothesis_log_probs has shape [3, 2, 0]; expected", torch.zeros(3, 2, 0)),
    ("state.hypothesis_beam_indices has shape [3, 2, 6]", torch.zeros(3, 2, 6, dtype=torch.int32)),
    ("state.hypothesis_lengths has shape [3, 1]; expected [slots, hypotheses]",
     torch.zeros(3, 1, dtype=LONG)),
    ("state.hypothesis_numbers has shape [6]", torch.zeros(6, dtype=LONG)),
    ("parameters.max_lengths[2] is -1; expected a length", torch.tensor([0, 0, -1])),
    ("scores has shape [4, 3]; expected at most 3 requests",
     {"scores": torch.zeros(4, 3), "tokens": torch.zeros(4, 3, dtype=LONG),
      "beams": torch.zeros(4, 3, dtype=LONG)}),
    ("slots[2] is 1 once more; expected each slot once", torch.tensor([0, 1, 1])),
    ("row_offsets takes the rows 1 to 6", torch.tensor([1, 2, 4, 6])),
    ("row_offsets gives request 2 the rows 4 to -2; expected as many as its num_beams",
     torch.tensor([0, 2, 4, -2])),
    ("row_offsets gives request 1 the rows 2 to 5; expected as many as its num_beams, 2",
     {"row_offsets": torch.tensor([0, 2, 5, 6])}),
    ("row_offsets takes the rows 0 to 6; expected 0 to 7",
     {"row_offsets": torch.tensor([0, 2, 4, 6]), "rows": 7}),
    ("rows is 5; expected 6, the state's beams", 5),
    ("rows is -1; expected an int of 64 bits, at least 0", -1),
    ("parent_offsets has shape [2]; expected at least [3]", torch.tensor([0, 2])),
    ("sequences has shape [3, 2, 6]; expected a length of at most 5",
     torch.zeros(3, 2, 6, dtype=LONG)),
    ("dialect is 'beam'; expected one of generate, scorer, fairseq", "beam"),
    ("dialect is 1; expected one of generate, scorer, fairseq", 1),
    ("state.scores is of type list; expected a tensor", [1.0]),
    ("parameters.max_lengths is of type int; expected a tensor", 3),
]  # fmt: skip


@pytest.mark.parametrize(("message", "wrong"), WRONG, ids=[message for message, _ in WRONG])
def test_wrong_calls(message: str, wrong: Any) -> None:
    check_refused(beam_step, wrong_call(message, wrong), message)


def test_the_valid_call_is_valid() -> None:
    assert beam_step(**valid_call()).tokens.tolist() == [4, 5] * 3


def test_indices_of_no_candidates_are_not_looked_at() -> None:
    call = valid_call()
    call["scores"][:, 2] = -INF
    call["beams"][:, 2] = 99
    assert beam_step(**call).tokens.tolist() == [4, 5] * 3
    with pytest.raises(ValueError, match=r"beams\[0, 2\] is 99"):  # it takes part there
        beam_step(**{**call, "state": valid_call()["state"], "dialect": "scorer"})


def test_random_searches_vary() -> None:
    searches = [new_search(seed) for seed in range(300)]
    assert {search.dialect for search in searches} == set(DIALECTS)
    assert any("slots" in search.options for search in searches)
    assert any("row_offsets" in search.options for search in searches)
    assert any(search.groups > 1 for search in searches)
    assert any(math.isinf(s.state.scores.min().item()) for s in searches)
