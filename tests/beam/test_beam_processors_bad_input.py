"""Wrong processors of ``log_softmax_top_k``: the error names the argument."""

from typing import Any

import pytest
import torch

from lmdecode import BeamCandidates, log_softmax_top_k
from tests.support.op_contract import WrongCall, assert_refused, by_argument, wrong_calls
from tests.support.random_tensors import randint, randn

INF, NAN = float("inf"), float("nan")

TOKENS, NUMBERS = randint(5, 6, 4), torch.ones(3)
# The calls have 3 requests of 2 beams, a vocabulary of 40 tokens and sequences of 4 columns.
WRONG_TYPES: dict[str, list[Any]] = {
    "sequences": [[[1]] * 6],
    "lengths": [4],
    "repetition_penalty": [[1.0], True],
    "no_repeat_ngram_size": [2.0],
    "end_tokens": [{"end_tokens": [2], "min_lengths": 3}],
    "min_lengths": [{"end_tokens": TOKENS[0], "min_lengths": 3.0}],
    "forced_tokens": [3],
    "diversity_penalty": [{"diversity_tokens": TOKENS[:3], "diversity_penalty": "0.5"}],
    "bias": [[0.0] * 40],
}
WRONG_VALUES: dict[str, list[Any]] = {
    "sequences": [
        TOKENS.int(),
        TOKENS[:, 0],
        TOKENS[:5],
        {"sequences": None, "repetition_penalty": 1.5},
        {"sequences": None, "no_repeat_ngram_size": NUMBERS.long()},
        TOKENS.to("meta"),
    ],
    "lengths": [
        NUMBERS,
        TOKENS[:, 0],
        {"sequences": None, "end_tokens": TOKENS[0], "min_lengths": 4},
    ],
    "repetition_penalty": [0.0, -1.0, NAN, 1e39, NUMBERS.double(), torch.ones(6)],
    "no_repeat_ngram_size": [-1, 2**64, NUMBERS],
    "min_lengths": [
        {"end_tokens": TOKENS[0]},
        {"end_tokens": TOKENS[0], "min_lengths": -1},
        {"end_tokens": TOKENS[0], "min_lengths": TOKENS},
    ],
    "end_tokens": [{"min_lengths": 3}, {"end_tokens": TOKENS, "min_lengths": 3}],
    "suppressed_tokens": [TOKENS[0].int(), torch.tensor(3)],
    "forced_tokens": [TOKENS[0], TOKENS[:3, :1]],
    "diversity_penalty": [
        {"diversity_tokens": TOKENS[:3]},
        {"diversity_tokens": TOKENS[:3], "diversity_penalty": INF},
    ],
    "diversity_tokens": [
        {"diversity_penalty": 0.5},
        {"diversity_tokens": TOKENS[0], "diversity_penalty": 0.5},
    ],
    "bias": [torch.zeros(40).half(), torch.zeros(39), torch.zeros(4, 40), torch.tensor(1.0)],
    "token_bitmask": [
        torch.ones(3, 40, dtype=torch.bool),
        TOKENS[:3, :1].int(),
        TOKENS[0, :2].int(),
    ],
}


def call(device: torch.device, **changes: Any) -> BeamCandidates:
    arguments = {"sequences": TOKENS, **changes}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            arguments[name] = value.to(device)
    x = randn(6, 40).to(device)
    return log_softmax_top_k(x, x[:, 0].clone(), 4, num_beams=2, **arguments)


@wrong_calls(by_argument(TypeError, WRONG_TYPES), by_argument(ValueError, WRONG_VALUES))
def test_error_names_the_argument(wrong: WrongCall, device: torch.device) -> None:
    assert_refused(wrong, lambda: call(device, **wrong[1]))


@pytest.mark.parametrize("lengths", [[0, 5, 4], [-1, 0, 0]])
def test_wrong_lengths(lengths: list[int]) -> None:
    """What the CPU alone can see."""
    with pytest.raises(ValueError, match="lengths"):
        call(torch.device("cpu"), lengths=torch.tensor(lengths))
