"""``beam_finalize``: equal to the reference bit by bit, and its order by hand."""

from typing import Any

import pytest
import torch
from random_searches import DIALECTS, Search, check_refused, clone, random_search
from torch import Tensor

from lmdecode import (
    BeamParameters,
    BeamState,
    BeamStep,
    beam_finalize,
    beam_parameters,
    beam_step,
    new_beam_state,
)
from lmdecode.reference import beam_finalize as reference
from tests.support.cases import assert_same_bits


def step_of(search: Search, arguments: dict[str, Any]) -> BeamStep:
    return beam_step(search.state, search.parameters, **arguments)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_equals_the_reference(part: int, device: torch.device) -> None:
    for seed in range(part * 800, (part + 1) * 800):
        kept = seed % 4 != 0
        search = random_search(seed, step_of, kept=kept)
        options: dict[str, Any] = {
            "num_groups": search.groups,
            "dialect": search.dialect,
            "slots": search.options.get("slots"),
        }
        if not kept and search.steps:
            options["sequences"] = search.steps[-1]["sequences"]
            shape = (len(search.slots), search.state.scores.shape[1])
            options["scores"] = torch.randn(shape).masked_fill(torch.rand(shape) < 0.1, -torch.inf)
        for add_open in (None, False, True):
            count = search.choice.randint(1, 2 * search.state.scores.shape[1])
            state = BeamState(*(part.clone().to(device) for part in search.state))
            parameters = BeamParameters(*(part.to(device) for part in search.parameters))
            given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
            got = beam_finalize(state, parameters, count, add_open=add_open, **given)
            want_state = clone(search.state)
            want = reference(want_state, search.parameters, count, add_open=add_open, **options)
            assert_same_bits(got, want, f"seed {seed}")
            assert_same_bits(state, want_state, f"seed {seed}")


def two_slots() -> tuple[BeamState, BeamParameters]:
    """Two slots with a finished sequence or two each, some of equal scores."""
    state = new_beam_state(2, 2, 4, num_hypotheses=3)
    state.lengths.fill_(2)
    state.sequences[:] = torch.tensor([7, 8, 0, 0])
    state.scores[:] = torch.tensor([-3.0, -8.0])
    for slot, place, number, score, tokens in (
        (0, 0, 1, -2.0, [1, 2]),
        (0, 2, 0, -2.0, [3]),
        (1, 1, 0, -1.0, [4, 5, 6]),
    ):
        state.hypothesis_sequences[slot, place, : len(tokens)] = torch.tensor(tokens)
        state.hypothesis_lengths[slot, place] = len(tokens)
        state.hypothesis_numbers[slot, place] = number
        state.hypothesis_scores[slot, place] = score
        state.worst_scores[slot] = score
    parameters = beam_parameters(
        2, 2, num_hypotheses=3, end_tokens=[[-1, 9], [8, 9]], pad_tokens=[70, 71]
    )
    return state, parameters


def test_order_and_padding() -> None:
    state, parameters = two_slots()
    final = beam_finalize(state, parameters, 3)
    assert final.places.tolist() == [[2, 0, -1], [1, -1, -1]]
    assert final.scores.tolist() == [[-2.0, -2.0, -1e9], [-1.0, -1e9, -1e9]]
    assert final.lengths.tolist() == [[1, 2, 0], [3, 0, 0]]
    assert final.sequences.tolist() == [
        [[3, 70, 70, 70], [1, 2, 70, 70], [70] * 4],
        [[4, 5, 6, 71], [71] * 4, [71] * 4],
    ]


def test_groups_are_ranked_together() -> None:
    state, parameters = two_slots()
    final = beam_finalize(state, parameters, 4, num_groups=2)
    assert final.places.tolist() == [[4, 2, 0, -1]]
    assert final.sequences[0, 0].tolist() == [4, 5, 6, 70]  # padded as the first group says
    final = beam_finalize(state, parameters, 4, num_groups=2, slots=torch.tensor([1, 0]))
    assert final.places.tolist() == [[1, 5, 3, -1]]


def test_scorer_takes_the_last_of_equal_scores_and_adds_end_tokens() -> None:
    state, parameters = two_slots()
    state.done.fill_(1)
    final = beam_finalize(state, parameters, 2, dialect="scorer")
    assert final.places.tolist() == [[0, 2], [1, -1]]
    assert final.sequences.tolist() == [[[1, 2, 9, 70], [3, 9, 70, 70]], [[4, 5, 6, 8], [71] * 4]]
    assert final.lengths.tolist() == [[2, 1], [3, 0]]


def test_open_beams_take_the_places_that_are_left() -> None:
    """Scores over two tokens: -1.5 and -4; the second finds the worst of three better."""
    state, parameters = two_slots()
    state.done[1] = 1
    final = beam_finalize(state, parameters, 3, add_open=True)
    assert final.scores[0].tolist() == [-1.5, -2.0, -2.0]
    assert final.sequences[0, 0].tolist() == [7, 8, 70, 70]
    assert final.places[1].tolist() == [1, -1, -1]
    assert state.hypothesis_numbers[0].tolist() == [1, 2, 0]
    assert beam_finalize(two_slots()[0], parameters, 1, dialect="scorer").scores[0, 0] == -1.5


def test_more_results_than_places_and_none() -> None:
    state, parameters = two_slots()
    assert beam_finalize(state, parameters, 50).places[0].tolist() == [2, 0] + [-1] * 48
    none = beam_finalize(state, parameters, 2, slots=torch.zeros(0, dtype=torch.int64))
    assert [part.shape[0] for part in none] == [0] * 6


WRONG_ENDS: list[tuple[str, dict[str, Any]]] = [
    ("state has 0 tensors; expected the 14 of a BeamState", {"state": ()}),
    ("num_return_sequences is 0; expected 1 to 2^31 - 1", {"num_return_sequences": 0}),
    ("num_groups is 3; expected a divisor of 2", {"num_groups": 3}),
    ("num_groups is 0; expected", {"num_groups": 0}),
    ("slots[1] is 0 once more", {"slots": torch.tensor([0, 0])}),
    ("sequences has shape [2, 2, 5]; expected a length of at most 4",
     {"sequences": torch.zeros(2, 2, 5, dtype=torch.int64)}),
    ("state.hypothesis_lengths[0, 2] is 5; expected 0 to 4",
     {"state": two_slots()[0]._replace(hypothesis_lengths=torch.tensor([[2, 0, 5], [0, 3, 0]]))}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "wrong"), WRONG_ENDS, ids=[m for m, _ in WRONG_ENDS])
def test_wrong_ends(message: str, wrong: dict[str, Any]) -> None:
    state, parameters = two_slots()
    call = {"state": state, "parameters": parameters, "num_return_sequences": 2, "add_open": True}
    check_refused(beam_finalize, {**call, **wrong}, message)


def test_every_rule_is_tried() -> None:
    assert {random_search(seed, step_of).dialect for seed in range(30)} == set(DIALECTS)
