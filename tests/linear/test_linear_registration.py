"""The linear ops as torch wants them: opcheck, torch.compile, fakes."""

import pytest
import torch
from linear_cases import assert_same_bits
from torch.library import opcheck

import lmdecode
from lmdecode.linear.quantized_weight import KINDS

pytestmark = pytest.mark.usefixtures("fresh_compiler")

OPS = torch.ops.lmdecode
ROUNDED = (0, 1, 2, 7, 8, 9, 10, 21, 22, 23)  # numbers of formats that floats are rounded to
GENERATOR = torch.Generator().manual_seed(0)
X, WEIGHT, BIAS = (torch.randn(shape, generator=GENERATOR) for shape in ((5, 30), (20, 30), (20,)))
RESIDUAL = torch.randn(5, 20, generator=GENERATOR)


@pytest.mark.parametrize("number", ROUNDED)
def test_opcheck(number: int) -> None:
    opcheck(OPS.pack_linear.default, (WEIGHT, number))
    packed = OPS.pack_linear(WEIGHT, number)
    out = torch.empty_like(packed)
    opcheck(OPS.pack_linear.out, (WEIGHT, number), {"out": out})
    OPS.pack_linear(WEIGHT, number, out=out)
    assert torch.equal(out, packed)
    for after in ((None, 0, None, None), (BIAS, 2, RESIDUAL, RESIDUAL)):
        opcheck(OPS.packed_linear.default, (X, packed, 20, number, *after))
        opcheck(OPS.packed_linear.out, (X, packed, 20, number, *after), {"out": torch.empty(5, 20)})


def test_opcheck_norms() -> None:
    gamma, beta = X[0].clone(), X[1].clone()
    opcheck(OPS.layer_norm.default, (X, None, None, 1e-5))
    opcheck(OPS.layer_norm.default, (X, gamma, beta, 1e-5))
    opcheck(OPS.rms_norm.default, (X, gamma, 1e-6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_compile(dtype: str) -> None:
    layer = lmdecode.PackedLinear(WEIGHT, BIAS, dtype=dtype)

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(lmdecode.layer_norm(x), activation="silu") + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(X), step(X))


@pytest.mark.parametrize("number", ROUNDED)
def test_the_fake_of_packing_has_the_size(number: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = OPS.pack_linear(mode.from_tensor(WEIGHT), number)
    real = OPS.pack_linear(WEIGHT, number)
    assert fake.shape == real.shape and fake.dtype == real.dtype


@pytest.mark.parametrize("number", ROUNDED)
def test_opcheck_of_repacked_weights(number: int) -> None:
    opcheck(OPS.repack_linear.default, (OPS.pack_linear(WEIGHT, number),))


@pytest.mark.parametrize("zeros", [None, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_opcheck_of_quantized_weights(group: int, zeros: int | None) -> None:
    q = torch.randint(16, (20, 2 * group), generator=GENERATOR, dtype=torch.uint8)
    scales = torch.rand(20, 2, generator=GENERATOR).half()
    offsets = None if zeros is None else torch.full((20, 2), zeros, dtype=torch.uint8)
    opcheck(OPS.pack_quantized_linear.default, (q, scales, offsets))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_of_gguf_blocks(kind: str) -> None:
    """Of bytes that are small numbers as float16, too."""
    number, size = KINDS[kind].number, 3 * KINDS[kind].block_bytes
    blocks = torch.randint(60, (5, size), generator=GENERATOR, dtype=torch.uint8)
    opcheck(OPS.pack_gguf_linear.default, (blocks, number))
    out = torch.empty_like(OPS.pack_gguf_linear(blocks, number))
    opcheck(OPS.pack_gguf_linear.out, (blocks, number), {"out": out})
    opcheck(OPS.dequantize_gguf.default, (blocks, number))
    opcheck(OPS.repack_linear.default, (OPS.pack_gguf_linear(blocks, number),))
