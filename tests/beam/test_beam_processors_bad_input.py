"""Wrong processors of ``log_softmax_top_k``: the error names the argument."""

import re
from typing import Any

import pytest
import torch

from lmdecode import BeamCandidates, log_softmax_top_k
from tests.support.random_tensors import randint, randn

INF, NAN = float("inf"), float("nan")

TOKENS, NUMBERS = randint(5, 6, 4), torch.ones(3)
# The calls have 3 requests of 2 beams, a vocabulary of 40 tokens and sequences of 4 columns.
CASES: dict[str, tuple[str, type[Exception], dict[str, Any]]] = {
    "sequences: a list": ("sequences", TypeError, {"sequences": [[1]] * 6}),
    "sequences: int32": ("sequences", ValueError, {"sequences": TOKENS.int()}),
    "sequences: 1 dimension": ("sequences", ValueError, {"sequences": TOKENS[:, 0]}),
    "sequences: too few rows": ("sequences", ValueError, {"sequences": TOKENS[:5]}),
    "sequences: none for a penalty": (
        "sequences", ValueError, {"sequences": None, "repetition_penalty": 1.5},
    ),
    "sequences: none for n-grams": (
        "sequences", ValueError, {"sequences": None, "no_repeat_ngram_size": NUMBERS.long()},
    ),
    "sequences: meta": ("sequences", ValueError, {"sequences": TOKENS.to("meta")}),
    "lengths: a number": ("lengths", TypeError, {"lengths": 4}),
    "lengths: float": ("lengths", ValueError, {"lengths": NUMBERS}),
    "lengths: a row each": ("lengths", ValueError, {"lengths": TOKENS[:, 0]}),
    "lengths: none at all": (
        "lengths", ValueError,
        {"sequences": None, "end_tokens": TOKENS[0], "min_lengths": 4},
    ),
    "repetition_penalty: 0": ("repetition_penalty", ValueError, {"repetition_penalty": 0.0}),
    "repetition_penalty: below 0": ("repetition_penalty", ValueError, {"repetition_penalty": -1.0}),
    "repetition_penalty: NaN": ("repetition_penalty", ValueError, {"repetition_penalty": NAN}),
    "repetition_penalty: 1e39": ("repetition_penalty", ValueError, {"repetition_penalty": 1e39}),
    "repetition_penalty: a list": ("repetition_penalty", TypeError, {"repetition_penalty": [1.0]}),
    "repetition_penalty: bool": ("repetition_penalty", TypeError, {"repetition_penalty": True}),
    "repetition_penalty: float64": (
        "repetition_penalty", ValueError, {"repetition_penalty": NUMBERS.double()},
    ),
    "repetition_penalty: too many": (
        "repetition_penalty", ValueError, {"repetition_penalty": torch.ones(6)},
    ),
    "no_repeat_ngram_size: below 0": (
        "no_repeat_ngram_size", ValueError, {"no_repeat_ngram_size": -1},
    ),
    "no_repeat_ngram_size: float": (
        "no_repeat_ngram_size", TypeError, {"no_repeat_ngram_size": 2.0},
    ),
    "no_repeat_ngram_size: 65 bits": (
        "no_repeat_ngram_size", ValueError, {"no_repeat_ngram_size": 2**64},
    ),
    "no_repeat_ngram_size: a float tensor": (
        "no_repeat_ngram_size", ValueError, {"no_repeat_ngram_size": NUMBERS},
    ),
    "end_tokens: alone": ("min_lengths", ValueError, {"end_tokens": TOKENS[0]}),
    "end_tokens: missing": ("end_tokens", ValueError, {"min_lengths": 3}),
    "end_tokens: a list": ("end_tokens", TypeError, {"end_tokens": [2], "min_lengths": 3}),
    "end_tokens: a row each": (
        "end_tokens", ValueError, {"end_tokens": TOKENS, "min_lengths": 3},
    ),
    "min_lengths: float": (
        "min_lengths", TypeError, {"end_tokens": TOKENS[0], "min_lengths": 3.0},
    ),
    "min_lengths: below 0": (
        "min_lengths", ValueError, {"end_tokens": TOKENS[0], "min_lengths": -1},
    ),
    "min_lengths: a matrix": (
        "min_lengths", ValueError, {"end_tokens": TOKENS[0], "min_lengths": TOKENS},
    ),
    "suppressed_tokens: int32": (
        "suppressed_tokens", ValueError, {"suppressed_tokens": TOKENS[0].int()},
    ),
    "suppressed_tokens: a scalar": (
        "suppressed_tokens", ValueError, {"suppressed_tokens": torch.tensor(3)},
    ),
    "forced_tokens: a number": ("forced_tokens", TypeError, {"forced_tokens": 3}),
    "forced_tokens: 4": ("forced_tokens", ValueError, {"forced_tokens": TOKENS[0]}),
    "forced_tokens: a matrix": ("forced_tokens", ValueError, {"forced_tokens": TOKENS[:3, :1]}),
    "diversity_tokens: alone": (
        "diversity_penalty", ValueError, {"diversity_tokens": TOKENS[:3]},
    ),
    "diversity_tokens: missing": (
        "diversity_tokens", ValueError, {"diversity_penalty": 0.5},
    ),
    "diversity_tokens: 1 dimension": (
        "diversity_tokens", ValueError,
        {"diversity_tokens": TOKENS[0], "diversity_penalty": 0.5},
    ),
    "diversity_penalty: infinite": (
        "diversity_penalty", ValueError,
        {"diversity_tokens": TOKENS[:3], "diversity_penalty": INF},
    ),
    "diversity_penalty: str": (
        "diversity_penalty", TypeError,
        {"diversity_tokens": TOKENS[:3], "diversity_penalty": "0.5"},
    ),
    "bias: float16": ("bias", ValueError, {"bias": torch.zeros(40).half()}),
    "bias: 39": ("bias", ValueError, {"bias": torch.zeros(39)}),
    "bias: 4 rows": ("bias", ValueError, {"bias": torch.zeros(4, 40)}),
    "bias: a scalar": ("bias", ValueError, {"bias": torch.tensor(1.0)}),
    "bias: a list": ("bias", TypeError, {"bias": [0.0] * 40}),
    "token_bitmask: bool": (
        "token_bitmask", ValueError, {"token_bitmask": torch.ones(3, 40, dtype=torch.bool)},
    ),
    "token_bitmask: 1 word": ("token_bitmask", ValueError, {"token_bitmask": TOKENS[:3, :1].int()}),
    "token_bitmask: one for all": (
        "token_bitmask", ValueError, {"token_bitmask": TOKENS[0, :2].int()},
    ),
}  # fmt: skip


def call(device: torch.device, **changes: Any) -> BeamCandidates:
    arguments = {"sequences": TOKENS, **changes}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            arguments[name] = value.to(device)
    x = randn(6, 40).to(device)
    return log_softmax_top_k(x, x[:, 0].clone(), 4, num_beams=2, **arguments)


@pytest.mark.parametrize("case", CASES)
def test_error_names_the_argument(case: str, device: torch.device) -> None:
    name, error, changes = CASES[case]
    with pytest.raises(error) as raised:
        call(device, **changes)
    message = str(raised.value)
    assert re.search(rf"\b{name}\b", message), message
    assert "expected" in message, message


@pytest.mark.parametrize("lengths", [[0, 5, 4], [-1, 0, 0]])
def test_wrong_lengths(lengths: list[int]) -> None:
    """What the CPU alone can see."""
    with pytest.raises(ValueError, match="lengths"):
        call(torch.device("cpu"), lengths=torch.tensor(lengths))
