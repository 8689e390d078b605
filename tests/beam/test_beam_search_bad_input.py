"""Requests, calls and processors that are refused: the argument is named, nothing changes."""

import math
from typing import Any

import pytest
import torch
from small_requests import VOCAB
from small_requests import small_request as _request
from small_requests import step_of as _step

from lmdecode import BeamCandidates, BeamRequest, BeamSearch, log_softmax_top_k
from tests.support.beam_searches import TableModel, assert_same_result, run_requests
from tests.support.op_contract import WrongCall, assert_refused, by_argument, wrong_calls
from tests.support.random_tensors import randint, randn


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "num_beams is 0; expected an int of 64 bits, at least 1"),
        ({"num_beams": 2.0}, TypeError, "num_beams is of type float; expected an int"),
        ({"num_beams": True}, TypeError, "num_beams is of type bool"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ({"num_return_sequences": 4}, ValueError, "num_return_sequences is 4; expected at most"),
        ({"num_beam_groups": 2}, ValueError, "num_beam_groups is 2; expected a divisor"),
        ({"diversity_penalty": 1.0}, ValueError, "diversity_penalty is 1.0; expected 0 where"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty is nan; expected a finite"),
        ({"length_penalty": "1"}, TypeError, "length_penalty is of type str; expected a number"),
        ({"early_stopping": "always"}, ValueError, "early_stopping is 'always'; expected True"),
        ({"early_stopping": 1}, ValueError, "early_stopping is 1; expected True, False"),
        ({"eos_token_id": -1}, ValueError, "eos_token_id is -1"),
        ({"eos_token_id": [1.5]}, TypeError, "eos_token_id is of type float; expected an int"),
        ({"pad_token_id": -1}, ValueError, "pad_token_id is -1"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens is -1"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty is 0.0; expected a number"),
        ({"patience": 0.0}, ValueError, "patience is 0.0; expected a number above 0"),
        ({"patience": 0.3, "num_return_sequences": 3}, ValueError, "patience is 0.3; expected m"),
        ({"logit_bias": [1]}, TypeError, "logit_bias is of type list; expected a mapping"),
        ({"logit_bias": {1: math.inf}}, ValueError, "a value of logit_bias is inf"),
        ({"dialect": "beam"}, ValueError, "dialect is 'beam'; expected one of generate, scorer"),
        ({"dialect": "fairseq", "early_stopping": True}, ValueError, "early_stopping is True"),
        ({"prompt_ids": []}, ValueError, "prompt_ids is empty; expected at least one token"),
        ({"prompt_ids": "ab"}, TypeError, "prompt_ids is of type str; expected token ids"),
        ({"prompt_ids": torch.zeros(1, 2).long()}, ValueError, r"tensor of shape \[1, 2\]"),
        ({"prompt_ids": torch.zeros(2)}, ValueError, "prompt_ids is a float32 tensor"),
    ],
)  # fmt: skip
def test_wrong_requests(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^BeamRequest: .*{message}"):
        BeamRequest(**{"prompt_ids": [1], "max_new_tokens": 2, "num_beams": 3, **arguments})


def test_prompts_of_any_kind() -> None:
    for prompt in ([3, 4], (3, 4), torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32)):
        assert BeamRequest(prompt, max_new_tokens=1).prompt_ids == (3, 4)


def test_wrong_calls_change_nothing() -> None:
    model = TableModel(VOCAB, 15)
    expected = run_requests(BeamSearch(), model, [(0, _request())])[0]
    engine = BeamSearch()
    engine.insert(_request())
    _step(engine, model)
    good = model(*engine.input_ids())
    calls = [
        ({"logits": good[:2]}, ValueError, r"logits has shape \[2, 13\]; expected \[3, 13\]: one"),
        ({"logits": good[:, :5]}, ValueError, r"logits has shape \[3, 5\]; expected \[3, 13\]"),
        ({"logits": good[0]}, ValueError, r"logits has shape \[13\]; expected \[3, 13\]"),
        ({"logits": good.double()}, ValueError, "logits has dtype float64; expected float32 or"),
        ({"logits": good.tolist()}, TypeError, "logits is of type list; expected a tensor"),
        ({"token_bitmask": torch.zeros(3, 2, dtype=torch.int32)}, ValueError,
         r"token_bitmask has shape \[3, 2\]; expected \[3, 1\]"),
        ({"token_bitmask": torch.zeros(3, 1)}, ValueError, "token_bitmask has dtype float32"),
    ]  # fmt: skip
    for arguments, error, message in calls:
        with pytest.raises(error, match=message):
            engine.step(**{"logits": good, **arguments})
    while engine.num_rows:
        _step(engine, model)
    assert_same_result(engine.pop_finished()[0], expected)
    with pytest.raises(TypeError, match="request is of type dict; expected a BeamRequest"):
        engine.insert({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="BeamSearch: slots is 0; expected at least 1"):
        BeamSearch(slots=0)
    with pytest.raises(TypeError, match="BeamSearch: vocab_size is of type str"):
        BeamSearch("13")  # type: ignore[arg-type]


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
        TOKENS.int(), TOKENS[:, 0], TOKENS[:5], {"sequences": None, "repetition_penalty": 1.5},
        {"sequences": None, "no_repeat_ngram_size": NUMBERS.long()}, TOKENS.to("meta"),
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
}  # fmt: skip


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
