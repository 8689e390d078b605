"""What the compiled libraries need: the ops any torch >= 2.11 and CPython, the store no torch."""

import importlib.util
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest
import torch

import lmdecode

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 11)

# The C shim of torch, its only interface that stays the same from version to version.
STABLE_PREFIXES = ("aoti_torch_", "torch_")
NEEDED = {
    "libtorch_cpu.so", "libc10.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
NEEDED_CUDA = {"libtorch_cuda.so", "libc10_cuda.so", "libcudart.so"}


def find_library(name: str) -> Path | None:
    spec = importlib.util.find_spec(f"lmdecode.{name}")
    return None if spec is None or spec.origin is None else Path(spec.origin)


LIBRARIES = [
    pytest.param(name, marks=pytest.mark.skipif(find_library(name) is None, reason="not built"))
    for name in ("_C", "_C_cuda")
]


STORE = pytest.param(
    "_store", marks=pytest.mark.skipif(find_library("_store") is None, reason="not built")
)


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}")
    return path


@cache
def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def library_path(name: str) -> str:
    path = find_library(name)
    assert path is not None
    return str(path)


def undefined_symbols(path: str) -> list[str]:
    """Mangled names, without versions."""
    output = run(tool("nm"), "-D", "--undefined-only", path)
    return [line.split()[-1].split("@")[0] for line in output.splitlines()]


def demangle(symbols: list[str]) -> dict[str, str]:
    """Return the demangled name of each mangled one."""
    if not symbols:
        return {}
    done = subprocess.run(
        [tool("c++filt")], input="\n".join(symbols), check=True, capture_output=True, text=True
    )
    return dict(zip(symbols, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", LIBRARIES)
def test_torch_is_reached_through_the_c_shim_alone(name: str) -> None:
    symbols = demangle(undefined_symbols(library_path(name)))
    assert len(symbols) > 10
    wrong = {
        text
        for symbol, text in symbols.items()
        if re.search(r"\b(at|c10|torch|caffe2|pybind11)::", text)
        or (symbol.startswith(("THP", "Py")))  # one build serves every Python
    }
    assert not wrong
    shim = {symbol for symbol in symbols if symbol.startswith(STABLE_PREFIXES)}
    assert shim, "no symbol of the shim: is this the right file?"


@cache
def shim_versions() -> dict[str, tuple[int, int]]:
    """Return the torch that brought each function of the shim; (0, 0): before its headers tell."""
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    versions: dict[str, tuple[int, int]] = {}
    for header in (*folder.glob("stable/c/*.h"), *folder.glob("inductor/aoti_torch/c/*.h")):
        conditions: list[tuple[int, int]] = []
        for line in header.read_text().splitlines():
            if re.match(r"\s*#\s*if", line):
                found = re.search(r"FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)", line)
                conditions.append((int(found[1]), int(found[2])) if found else (0, 0))
            elif re.match(r"\s*#\s*endif", line):
                conditions.pop()
            for function in re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", line):
                versions.setdefault(function, max(conditions, default=(0, 0)))
    return versions


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_symbol_of_torch_is_in_the_oldest_torch_supported(name: str) -> None:
    versions = shim_versions()
    assert max(versions.values()) >= OLDEST_TORCH, "the headers' conditions were not understood"
    shim = [s for s in undefined_symbols(library_path(name)) if s.startswith(STABLE_PREFIXES)]
    assert len(shim) > 10
    assert not {s: versions.get(s) for s in shim if versions.get(s, (99, 0)) > OLDEST_TORCH}


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_symbol_of_torch_is_weak(name: str) -> None:
    """A weak one may be null when it is called; what not every torch has is found by dlsym."""
    lines = run(tool("nm"), "-D", "--undefined-only", library_path(name)).splitlines()
    symbols = {line.split()[-1]: line.split()[-2] for line in lines}
    assert "U" in symbols.values()
    weak = {symbol for symbol, kind in symbols.items() if kind in "wv"}
    assert not {symbol for symbol in weak if symbol.startswith(STABLE_PREFIXES)}


@pytest.mark.parametrize("name", LIBRARIES)
def test_needed_libraries(name: str) -> None:
    output = run(tool("readelf"), "-d", library_path(name))
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output))
    assert any(library.startswith("libtorch") for library in needed)
    allowed = NEEDED | (NEEDED_CUDA if name == "_C_cuda" else set())
    others = {
        library
        for library in needed
        if library not in allowed and re.sub(r"\.so[.\d]*$", ".so", library) not in allowed
    }
    assert not others
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", output)


@pytest.mark.parametrize("name", [STORE])
def test_the_store_needs_no_torch(name: str) -> None:
    output = run(tool("readelf"), "-d", library_path(name))
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output))
    assert needed <= {"libsqlite3.so.0", *NEEDED} - {"libtorch_cpu.so", "libc10.so"}
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", output)
    symbols = undefined_symbols(library_path(name))
    assert not [symbol for symbol in symbols if symbol.startswith((*STABLE_PREFIXES, "THP"))]


@pytest.mark.parametrize("name", [*LIBRARIES, STORE])
def test_no_path_of_the_build_machine(name: str) -> None:
    data = Path(library_path(name)).read_bytes()
    places = {str(ROOT), str(Path.home()), "/tmp/", str(Path(torch.__file__).parents[1])}
    places |= {sysconfig.get_path("purelib"), sysconfig.get_path("data"), "/home/"}
    found = [place for place in places if len(place) > 2 and place.encode() in data]
    lines = [
        text.decode(errors="replace")
        for text in re.findall(rb"[\x20-\x7e]{5,}", data)
        if any(place.encode() in text for place in found)
    ]
    assert not found, lines[:10]


@pytest.mark.parametrize("name", [*LIBRARIES, STORE])
def test_exports_nothing_of_its_own(name: str) -> None:
    """Two extensions of one process must not see each other's functions."""
    output = run(tool("nm"), "-D", "--defined-only", library_path(name))
    symbols = demangle([line.split()[-1] for line in output.splitlines()])
    own = {text for text in symbols.values() if "lmdecode::" in text}
    assert not own


# --- Code for one CPU capability stays in its namespace -------------------------------------------

AVX_REGISTER = re.compile(r"%[yz]mm\d+")


def functions_with(disassembly: str, pattern: re.Pattern[str]) -> set[str]:
    """Return the demangled names of functions in whose code the pattern occurs."""
    found, current = set(), ""
    for line in disassembly.splitlines():
        if line.endswith(">:"):
            current = line[line.index("<") + 1 : -2]
        elif current and pattern.search(line):
            found.add(current)
            current = ""
    return found


@pytest.mark.skipif("x86" not in sysconfig.get_platform(), reason="x86 only")
def test_avx_code_is_in_the_kernel_namespaces_alone() -> None:
    """A std function compiled for AVX-512 and kept by the linker would crash an older CPU."""
    path = library_path("_C")
    if not any("lmdecode" in line for line in run(tool("nm"), "-C", path).splitlines()):
        pytest.skip("the library is stripped: no function names")
    text = run(tool("objdump"), "-d", "-C", "--no-show-raw-insn", path)
    found = functions_with(text, AVX_REGISTER)
    for level in {"avx2", "avx512"} & set(lmdecode.cpu_capabilities()):  # of the build, too
        assert any(f"lmdecode::{level}::" in name for name in found)
    levels = re.compile(r"\blmdecode::(avx2|avx512|avx512_bf16|avx512_vnni|avx512_amx)::")
    outside = {name for name in found if not levels.search(name)}
    assert not outside


def kernel_objects() -> list[Path]:
    """Object files of the kernels, where the build folder is still there."""
    return sorted(ROOT.glob("build/**/lmdecode_kernels_*.dir/**/*.o"))


@pytest.mark.skipif(not kernel_objects(), reason="no build folder")
@pytest.mark.parametrize("path", kernel_objects(), ids=lambda path: path.parts[-4])
def test_kernel_objects_share_no_symbol(path: Path) -> None:
    """Weak symbols of an object (inline functions) carry the capability in their name."""
    output = run(tool("nm"), "--defined-only", str(path))
    rows = [line.split() for line in output.splitlines()]
    defined = demangle([row[-1] for row in rows if row[-2] in "WVuTDBR"])
    assert defined
    pattern = r"\blmdecode::(default_|avx2|avx512|avx512_bf16|avx512_vnni|avx512_amx)::"
    shared = {text for text in defined.values() if not re.search(pattern, text)}
    assert not {text for text in shared if not text.startswith("DW.ref.")}


def test_capability_of_the_machine_is_one_of_the_known() -> None:
    assert lmdecode.cpu_capability() in ("default", "avx2", "avx512", "amx")
