"""No two definitions of one name in csrc: the linker would keep either of them, silently.

One translation unit with every header in it refuses two types, constants or inline functions of one
qualified name. What a source file defines for itself never meets another file's definitions, so it
stands in an unnamed namespace, where each file's is its own.
"""

import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.test_layering import CSRC, cpp_files, includes, name, own_header

ROOT = CSRC.parent
TORCH = Path(torch.__file__).parent / "include"
HEADERS = [path for path in cpp_files() if path.suffix in (".h", ".cuh")]
SOURCES = [path for path in cpp_files() if path.suffix in (".cpp", ".cu")]

# What each level is compiled with (csrc/simd/vec.h). The compiler stops before it would generate
# instructions, so these need not be allowed to it.
LEVELS = {
    "default_": [],
    "avx2": ["-DLMD_SIMD_AVX2"],
    "avx512": ["-DLMD_SIMD_AVX512"],
    "avx512_bf16": ["-DLMD_SIMD_AVX512", "-DLMD_SIMD_AVX512_BF16"],
    "avx512_vnni": ["-DLMD_SIMD_AVX512", "-DLMD_SIMD_AVX512_VNNI"],
    "avx512_amx": [
        *("-DLMD_SIMD_AVX512", "-DLMD_SIMD_AVX512_BF16", "-DLMD_SIMD_AVX512_VNNI"),
        "-DLMD_SIMD_AVX512_AMX",
    ],
}
# Alternatives, of which simd/vec.h takes one.
VECTORS = {CSRC / "simd" / f"vec_{level}.h" for level in ("default", "avx2", "avx512")}


@cache
def reaches(path: Path, pattern: str) -> bool:
    """Whether a file, or one of csrc that it includes, matches outside of comments."""
    if re.search(pattern, re.sub(r"//[^\n]*", "", path.read_text())):
        return True
    headers = (own_header(path, include) for include in includes(path))
    return any(reaches(header, pattern) for header in headers if header is not None)


def is_of_a_level(path: Path) -> bool:
    return reaches(path, r"LMD_SIMD\b")


def needs_another_library(path: Path) -> bool:
    """Whether a header needs the CUDA runtime, SQLite or Python, which may not be here."""
    return path.name == "cuda_launch.h" or reaches(path, r"cuda_launch\.h|<sqlite3\.h>|<pybind11/")


def errors(headers: list[Path], *options: str) -> list[str]:
    """Compile a translation unit of these headers, for the compiler's errors alone."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    unit = "".join(f'#include "{path.relative_to(CSRC)}"\n' for path in headers)
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", "-fmax-errors=20", "-x", "c++", "-"]
    folders = [f"-I{CSRC}", f"-I{ROOT / 'tests' / 'cpp' / 'cuda_emulation'}", f"-isystem{TORCH}"]
    defined = [
        "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DUSE_CUDA", "-DLMDECODE_CUDA_EMULATION",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *folders, *defined, *options], input=unit, capture_output=True, text=True
    )
    found = [line for line in done.stderr.splitlines() if "error:" in line]
    assert found or done.returncode == 0, done.stderr
    return found


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="levels of x86")
@pytest.mark.parametrize("level", LEVELS)
def test_headers_of_the_kernels_define_each_name_once(level: str) -> None:
    headers = [path for path in HEADERS if is_of_a_level(path) and path not in VECTORS]
    assert len(headers) > 15
    found = errors(headers, f"-DLMD_SIMD={level}", *LEVELS[level])
    assert not found, "\n".join(found)


def test_all_other_headers_define_each_name_once() -> None:
    headers = [
        path for path in HEADERS if not is_of_a_level(path) and not needs_another_library(path)
    ]
    assert len(headers) > 100
    assert {path.parent.name for path in headers} >= {"sampling", "kv_cache", "bindings", "store"}
    found = errors(headers)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_what_a_source_file_defines_for_itself_is_in_an_unnamed_namespace(path: Path) -> None:
    """But for functions and variables, which the linker checks, and types of a C interface."""
    unnamed = r"^namespace \{$.*?^\}  // namespace$"  # clang-format marks the end
    code = re.sub(unnamed, "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(
        r"^(?:struct|class|union|enum|enum class) (?!lmdecode_)(\w+)[^;:\n]*\{", code, re.MULTILINE
    )
    found += re.findall(r"^inline [^\n(]*\b(\w+)\(", code, re.MULTILINE)
    found += re.findall(r"^template <[^\n]*>\n[^\n(]*\b(\w+)\(", code, re.MULTILINE)
    declared = "".join(header.read_text() for header in HEADERS)
    assert not [definition for definition in found if not re.search(rf"\b{definition}\b", declared)]
