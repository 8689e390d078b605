"""The forms of a parameter: a number, a list, a tensor without dimensions or of any dtype."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.decoder.engine.submission import RequestParameters
from lmdecode.sampling.sampler_rows import SAMPLER_PARAMETERS
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
    elif "seed" not in arguments:
        arguments["greedy"] = True
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


def test_a_range_is_a_list(device: torch.device) -> None:
    for name in ("top_k", "top_p", "temperature", "seed", "position"):
        ranged = range(1, 4) if name != "top_p" else range(-1, 2)
        expected = sample(device, **{name: list(ranged)})
        assert_same_bits(sample(device, **{name: ranged}), expected, name)
    logits = torch.randn(BATCH, VOCAB)
    for name, ranged in (("top_k", range(1, 4)), ("temperature", range(3)), ("seed", range(3))):
        given = {"seed": 5, name: ranged}
        listed = {"seed": 5, name: list(ranged)}
        first, second = (
            lmdecode.Sampler(BATCH, VOCAB, **g).sample(logits) for g in (given, listed)
        )
        assert torch.equal(first.index, second.index)


def test_sampling_parameters_name_all_that_there_are() -> None:
    names = set(lmdecode.SamplingParameters.__annotations__)
    assert names == set(SAMPLER_PARAMETERS)
    of_requests = set(RequestParameters.__annotations__)
    own = {"seed", "min_tokens", "eos_token_id"}
    others = {"prompt_ids", "max_new_tokens", "min_new_tokens", "request_id"}
    searches = {field.name for field in dataclasses.fields(lmdecode.BeamRequest)} - others
    assert of_requests == (names | searches) - own


def test_sampling_parameters_are_a_dict_that_samplers_take_again_and_again() -> None:
    parameters = lmdecode.SamplingParameters(
        temperature=0.8, top_p=0.5, seed=3, logit_bias={1: 2.0}
    )
    assert pickle.loads(pickle.dumps(parameters)) == copy.deepcopy(parameters) == parameters
    logits = torch.randn(2, VOCAB)
    written = lmdecode.Sampler(2, VOCAB, temperature=0.8, top_p=0.5, seed=3, logit_bias={1: 2.0})
    expected = written.sample(logits).index
    for _ in range(2):
        assert torch.equal(lmdecode.Sampler(2, VOCAB, **parameters).sample(logits).index, expected)
    sampler = lmdecode.Sampler(2, VOCAB)
    sampler.insert(0, **parameters)
    assert sampler.sample(logits).index[0] == expected[0]


def test_a_sampler_shows_what_it_is() -> None:
    parameters = lmdecode.SamplingParameters(temperature=0.8, top_k=5, eos_token_id=[7])
    shown = "Sampler(2, 50, dialect='vllm', temperature=0.8, top_k=5, eos_token_id=(7,))"
    assert repr(lmdecode.Sampler(2, VOCAB, dialect="vllm", **parameters)) == shown
    rows = lmdecode.Sampler(9, VOCAB, seed=range(9), suppress_tokens=list(range(50)))
    shown = "Sampler(9, 50, dialect='lmdecode', seed=[0, 1, 2, 3, ...], suppress_tokens=(0, 1, 2, "
    assert repr(rows).startswith(shown) and len(repr(rows)) < 120
