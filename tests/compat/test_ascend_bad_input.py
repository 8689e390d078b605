"""Wrong arguments of the Ascend ops: errors name the argument and what was expected."""

import itertools
import math

import pytest
import torch

from lmdecode.compat import ascend

INF = math.inf

LOGITS = torch.zeros(2, 8)
HALF = torch.zeros(2, 8, dtype=torch.float16)
ONES = torch.ones(2)

ERRORS = [
    ({"logits": [1.0]}, TypeError, r"logits is of type list; expected a tensor"),
    ({"logits": torch.zeros(8)}, ValueError, r"logits has shape \[8\]; expected \[batch, vocab\]"),
    ({"logits": torch.zeros(2, 0)}, ValueError, r"logits has shape \[2, 0\]; expected"),
    ({"logits": LOGITS.double()}, ValueError, r"logits has dtype float64; expected float32, "),
    ({"topK": None}, TypeError, r"topK is of type NoneType; expected an int or a tensor"),
    ({"topK": 2.0}, TypeError, r"topK is of type float; expected an int"),
    ({"topK": ONES}, ValueError, r"topK has dtype float32; expected int32 or int64"),
    ({"topK": torch.ones(3).int()}, ValueError, r"topK has shape \[3\]; expected \[2\]"),
    ({"topP": None}, TypeError, r"topP is of type NoneType; expected a number or a tensor"),
    ({"topP": True}, TypeError, r"topP is of type bool; expected a number"),
    ({"topP": math.nan}, ValueError, r"topP is nan; expected a number"),
    ({"topP": ONES.half()}, ValueError, r"topP has dtype float16; expected float32, the dtype of"),
    (
        {"logits": HALF, "topP": ONES},
        ValueError,
        r"topP has dtype float32; expected float16, the dtype of logits",
    ),
    ({"topP": ONES[:, None]}, ValueError, r"topP has shape \[2, 1\]; expected \[2\]"),
    ({"q": 1.0}, TypeError, r"q is of type float; expected a tensor or None"),
    ({"q": HALF}, ValueError, r"q has dtype float16; expected float32$"),
    ({"q": torch.ones(2, 9)}, ValueError, r"q has shape \[2, 9\]; expected \[2, 8\]"),
    ({"eps": -1.0}, ValueError, r"eps is -1.0; expected a finite number >= 0"),
    ({"eps": math.nan}, ValueError, r"eps is nan; expected"),
    ({"eps": INF}, ValueError, r"eps is inf; expected"),
    ({"eps": None}, TypeError, r"eps is of type NoneType; expected a number"),
    ({"isNeedLogits": 2}, TypeError, r"isNeedLogits is 2; expected True or False"),
    ({"topKGuess": 0}, ValueError, r"topKGuess is 0; expected an int >= 1"),
    ({"topKGuess": 1.5}, TypeError, r"topKGuess is of type float; expected an int"),
]
V2_ERRORS = [
    ({"minPs": "a"}, TypeError, r"minPs is of type str; expected a number or a tensor"),
    ({"minPs": ONES.bfloat16()}, ValueError, r"minPs has dtype bfloat16; expected float32"),
    ({"minPs": torch.ones(1)}, ValueError, r"minPs has shape \[1\]; expected \[2\]"),
    ({"ksMax": 0}, ValueError, r"ksMax is 0; expected an int from 1 to 1024"),
    ({"ksMax": 1025}, ValueError, r"ksMax is 1025; expected an int from 1 to 1024"),
    ({"ksMax": 8.0}, TypeError, r"ksMax is of type float; expected an int"),
    ({"inputIsLogits": None}, TypeError, r"inputIsLogits is None; expected True or False"),
    ({"isNeedSampleResult": "yes"}, TypeError, r"isNeedSampleResult is 'yes'; expected True"),
    (
        {"isNeedSampleResult": True, "q": torch.ones(2, 8)},
        ValueError,
        r"q and isNeedSampleResult=True were both given; expected q to be None then",
    ),
]
CASES = [
    *itertools.product(["top_k_top_p_sample", "top_k_top_p_sample_v2"], ERRORS),
    *itertools.product(["top_k_top_p_sample_v2"], V2_ERRORS),
]


@pytest.mark.parametrize(("function", "case"), CASES)
def test_errors(function: str, case: tuple) -> None:
    changes, error, message = case
    arguments = {"logits": LOGITS, "topK": 3, "topP": 0.9, **changes}
    with pytest.raises(error, match=rf"^{function}: {message}"):
        getattr(ascend, function)(**arguments)
