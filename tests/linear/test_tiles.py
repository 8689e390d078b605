"""Products of tiles: the order of their sums in plain torch, and other users of the same tiles."""

import ctypes
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import lmdecode
from lmdecode import PackedLinear
from lmdecode.reference import tile_product
from lmdecode.reference.arithmetic import flushed_multiply_add
from tests.linear.linear_cases import assert_same_bits, normal

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX", "c++")
LEAST = 2.0**-126
SIZES = [(1, 1, 1), (3, 33, 17), (16, 64, 64), (17, 65, 70), (40, 1000, 130), (130, 90, 5)]
SIZES += [(33, 512, 65), (20, 513, 70)]  # 16 tiles along the depth, and what remains beside them


def planted(rows: int, features: int, seed: int) -> torch.Tensor:
    """Numbers of every kind: usual, subnormal, with subnormal products, infinite, NaN."""
    x = normal(rows, features, seed=seed)
    numbers = torch.tensor(
        [1e-40, -1e-39, 2.0**-70, -(2.0**-63), LEAST, 3e38, torch.inf, torch.nan]
    )
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(x.numel(), (len(numbers),), generator=generator)
    x.view(-1)[places] = numbers
    return x


def assert_same_numbers(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits, those of NaN aside."""
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (1.0, 2.0**-127, 0.0, 0.0),  # a factor is subnormal
        (2.0**-60, 2.0**-67, LEAST, LEAST * 1.5),
        (2.0**-60, 2.0**-67, 0.0, 0.0),  # a result is
        (-(2.0**-75), 2.0**-76, LEAST, LEAST),  # 2^-126 after rounding to 24 bits
        (-(2.0**-75), 2.0**-75, LEAST, 0.0),
        (-1.5 * 2.0**-75, 2.0**-76, LEAST, 0.0),  # but for the rounding to multiples of 2^-149
        (3.0, 2.0**127, -torch.inf, -torch.inf),
        (3.0, 2.0**127, 0.0, torch.inf),
    ],
)
def test_additions_of_tiles(a: float, b: float, c: float, want: float) -> None:
    got = flushed_multiply_add(*(torch.tensor([number]) for number in (a, b, c)))
    assert got.item() == want


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_the_order_is_that_of_the_instruction(rows: int, inputs: int, outputs: int) -> None:
    """One number at a time, in Python; and close to the sum in float64."""
    x, weight = normal(rows, inputs), normal(outputs, inputs, seed=1)
    got = tile_product(x, weight)
    a, b = x.bfloat16(), weight.bfloat16()
    exact = a.double() @ b.double().mT
    assert ((got - exact).abs() <= 1e-6 * (a.double().abs() @ b.double().abs().mT)).all()
    total = torch.zeros(1)
    row, column = a[-1].float(), b[-1].float()
    for first in range(0, inputs, 32):
        chains = [torch.zeros(1), torch.zeros(1)]
        for i in range(first, min(first + 32, inputs)):
            product = (row[i].double() * column[i].double()).item()
            # Exact: few bits of products meet those of sums of their size.
            chains[i % 2] = torch.tensor([chains[i % 2].double().item() + product]).float()
        total = total + (chains[0] + chains[1])
    assert_same_bits(got[-1:, -1], total)


@pytest.mark.skipif(lmdecode.cpu_capability() != "amx", reason="this machine has no tiles")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_layers_have_the_bits_of_the_order(rows: int, inputs: int, outputs: int) -> None:
    x, weight = planted(rows, inputs, 2), planted(outputs, inputs, 3)
    assert_same_numbers(PackedLinear(weight, dtype="bfloat16")(x), tile_product(x, weight))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels of x86")
def test_emulated_kernels_have_the_bits_of_the_order(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip("needs a C++ compiler")
    csrc, cpp, library = ROOT / "csrc", ROOT / "tests" / "cpp", tmp_path / "emulated.so"
    features = "2 fma bmi bmi2 f16c 512f 512bw 512dq 512vl 512bf16 512vnni".split()
    flags = [f"-mavx{name}" if name[0].isdigit() else f"-m{name}" for name in features]
    flags += [f"-DLMD_SIMD_AVX512{part}" for part in ("", "_BF16", "_VNNI", "_AMX")]
    sources = [
        csrc / "linear" / "packed_linear_cpu_kernel.cpp",
        cpp / "amx_emulation" / "amx_emulation.cpp",
        cpp / "linear" / "emulated_linear.cpp",
    ]
    subprocess.run(
        [COMPILER, "-std=c++20", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-w", *flags,
         "-DLMD_SIMD=avx512_amx_emulated", "-DLMDECODE_AMX_EMULATION", "-DLMD_HAS_AVX512",
         f"-I{csrc}", f"-I{cpp / 'amx_emulation'}", *sources, csrc / "simd" / "cpu_capability.cpp",
         "-o", library],
        check=True,
    )  # fmt: skip
    multiply = ctypes.CDLL(str(library)).lmdecode_emulated_bfloat16
    for rows, inputs, outputs in SIZES:
        for make in (planted, lambda *size: normal(*size[:2], seed=size[2])):
            x, weight = make(rows, inputs, 2), make(outputs, inputs, 3)
            y = torch.zeros(rows, outputs)
            pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, weight, y))
            if multiply(*pointers, *map(ctypes.c_int64, (rows, inputs, outputs))) == 0:
                pytest.skip("needs AVX512_BF16 and AVX512_VNNI")
            assert_same_numbers(y, tile_product(x, weight))


def test_torch_multiplies_beside_it() -> None:
    """torch's own products take the same registers on the same threads."""
    x, weight = normal(20, 128), normal(70, 128, seed=1)
    layers = [PackedLinear(weight, dtype=dtype) for dtype in ("bfloat16", "int8", "int4")]
    a, b = x.bfloat16(), weight.bfloat16()
    want, product = [layer(x) for layer in layers], a @ b.mT

    def both(_: int) -> None:
        for layer, y in zip(layers, want, strict=True):
            assert torch.equal(a @ b.mT, product)
            assert_same_bits(layer(x), y)
        assert torch.equal(a @ b.mT, product)

    both(0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(both, range(40)))
