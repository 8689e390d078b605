"""Wrong calls raise an error that names the argument, before anything is written."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.sampling.types import DIALECTS

BATCH, VOCAB = 3, 10
Arguments = dict[str, Any]


def logits() -> torch.Tensor:
    return torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(0))


def rows(value: float, dtype: torch.dtype, batch: int = BATCH) -> torch.Tensor:
    return torch.full((batch,), value).to(dtype)


# Name of the argument that the message must tell; the error; the arguments of the call.
CASES: dict[str, tuple[str, type[Exception], Callable[[], Arguments]]] = {
    "logits: a list": ("logits", TypeError, lambda: {"logits": [[1.0, 2.0]]}),
    "logits: None": ("logits", TypeError, lambda: {"logits": None}),
    "logits: 1 dimension": ("logits", ValueError, lambda: {"logits": torch.zeros(5)}),
    "logits: 3 dimensions": ("logits", ValueError, lambda: {"logits": torch.zeros(1, 2, 5)}),
    "logits: no dimension": ("logits", ValueError, lambda: {"logits": torch.tensor(1.0)}),
    "logits: V == 0": ("logits", ValueError, lambda: {"logits": torch.zeros(3, 0)}),
    "logits: float64": ("logits", ValueError, lambda: {"logits": logits().double()}),
    "logits: bool": ("logits", ValueError, lambda: {"logits": logits() > 0}),
    "logits: int64": ("logits", ValueError, lambda: {"logits": logits().long()}),
    "logits: complex": ("logits", ValueError, lambda: {"logits": logits().to(torch.complex64)}),
    "top_k: float": ("top_k", TypeError, lambda: {"top_k": 2.0}),
    "top_k: str": ("top_k", TypeError, lambda: {"top_k": "2"}),
    "top_k: bool": ("top_k", TypeError, lambda: {"top_k": True}),
    "top_k: float rows": ("top_k", ValueError, lambda: {"top_k": rows(2, torch.float32)}),
    "top_k: int16 rows": ("top_k", ValueError, lambda: {"top_k": rows(2, torch.int16)}),
    "top_k: too few rows": ("top_k", ValueError, lambda: {"top_k": rows(2, torch.int64, 2)}),
    "top_k: too many rows": ("top_k", ValueError, lambda: {"top_k": rows(2, torch.int32, 4)}),
    "top_k: a column": ("top_k", ValueError, lambda: {"top_k": rows(2, torch.int64)[:, None]}),
    "top_k: a float without dimensions": (
        "top_k",
        ValueError,
        lambda: {"top_k": torch.tensor(2.0)},
    ),
    "top_k: a short list": ("top_k", ValueError, lambda: {"top_k": [2] * 2}),
    "top_k: a list of floats": ("top_k", TypeError, lambda: {"top_k": [2, 2.0, 2]}),
    "top_k: a list of bools": ("top_k", TypeError, lambda: {"top_k": [True] * BATCH}),
    "top_k: a list with 65 bits": ("top_k", ValueError, lambda: {"top_k": [2, 2**64, 2]}),
    "top_k: a nested list": ("top_k", TypeError, lambda: {"top_k": [[2], [2], [2]]}),
    "top_k: meta": ("top_k", ValueError, lambda: {"top_k": rows(2, torch.int64).to("meta")}),
    "top_k: 65 bits": ("top_k", ValueError, lambda: {"top_k": 2**64}),
    "top_p: str": ("top_p", TypeError, lambda: {"top_p": "0.5"}),
    "top_p: a long tuple": ("top_p", ValueError, lambda: {"top_p": (0.5,) * 4}),
    "top_p: a list with a str": ("top_p", TypeError, lambda: {"top_p": [0.5, "0.5", 0.5]}),
    "top_p: a list with NaN": ("top_p", ValueError, lambda: {"top_p": [0.5, float("nan"), 0.5]}),
    "top_p: percent": ("top_p", ValueError, lambda: {"top_p": 90}),
    "top_p: a list in percent": ("top_p", ValueError, lambda: {"top_p": [0.9, 90, 0.9]}),
    "top_p: infinite": ("top_p", ValueError, lambda: {"top_p": float("inf")}),
    "top_p: NaN": ("top_p", ValueError, lambda: {"top_p": float("nan")}),
    "top_p: larger than any float": ("top_p", ValueError, lambda: {"top_p": 10**400}),
    "top_p: int rows": ("top_p", ValueError, lambda: {"top_p": rows(1, torch.int64)}),
    "top_p: an int without dimensions": ("top_p", ValueError, lambda: {"top_p": torch.tensor(1)}),
    "top_p: too few rows": ("top_p", ValueError, lambda: {"top_p": rows(0.5, torch.float32, 1)}),
    "top_p: meta": ("top_p", ValueError, lambda: {"top_p": rows(0.5, torch.float32).to("meta")}),
    "min_p: str": ("min_p", TypeError, lambda: {"min_p": "0.5"}),
    "min_p: NaN": ("min_p", ValueError, lambda: {"min_p": float("nan")}),
    "min_p: larger than any float": ("min_p", ValueError, lambda: {"min_p": 10**400}),
    "min_p: bool rows": ("min_p", ValueError, lambda: {"min_p": rows(1, torch.bool)}),
    "min_p: too many rows": ("min_p", ValueError, lambda: {"min_p": rows(0.5, torch.float16, 9)}),
    "temperature: str": ("temperature", TypeError, lambda: {"temperature": "1"}),
    "temperature: negative": ("temperature", ValueError, lambda: {"temperature": -0.5}),
    "temperature: NaN": ("temperature", ValueError, lambda: {"temperature": float("nan")}),
    "temperature: a list with a negative": (
        "temperature",
        ValueError,
        lambda: {"temperature": [1.0, -0.5, 1.0]},
    ),
    "temperature: larger than any float": (
        "temperature",
        ValueError,
        lambda: {"temperature": 10**400},
    ),
    "temperature: int rows": (
        "temperature",
        ValueError,
        lambda: {"temperature": rows(1, torch.int32)},
    ),
    "temperature: a matrix": ("temperature", ValueError, lambda: {"temperature": logits()}),
    "q: float": ("q", TypeError, lambda: {"q": 1.0}),
    "q: float16": ("q", ValueError, lambda: {"q": logits().half()}),
    "q: float64": ("q", ValueError, lambda: {"q": logits().double()}),
    "q: other vocabulary": ("q", ValueError, lambda: {"q": logits()[:, :-1]}),
    "q: other batch": ("q", ValueError, lambda: {"q": logits()[:-1]}),
    "q: one row": ("q", ValueError, lambda: {"q": logits()[0]}),
    "q: meta": ("q", ValueError, lambda: {"q": logits().to("meta")}),
    "q with seed": ("seed", ValueError, lambda: {"q": logits(), "seed": 1}),
    "q with generator": (
        "generator",
        ValueError,
        lambda: {"q": logits(), "generator": torch.Generator()},
    ),
    "seed with generator": (
        "generator",
        ValueError,
        lambda: {"seed": 1, "generator": torch.Generator()},
    ),
    "seed: float": ("seed", TypeError, lambda: {"seed": 1.5}),
    "seed: bool": ("seed", TypeError, lambda: {"seed": True}),
    "seed: 64 bits": ("seed", ValueError, lambda: {"seed": 2**63}),
    "seed: float rows": ("seed", ValueError, lambda: {"seed": rows(1, torch.float32)}),
    "seed: too few rows": ("seed", ValueError, lambda: {"seed": rows(1, torch.int64, 2)}),
    "seed: a list of floats": ("seed", TypeError, lambda: {"seed": [1, 2, 3.0]}),
    "seed: a short list": ("seed", ValueError, lambda: {"seed": [1, 2]}),
    "seed: a float without dimensions": ("seed", ValueError, lambda: {"seed": torch.tensor(1.0)}),
    "seed: meta": ("seed", ValueError, lambda: {"seed": rows(1, torch.int64).to("meta")}),
    "position: float": ("position", TypeError, lambda: {"seed": 1, "position": 1.0}),
    "position: 65 bits": ("position", ValueError, lambda: {"seed": 1, "position": 2**64}),
    "position: float rows": (
        "position",
        ValueError,
        lambda: {"seed": 1, "position": rows(1, torch.float32)},
    ),
    "position: too many rows": (
        "position",
        ValueError,
        lambda: {"seed": 1, "position": rows(1, torch.int64, 4)},
    ),
    "position: a list of floats": (
        "position",
        TypeError,
        lambda: {"seed": 1, "position": [1.0] * BATCH},
    ),
    "position: a long list": (
        "position",
        ValueError,
        lambda: {"seed": 1, "position": [1] * 4},
    ),
    "generator: int": ("generator", TypeError, lambda: {"generator": 1}),
    "eps: negative": ("eps", ValueError, lambda: {"q": logits(), "eps": -1e-8}),
    "eps: NaN": ("eps", ValueError, lambda: {"q": logits(), "eps": float("nan")}),
    "eps: infinite": ("eps", ValueError, lambda: {"q": logits(), "eps": float("inf")}),
    "eps: negative without q": ("eps", ValueError, lambda: {"eps": -1.0}),
    "eps: larger than any float": ("eps", ValueError, lambda: {"eps": 10**400}),
    "eps: larger than any float32": ("eps", ValueError, lambda: {"eps": 1e300}),
    "eps: str": ("eps", TypeError, lambda: {"eps": "0"}),
    "eps: None": ("eps", TypeError, lambda: {"eps": None}),
    "return_logits: str": ("return_logits", TypeError, lambda: {"return_logits": "x"}),
    "return_logits: int": ("return_logits", TypeError, lambda: {"return_logits": 2}),
    "return_logprob: int": ("return_logprob", TypeError, lambda: {"return_logprob": 1}),
    "return_logprob: None": ("return_logprob", TypeError, lambda: {"return_logprob": None}),
}


def on_device(arguments: Arguments, device: torch.device) -> Arguments:
    """Move tensors of the CPU."""
    return {
        key: value.to(device)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        else value
        for key, value in arguments.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_error_names_the_argument(case: str, device: torch.device) -> None:
    name, error, make = CASES[case]
    arguments = on_device({"logits": logits(), **make()}, device)
    with pytest.raises(error) as raised:
        lmdecode.top_k_top_p_sample(**arguments)
    message = str(raised.value)
    assert re.search(rf"\b{name}\b", message), message
    assert "expected" in message, message


@pytest.mark.parametrize("p", [90, 1.5, [0.9, 90, 0.9]])
def test_a_top_p_above_1_says_its_range(p: object) -> None:
    place = r"\[1\]" if isinstance(p, list) else ""
    with pytest.raises(ValueError, match=rf"top_p{place} is .*; expected a number from 0 to 1$"):
        lmdecode.top_k_top_p_sample(logits(), top_p=p)


@pytest.mark.parametrize("dialect", ["", "Lmdecode", "llama.cpp", None, 0, ["vllm"]])
def test_unknown_dialect_lists_the_choices(dialect: object, device: torch.device) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        lmdecode.top_k_top_p_sample(logits().to(device), dialect=dialect)
    message = str(raised.value)
    assert "dialect" in message and repr(dialect) in message
    assert all(name in message for name in DIALECTS)


def test_logits_on_a_device_without_the_op() -> None:
    """Meta tensors give shapes, not an error: that is what tracing needs."""
    out = lmdecode.top_k_top_p_sample(logits().to("meta"), 3, return_logits=True)
    assert out.index.shape == (BATCH,) and out.index.device.type == "meta"
    assert out.kept_logits is not None and out.kept_logits.shape == (BATCH, VOCAB)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "temperature", "q", "seed"])
def test_tensors_on_two_devices(name: str) -> None:
    value = {"top_k": rows(1, torch.int64), "seed": rows(1, torch.int64), "q": logits()}.get(
        name, rows(0.5, torch.float32)
    )
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        lmdecode.top_k_top_p_sample(logits().cuda(), **{name: value})
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        lmdecode.top_k_top_p_sample(logits(), **{name: value.cuda()})


# --- The generator --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_failing_call_draws_nothing(case: str, device: torch.device) -> None:
    name, _, make = CASES[case]
    arguments = {"logits": logits(), **make()}
    if name == "position":
        del arguments["seed"]
    generator = torch.Generator(device).manual_seed(1)
    if name != "generator":
        arguments["generator"] = generator
    elif isinstance(arguments["generator"], torch.Generator):
        generator = arguments["generator"]
    before = generator.get_state()
    with pytest.raises((ValueError, TypeError)):
        lmdecode.top_k_top_p_sample(**on_device(arguments, device))
    assert torch.equal(generator.get_state(), before)


DRAWING: dict[str, Callable[[], Arguments]] = {
    "nothing": dict,
    "greedy": lambda: {"temperature": 0.0},
    "greedy rows": lambda: {"temperature": rows(0, torch.float32)},
    "one token": lambda: {"top_k": 1, "top_p": 0.0, "min_p": 1.0},
    "rows": lambda: {"top_k": rows(2, torch.int32), "top_p": rows(0.5, torch.float16)},
    "outputs": lambda: {"return_logits": True, "return_logprob": True},
    "position": lambda: {"position": 2**40},
    "position rows": lambda: {"position": rows(3, torch.int64)},
    "dialect": lambda: {"dialect": "vllm", "top_k": 3},
    "half": lambda: {"logits": logits().half()},
    "one column": lambda: {"logits": logits()[:, :1]},
    "no token": lambda: {"logits": torch.full((BATCH, VOCAB), -float("inf"))},
    "large vocabulary": lambda: {"logits": torch.zeros(BATCH, 50_000)},
}


@pytest.mark.parametrize("case", DRAWING)
def test_a_generator_advances_by_the_rows_alone(case: str, device: torch.device) -> None:
    arguments = on_device({"logits": logits(), **DRAWING[case]()}, device)
    generator, expected = (torch.Generator(device).manual_seed(5) for _ in range(2))
    before = generator.get_state()
    lmdecode.top_k_top_p_sample(**arguments, generator=generator)
    torch.randint(0, 2**63 - 1, (BATCH,), generator=expected, device=device)
    assert torch.equal(generator.get_state(), expected.get_state())
    assert not torch.equal(generator.get_state(), before)


# --- The out variant ------------------------------------------------------------------------------


def out_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "index": torch.full((BATCH,), -7, device=device),
        "kept_logits": torch.full((BATCH, VOCAB), -7.0, device=device),
        "logprob": torch.full((BATCH,), -7.0, device=device),
        "kept_count": torch.full((BATCH,), -7, dtype=torch.int32, device=device),
        "status": torch.full((BATCH,), 77, dtype=torch.uint8, device=device),
    }


def call_out(out: dict[str, torch.Tensor], device: torch.device, **changes: object) -> None:
    arguments = {
        "logits": logits().to(device),
        "top_k": 3,
        "top_k_rows": None,
        "top_p": 0.9,
        "top_p_rows": None,
        "min_p": 0.0,
        "min_p_rows": None,
        "temperature": 1.0,
        "temperature_rows": None,
        "q": None,
        "seed": None,
        "position": None,
        "eps": 1e-8,
        "dialect": 0,
    }
    torch.ops.lmdecode.top_k_top_p_sample.out(**{**arguments, **changes}, **out)


def test_out_tensors_are_written(device: torch.device) -> None:
    out = out_tensors(device)
    call_out(out, device)
    expected = lmdecode.top_k_top_p_sample(
        logits().to(device), 3, 0.9, return_logits=True, return_logprob=True
    )
    for name, tensor in out.items():
        assert torch.equal(tensor, getattr(expected, name)), name


WRONG_ARGUMENTS: dict[str, Callable[[], Arguments]] = {
    "logits": lambda: {"logits": logits().double()},
    "top_k": lambda: {"top_k_rows": rows(1, torch.int64, 2)},
    "top_p": lambda: {"top_p_rows": rows(1, torch.int64)},
    "min_p": lambda: {"min_p_rows": logits()},
    "temperature": lambda: {"temperature_rows": rows(1, torch.float16)},
    "q": lambda: {"q": logits()[:, 1:]},
    "seed": lambda: {"q": logits(), "seed": rows(1, torch.int64)},
    "position": lambda: {"position": rows(1, torch.int32)},
    "eps": lambda: {"eps": -1.0},
    "dialect": lambda: {"dialect": 6},
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_nothing_is_written_on_an_error(name: str, device: torch.device) -> None:
    out = out_tensors(device)
    changes = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in WRONG_ARGUMENTS[name]().items()
    }
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call_out(out, device, **changes)
    for output, untouched in zip(out.values(), out_tensors(device).values(), strict=True):
        assert torch.equal(output, untouched)


WRONG_OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dtype": lambda tensor: tensor.to(torch.float64),
    "a missing row": lambda tensor: tensor[1:],
    "gaps": lambda tensor: torch.stack((tensor, tensor), dim=-1)[..., 0],
    "another dimension": lambda tensor: tensor[None],
}


@pytest.mark.parametrize("wrong", WRONG_OUTPUTS)
@pytest.mark.parametrize("name", ["index", "kept_logits", "logprob", "kept_count", "status"])
def test_out_tensors_are_checked(name: str, wrong: str, device: torch.device) -> None:
    out = out_tensors(device)
    before = {key: tensor.clone() for key, tensor in out.items()}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call_out({**out, name: WRONG_OUTPUTS[wrong](out[name])}, device)
    for key, tensor in out.items():
        assert torch.equal(tensor, before[key]), key


# --- Empty batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        dict,
        lambda: {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.0, "seed": 1},
        lambda: {"top_k": rows(1, torch.int64, 0), "temperature": rows(1, torch.float32, 0)},
        lambda: {"q": torch.empty(0, VOCAB)},
        lambda: {"seed": rows(1, torch.int64, 0), "position": 4},
        lambda: {"generator": torch.Generator()},
    ],
)
def test_empty_batch(
    make: Callable[[], Arguments], dtype: torch.dtype, device: torch.device
) -> None:
    arguments = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in make().items()
    }
    empty = torch.empty(0, VOCAB, dtype=dtype, device=device)
    for dialect in DIALECTS:
        out = lmdecode.top_k_top_p_sample(
            empty, **arguments, return_logits=True, return_logprob=True, dialect=dialect
        )
        assert out.kept_logits is not None and out.logprob is not None
        assert [tuple(tensor.shape) for tensor in out] == [(0,), (0, VOCAB), (0,), (0,), (0,)]
        assert out.index.dtype == torch.int64 and out.kept_logits.dtype == torch.float32
