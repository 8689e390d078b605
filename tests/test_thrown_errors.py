"""Errors of C++ in Python, also where torch makes a RuntimeError of each, as from 2.15 on."""

import re
from pathlib import Path

import pytest
import torch

from lmdecode._checks import as_thrown

CSRC = Path(__file__).resolve().parent.parent / "csrc"
OPS = torch.ops.lmdecode
X, WEIGHT = torch.zeros(2, 3), torch.zeros(5)
REFUSED = r"^layer_norm: weight has shape \[5\]; expected \[3\]$"


def raised(error: Exception) -> Exception:
    """Return what an op's call raises where torch raises ``error``."""

    def call() -> None:
        raise error

    with pytest.raises(Exception) as info:
        as_thrown(call)()
    return info.value


@pytest.mark.parametrize("op", [OPS.layer_norm, OPS.layer_norm.default], ids=str)
def test_an_op_refuses_with_a_value_error(op) -> None:
    for kwargs in ({"weight": WEIGHT, "bias": None, "eps": 1e-5}, {}):
        with pytest.raises(ValueError, match=REFUSED):
            op(X, **kwargs) if kwargs else op(X, WEIGHT, None, 1e-5)


def test_a_compiled_function_refuses_with_a_value_error(fresh_compiler: None) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return OPS.layer_norm(x, weight, None, 1e-5)

    with pytest.raises(ValueError, match=REFUSED):
        compiled(X, WEIGHT)


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        OPS.pack_linear(torch.zeros(1, 1).expand(1 << 22, 1 << 22), 0)


@pytest.mark.parametrize(
    "text",
    [
        "layer_norm: weight has shape [5]; expected [3]",
        "Sampler.insert: rules is not what it should be: of another kind",
        "causal_forward_: caches.states has shape [2]; expected [2, 5]",
        "LMDECODE_CPU_CAPABILITY is 'sse'; expected default, avx2, avx512 or amx",
    ],
)
def test_what_was_refused_becomes_a_value_error(text: str) -> None:
    error = raised(RuntimeError(text))
    assert type(error) is ValueError and str(error) == text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("lmdecode::layer_norm() Expected a value of type 'Tensor' for argument 'x'"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("aoti_torch_empty_strided(...) API call failed at tensor.h, line 1"),
        torch.OutOfMemoryError("layer_norm: no more"),
        IndexError("layer_norm: 5"),
    ],
    ids=str,
)
def test_another_error_stays_as_it_is(error: Exception) -> None:
    assert raised(error) is error


@pytest.mark.skipif(not CSRC.is_dir(), reason="in source checkouts only")
def test_every_runtime_error_of_csrc_stays_one() -> None:
    """What each of its throws says begins with an op's name, and is yet no refusal."""
    found = 0
    for path in [*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp"), *CSRC.rglob("*.cu")]:
        if path.is_relative_to(CSRC / "store"):  # pybind11's, not torch's
            continue
        for thrown in re.findall(r"throw std::runtime_error\((.*?)\);", path.read_text(), re.S):
            parts = [part.strip() for part in thrown.split(" +")]
            error = RuntimeError("".join(map(said, parts)))
            assert raised(error) is error, thrown
            found += 1
    assert found >= 6


def said(part: str) -> str:
    """Return what a part of a message may be."""
    literals = re.findall(r'"((?:[^"\\]|\\.)*)"', part)
    if literals:
        return "".join(literals)
    if part.startswith("std::to_string"):
        return "7"
    return "launch" if part == "what" else "some_op"
