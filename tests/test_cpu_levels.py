"""Builds with fewer CPU levels than there are: what they choose, what is refused, what is told."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import lmdecode
from lmdecode.system import built_cpu_capabilities

CSRC = Path(__file__).resolve().parent.parent / "csrc"
LEVELS = ("default", "avx2", "avx512")

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="in source checkouts only")

PROGRAM = """
#include <exception>
#include <iostream>
#include "simd/cpu_capability.h"
int main() {
  try {
    std::cout << lmdecode::cpu_capability_name(lmdecode::cpu_capability()) << " "
              << lmdecode::use_avx512_bf16() << lmdecode::use_avx512_vnni();
  } catch (const std::exception& error) {
    std::cout << error.what();
  }
}
"""

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(levels LANGUAGES CXX)
include({csrc}/sources.cmake)
choose_levels({wanted})
message(STATUS "levels: ${{LEVELS}}; ${{LEVEL_DEFINITIONS}}")
"""


def of_machine() -> tuple[str, ...]:
    """The levels without tiles that this processor runs, as torch sees it."""
    best = {"AVX2": 2, "AVX512": 3}.get(torch.backends.cpu.get_cpu_capability(), 1)
    return LEVELS[:best]


def run_with(tmp_path: Path, built: tuple[str, ...], forced: str = "") -> str:
    """What a program says that is linked with the levels of a build."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip("needs a C++ compiler")
    source, program = tmp_path / "levels.cpp", tmp_path / "levels"
    source.write_text(PROGRAM)
    names = [f"-DLMD_HAS_{name.upper()}" for name in built]
    command = [compiler, "-std=c++20", f"-I{CSRC}", *names, source]
    subprocess.run([*command, CSRC / "simd" / "cpu_capability.cpp", "-o", program], check=True)
    env = {**os.environ, "LMDECODE_CPU_CAPABILITY": forced}
    return subprocess.run(program, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_best_built_level_is_chosen(tmp_path: Path, count: int) -> None:
    chosen = run_with(tmp_path, LEVELS[:count])
    assert chosen == f"{[name for name in of_machine() if name in LEVELS[:count]][-1]} 00"


@pytest.mark.slow
def test_a_level_that_is_not_built_is_refused(tmp_path: Path) -> None:
    if len(of_machine()) < 2:
        pytest.skip("the processor has one level")
    forced = of_machine()[-1]
    built = of_machine()[:-1]
    assert run_with(tmp_path, built, forced) == (
        f"LMDECODE_CPU_CAPABILITY is {forced}, but this build of lmdecode has at most {built[-1]}: "
        "build it with LMDECODE_LEVELS=all"
    )
    assert run_with(tmp_path, built, built[-1]) == f"{built[-1]} 00"


def levels_of(tmp_path: Path, wanted: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(csrc=CSRC, wanted=wanted))
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_native_levels_are_those_of_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDECODE_CPU_CAPABILITY", "default")  # of runs, not of builds
    done = levels_of(tmp_path, "native")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "levels: " in line)
    levels = line.split(": ")[1].split("; ")[0].split(";")
    assert tuple(level.strip("_") for level in levels[: len(of_machine())]) == of_machine()
    assert {level.split("_")[0] for level in levels[len(of_machine()) :]} <= {of_machine()[-1]}
    for level in levels:
        assert f"LMD_HAS_{level.upper()}" in line


@pytest.mark.slow
def test_another_word_for_the_levels_is_an_error(tmp_path: Path) -> None:
    done = levels_of(tmp_path, "avx3")
    assert done.returncode != 0
    assert "LMDECODE_LEVELS is 'avx3'; expected all or native" in done.stderr


def test_what_can_be_chosen_is_built_and_runs() -> None:
    usable = lmdecode.cpu_capabilities()
    assert usable[0] == "default"
    assert set(usable) <= set(built_cpu_capabilities())
    assert lmdecode.cpu_capability() in usable
    assert tuple(name for name in usable if name != "amx") == tuple(
        name for name in of_machine() if name in built_cpu_capabilities()
    )
