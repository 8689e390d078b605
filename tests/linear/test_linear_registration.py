"""The linear ops as torch wants them: opcheck, torch.compile, fakes."""

import pytest
import torch

import lmdecode
from tests.linear.linear_cases import assert_same_bits

pytestmark = pytest.mark.usefixtures("fresh_compiler")

GENERATOR = torch.Generator().manual_seed(0)
X, WEIGHT, BIAS = (torch.randn(shape, generator=GENERATOR) for shape in ((5, 30), (20, 30), (20,)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_compile(dtype: str) -> None:
    layer = lmdecode.PackedLinear(WEIGHT, BIAS, dtype=dtype)

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(lmdecode.layer_norm(x), activation="silu") + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x in (X, X[0], X.expand(2, *X.shape)):
        assert_same_bits(compiled(x), step(x))
