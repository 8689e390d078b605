"""``new_beam_state`` and ``beam_parameters``: what they accept and what they refuse."""

from typing import Any

import numpy as np
import pytest
import torch

from lmdecode import beam_parameters, new_beam_state


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"slots": -1}, ValueError, "slots is -1; expected at least 0"),
        ({"num_beams": 0}, ValueError, "num_beams is 0; expected at least 1"),
        ({"capacity": -1}, ValueError, "capacity is -1; expected at least 0"),
        ({"num_hypotheses": 0}, ValueError, "num_hypotheses is 0; expected at least 1"),
        ({"num_beams": 2.0}, TypeError, "num_beams is of type float; expected an int"),
        ({"slots": True}, TypeError, "slots is of type bool; expected an int"),
    ],
)
def test_new_beam_state_refuses(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"^new_beam_state: {message}$"):
        new_beam_state(**{"slots": 2, "num_beams": 2, "capacity": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"slots": -1}, ValueError, "slots is -1; expected at least 0"),
        ({"num_beams": 0}, ValueError, "num_beams is 0; expected at least 1"),
        ({"num_beams": [2, 0]}, ValueError, "num_beams is 0; expected at least 1"),
        ({"num_beams": [2]}, ValueError, "num_beams has 1 entries; expected one for each slot: 2"),
        ({"num_beams": "22"}, TypeError, "num_beams is of type str; expected an int"),
        ({"num_beams": 1.5}, TypeError, "num_beams is of type float; expected one value or 2"),
        ({"num_hypotheses": [1, 0]}, ValueError, "num_hypotheses is 0; expected at least 1"),
        ({"prompt_lengths": -1}, ValueError, "prompt_lengths is -1; expected at least 0"),
        ({"max_lengths": [1, 2, 3]}, ValueError, "max_lengths has 3 entries; expected .*: 2"),
        ({"pad_tokens": [0.5, 1]}, TypeError, "pad_tokens is of type float; expected an int"),
        ({"length_penalty": [1.0]}, ValueError, "length_penalty has 1 entries; expected .*: 2"),
        ({"length_penalty": [1.0, "x"]}, TypeError, "length_penalty is of type str; .* a number"),
        ({"early_stopping": "soon"}, ValueError, "early_stopping is 'soon'; expected True, .*"),
        ({"early_stopping": [True, 2]}, ValueError, "early_stopping is 2; expected True, .*"),
        ({"early_stopping": [True]}, ValueError, "early_stopping has 1 entries; expected .*: 2"),
        ({"end_tokens": None}, TypeError, "end_tokens is of type NoneType; expected token ids"),
        ({"end_tokens": [[1]]}, ValueError, "end_tokens has 1 entries; expected .*: 2"),
        ({"end_tokens": [1, [2]]}, TypeError, "end_tokens has an entry of type int; .*"),
        ({"end_tokens": [[1], [0.5]]}, TypeError, "an entry of end_tokens is of type float; .*"),
    ],
)
def test_beam_parameters_refuses(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=f"^beam_parameters: {message}$"):
        beam_parameters(**{"slots": 2, "num_beams": 2, **arguments})


@pytest.mark.parametrize(
    ("end_tokens", "expected"),
    [
        (5, [[5], [5]]),
        (np.int64(5), [[5], [5]]),
        ([5, 6], [[5, 6], [5, 6]]),
        (torch.tensor([5, 6]), [[5, 6], [5, 6]]),
        (np.array([5, 6]), [[5, 6], [5, 6]]),
        ([[5], [6, 7]], [[5, -1], [6, 7]]),
        ([torch.tensor([5]), torch.tensor([6])], [[5], [6]]),
        ((), [[], []]),
        ([[], []], [[], []]),
    ],
)
def test_end_tokens_of_all_slots_or_of_each(end_tokens: Any, expected: list[list[int]]) -> None:
    assert beam_parameters(2, 2, end_tokens=end_tokens).end_tokens.tolist() == expected


def test_one_value_or_one_for_each_slot() -> None:
    one = beam_parameters(
        2, np.int64(3), max_lengths=9, length_penalty=0.5, early_stopping="never", pad_tokens=4
    )
    each = beam_parameters(
        2, [3, 3], max_lengths=torch.tensor([9, 9]), length_penalty=[0.5, 0.5],
        early_stopping=["never", "never"], pad_tokens=np.array([4, 4]),
    )  # fmt: skip
    for left, right in zip(one, each, strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


def test_no_slots() -> None:
    assert new_beam_state(0, 2, 4).sequences.shape == (0, 2, 4)
    assert beam_parameters(0, 2, end_tokens=[]).end_tokens.shape == (0, 0)
