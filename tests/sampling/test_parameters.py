"""The forms of a parameter: a number, a list, a tensor without dimensions or of any dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from tests.support.cases import assert_same_bits

BATCH, VOCAB = 3, 50

# Of each parameter: one number, one a row, and the dtypes that a tensor may have.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32)
PARAMETERS: dict[str, tuple[Any, list[Any], tuple[torch.dtype, ...]]] = {
    "top_k": (7, [1, 0, 30], INTS),
    "top_p": (0.75, [0.25, 1.0, 0.875], FLOATS),
    "min_p": (0.125, [0.0, 0.5, 0.0625], FLOATS),
    "temperature": (0.5, [2.0, 0.0, 0.75], FLOATS),
    "seed": (11, [3, -1, 2**31 - 1], INTS),
    "position": (5, [0, 9, 2**31 - 1], INTS),
}


def sample(device: torch.device, **arguments: Any) -> lmdecode.SampleOutput:
    logits = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    if "position" in arguments:
        arguments["seed"] = 4
    return lmdecode.top_k_top_p_sample(
        logits.to(device), **arguments, return_logits=True, return_logprob=True
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_tensor_without_dimensions_is_a_number(name: str, device: torch.device) -> None:
    number, _, dtypes = PARAMETERS[name]
    expected = sample(device, **{name: number})
    for dtype in dtypes:
        for place in {torch.device("cpu"), device}:
            one = torch.tensor(number, dtype=dtype, device=place)
            assert_same_bits(sample(device, **{name: one}), expected, f"{dtype} on {place}")


@pytest.mark.parametrize("name", PARAMETERS)
def test_lists_and_dtypes_of_rows(name: str, device: torch.device) -> None:
    _, rows, dtypes = PARAMETERS[name]
    expected = sample(device, **{name: torch.tensor(rows, dtype=dtypes[1], device=device)})
    for given in (rows, tuple(rows), np.array(rows).tolist(), list(np.array(rows))):
        assert_same_bits(sample(device, **{name: given}), expected, str(given))
    for dtype in dtypes:
        given = torch.tensor(rows, dtype=dtype, device=device)
        assert_same_bits(sample(device, **{name: given}), expected, str(dtype))


def test_a_negative_seed_without_dimensions_is_no_noise(device: torch.device) -> None:
    expected = sample(device)
    assert_same_bits(sample(device, seed=torch.tensor(-1)), expected, "seed")
    assert_same_bits(sample(device, seed=-1), expected, "seed")


def test_float64_is_rounded_to_float32(device: torch.device) -> None:
    p = torch.tensor([0.1, 0.7, 0.9], dtype=torch.float64, device=device)
    assert_same_bits(sample(device, top_p=p), sample(device, top_p=p.float()), "top_p")


@pytest.mark.parametrize("dialect", ["ascend_v1", "ascend_v2"])
def test_a_list_above_1_is_off_as_a_number_is(dialect: str, device: torch.device) -> None:
    for p in ([1.5, 2.0, 90], 2.0):
        got = sample(device, top_p=p, dialect=dialect)
        assert_same_bits(got, sample(device, dialect=dialect), str(p))


def test_an_empty_list_of_an_empty_batch() -> None:
    arguments: dict[str, Any] = {"top_k": [], "top_p": (), "temperature": [], "seed": []}
    assert lmdecode.top_k_top_p_sample(torch.empty(0, 4), **arguments).index.shape == (0,)


def test_compiled_in_one_graph() -> None:
    """Tensors without dimensions, of float64, and lists; numbers are in test_registration."""

    def step(x: torch.Tensor, k: Any, p: Any, seed: Any) -> lmdecode.SampleOutput:
        return lmdecode.top_k_top_p_sample(x, k, p, temperature=[0.5, 1.0, 2.0], seed=seed)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    x = torch.randn(BATCH, VOCAB)
    one = (torch.tensor(5), torch.tensor(0.75, dtype=torch.float64), torch.tensor(3))
    for arguments in (one, ([1, 2, 3], (0.5, 0.75, 1.0), [1, 2, 3])):
        assert_same_bits(compiled(x, *arguments), step(x, *arguments), str(arguments))
