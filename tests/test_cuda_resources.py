"""Registers, spills and instructions of every CUDA kernel, held against tests/cuda_resources.md.

``python -m tests.test_cuda_resources`` writes the table anew from the installed library.
"""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.sass import Kernel, Loop, kernels_of
from tests.support.wheels import files_of_wheels

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "cuda_resources.md"
ARCH = "sm_90"
PACKAGES = ("nvidia-cuda-cuobjdump>=13.0", "nvidia-cuda-nvdisasm>=13.0")
FLAGS = "-std=c++20 -O3 --cubin --fmad=false --prec-div=true --prec-sqrt=true --ftz=false"
PROBE = ROOT / "tests" / "cpp" / "attention" / "tile_loader_probe.cu"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="in source checkouts only"),
]


def find_cuobjdump() -> Path:
    """Return the program: the machine's, or that of two small wheels, kept in build/."""
    found = shutil.which("cuobjdump")
    if found and shutil.which("nvdisasm"):
        return Path(found)
    folder = files_of_wheels(
        ROOT / "build" / "cuda-tools",
        "cuobjdump and nvdisasm",
        lambda name: Path(name).name if Path(name).parent.name == "bin" else None,
        *PACKAGES,
    )
    for program in folder.iterdir():
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(folder)])  # nvdisasm
    return folder / "cuobjdump"


def _nvcc_version() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    said = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release (\S+),", said)
    return found[1]


def _library() -> Path:
    spec = importlib.util.find_spec("lmdecode._C_cuda")
    if spec is None or spec.origin is None:
        pytest.skip("built without CUDA kernels")
    return Path(spec.origin)


def _row(kernel: Kernel) -> list[str]:
    loop = kernel.main_loop()
    counts = ["", "", "", ""] if loop is None else [str(count or "") for count in loop]
    return [kernel.name, str(kernel.registers), str(kernel.stack or ""), *counts]


def _rows_of_table() -> dict[str, list[str]]:
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[1].isdigit():
            rows[cells[0].strip("`")] = cells[1:]
    return rows


@pytest.fixture(scope="module")
def cuobjdump() -> Path:
    """Return the program, where the table is of the installed nvcc."""
    version = _nvcc_version()
    told = re.search(r"nvcc (\d+\.\d+)", TABLE.read_text())
    if told[1] != version:
        pytest.skip(f"the table is of nvcc {told[1]}, this is {version}")
    return find_cuobjdump()


@pytest.fixture(scope="module")
def kernels(cuobjdump: Path) -> dict[str, Kernel]:
    """Return all kernels of the installed library."""
    return kernels_of(cuobjdump, _library(), ARCH)


def test_no_kernel_takes_more_than_the_table_says(kernels: dict[str, Kernel]) -> None:
    table = _rows_of_table()
    assert table.keys() == kernels.keys()
    more = []
    for name, kernel in kernels.items():
        for column, told, found in zip(
            ("registers", "stack", "loop", "HMMA", "copies", "spills"),
            table[name], _row(kernel)[1:], strict=True,
        ):  # fmt: skip
            if int(found or 0) > int(told or 0):
                more.append(f"{name}: {column} {found}, expected at most {told or 0}")
    assert not more, "\n".join(more)


def test_no_main_loop_spills(kernels: dict[str, Kernel]) -> None:
    loops = {name: kernel.main_loop() for name, kernel in kernels.items()}
    assert sum(loop is not None and loop.products > 0 for loop in loops.values()) >= 42
    assert [name for name, loop in loops.items() if loop is not None and loop.spills] == []


@pytest.mark.parametrize(("kind", "elements"), [("float", 4), ("BFloat16", 8), ("Half", 8)])
def test_a_logit_is_read_by_at_most_eight_instructions(kernels, kind: str, elements: int) -> None:
    for kernel in ("top_k_top_p_sample_kernel", "log_softmax_top_k_row_kernel"):
        loop = kernels[f"{kernel}<{kind}>"].main_loop()
        assert loop.copies > 0
        assert loop.size <= 8 * loop.copies * elements


@pytest.mark.parametrize(("kind", "elements"), [("float", 4), ("BFloat16", 8), ("Half", 8)])
def test_a_mass_is_added_by_at_most_forty_instructions(kernels, kind: str, elements: int) -> None:
    """Of top-p alone: with two atomics, which return nothing that one would wait for."""
    sizes = []
    for code in kernels[f"top_k_top_p_sample_kernel<{kind}>"].inner_loops():
        atomics = [text for text in code if "ATOMS" in text]
        weights = sum("FFMA" in text for text in code)  # five are a polynomial
        if weights == 5 * elements and len(atomics) == 2 * elements:
            if all(" RZ, " in text for text in atomics):
                sizes.append(len(code))
    assert sizes and min(sizes) <= 40 * elements


def test_a_copy_of_16_bytes_is_at_most_sixteen_instructions(cuobjdump: Path, tmp_path) -> None:
    """Of the loop that loads tiles; rows are looked up besides, once a row and step."""
    cubin = tmp_path / "probe.cubin"
    subprocess.run(
        ["nvcc", *FLAGS.split(), f"-arch={ARCH}", f"-I{ROOT / 'csrc'}", str(PROBE), "-o", cubin],
        check=True,
        capture_output=True,
    )
    probes = kernels_of(cuobjdump, cubin, ARCH)
    loops: dict[int, Loop] = {}
    for size in (64, 128, 256):
        loop = probes[f"tile_loader_probe<BFloat16 {size}>"].main_loop()
        assert loop is not None and loop.spills == 0
        loops[size] = loop
    assert [loop.copies for loop in loops.values()] == [8, 16, 32]
    # What a look-up costs is the same in all three.
    for small, large in ((64, 128), (128, 256)):
        copies = loops[large].copies - loops[small].copies
        assert loops[large].size - loops[small].size <= 16 * copies
    assert loops[256].size <= 16 * loops[256].copies


def write_table() -> None:
    """Write tests/cuda_resources.md of the installed library."""
    kernels = kernels_of(find_cuobjdump(), _library(), ARCH)
    lines = [
        "# Resources of the CUDA kernels", "",
        f"Of {ARCH}, compiled by nvcc {_nvcc_version()}, as `cuobjdump` has them.",
        "`tests/test_cuda_resources.py` holds every build to them, and writes them:",
        "`python -m tests.test_cuda_resources`. Nothing here is a measurement of time.", "",
        "- **stack**: bytes of a thread, for spilled registers and arrays that have an index.",
        "- **loop**: instructions of the main loop, whichever branches are taken. That is the",
        "  shortest with all products of tensor cores, or else the first that copies 16 bytes.",
        "- **HMMA**, **copies**, **spills**: of these, products, copies of 16 bytes from global",
        "  memory, and loads and stores of spilled registers.", "",
        "| kernel | registers | stack | loop | HMMA | copies | spills |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in sorted(kernels):
        cells = [f"`{name}`", *_row(kernels[name])[1:]]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_table()
