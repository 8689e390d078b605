"""Wrong calls raise an error that names the argument, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.sampling import ops
from lmdecode.sampling.types import DIALECTS
from tests.sampling.contracts import NUMBERS, TENSORS
from tests.support.contracts import Call
from tests.support.op_contract import WrongCall, assert_refused, by_argument, wrong_calls
from tests.support.wrong_arguments import wrong_calls_of

BATCH, VOCAB = 3, 10
Arguments = dict[str, Any]


def logits() -> torch.Tensor:
    return torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(0))


def rows(value: float, dtype: torch.dtype, batch: int = BATCH) -> torch.Tensor:
    return torch.full((batch,), value).to(dtype)


# What tests/test_op_contracts.py does not make from right calls.
WRONG_TYPES: dict[str, list[Any]] = {
    "top_k": [[2, 2.0, 2], [True] * BATCH, [[2], [2], [2]]],
    "top_p": [[0.5, "0.5", 0.5]],
    "seed": [[1, 2, 3.0]],
    "position": [{"seed": 1, "position": [1.0] * BATCH}],
    "generator": [1],
}
WRONG_VALUES: dict[str, list[Any]] = {
    "logits": [torch.zeros(3, 0)],
    "top_k": [[2] * 2, [2, 2**64, 2]],
    "top_p": [(0.5,) * 4, [0.5, float("nan"), 0.5], 90, [0.9, 90, 0.9], float("inf")],
    "temperature": [-0.5, [1.0, -0.5, 1.0]],
    "seed": [{"q": logits(), "seed": 1}, 2**63, [1, 2]],
    "generator": [
        {"q": logits(), "generator": torch.Generator()},
        {"seed": 1, "generator": torch.Generator()},
    ],
    "greedy": [
        {"q": logits(), "greedy": True},
        {"seed": 1, "greedy": True},
        {"generator": torch.Generator(), "greedy": True},
    ],
    "position": [{"seed": 1, "position": [1] * 4}],
    "eps": [{"q": logits(), "eps": -1e-8}, {"q": logits(), "eps": float("inf")}, -1.0, 1e300],
}  # fmt: skip
WRONG = by_argument(TypeError, WRONG_TYPES) + by_argument(ValueError, WRONG_VALUES)


def on_device(arguments: Arguments, device: torch.device) -> Arguments:
    """Move tensors of the CPU."""
    return {
        key: value.to(device)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        else value
        for key, value in arguments.items()
    }


@wrong_calls(WRONG)
def test_error_names_the_argument(wrong: WrongCall, device: torch.device) -> None:
    arguments = on_device({"logits": logits(), **wrong[1]}, device)
    assert_refused(wrong, lambda: lmdecode.top_k_top_p_sample(**arguments))


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


@wrong_calls(WRONG)
def test_a_failing_call_draws_nothing(wrong: WrongCall, device: torch.device) -> None:
    arguments = {"logits": logits(), **wrong[1]}
    if "position" in arguments:
        del arguments["seed"]
    generator = torch.Generator(device).manual_seed(1)
    if "generator" not in arguments:
        arguments["generator"] = generator
    elif isinstance(arguments["generator"], torch.Generator):
        generator = arguments["generator"]
    before = generator.get_state()
    with pytest.raises((ValueError, TypeError)):
        lmdecode.top_k_top_p_sample(**on_device(arguments, device))
    assert torch.equal(generator.get_state(), before)


@wrong_calls(WRONG)
def test_a_failing_call_draws_nothing_from_torchs_generator(wrong: WrongCall) -> None:
    arguments = {"logits": logits(), **wrong[1]}
    if "position" in arguments:
        del arguments["seed"]
    before = torch.get_rng_state()
    with pytest.raises((ValueError, TypeError)):
        lmdecode.top_k_top_p_sample(**arguments)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("parameters", [NUMBERS, TENSORS], ids=["numbers", "tensors"])
def test_no_wrong_argument_draws(parameters: Arguments) -> None:
    call = Call(lmdecode.top_k_top_p_sample, torch.zeros(3, 40), **parameters)
    for wrong in wrong_calls_of(call, {}):
        before = torch.get_rng_state()
        try:
            wrong.call()
        except (ValueError, TypeError):
            assert torch.equal(torch.get_rng_state(), before), wrong[:2]


def test_a_failing_call_keeps_what_another_thread_has_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its draws would come again otherwise."""
    send = ops.sent

    def meanwhile(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        torch.rand(1)
        return send(tensor, device)

    monkeypatch.setattr(ops, "sent", meanwhile)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="top_k"):
        lmdecode.top_k_top_p_sample(logits(), top_k=rows(2, torch.int64, 2))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    torch.randint(0, 2**63 - 1, (BATCH,))
    torch.rand(1)
    assert torch.equal(after, torch.get_rng_state())


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
        "logits": logits().to(device), "top_k": 3, "top_k_rows": None, "top_p": 0.9,
        "top_p_rows": None, "min_p": 0.0, "min_p_rows": None, "temperature": 1.0,
        "temperature_rows": None, "q": None, "seed": None, "position": None, "eps": 1e-8,
        "dialect": 0,
    }  # fmt: skip
    torch.ops.lmdecode.top_k_top_p_sample.out(**{**arguments, **changes}, **out)


def test_out_tensors_are_written(device: torch.device) -> None:
    out = out_tensors(device)
    call_out(out, device)
    expected = lmdecode.top_k_top_p_sample(
        logits().to(device), 3, 0.9, greedy=True, return_logits=True, return_logprob=True
    )
    for name, tensor in out.items():
        assert torch.equal(tensor, getattr(expected, name)), name


WRONG_ARGUMENTS: dict[str, Callable[[], Arguments]] = {
    "top_p": lambda: {"top_p_rows": rows(1, torch.int64)},
    "temperature": lambda: {"temperature_rows": rows(1, torch.float16)},
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
