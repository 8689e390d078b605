"""How a CUDA binding finds the current stream, with a stand-in for torch's libtorch_cuda.so."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", "c++")

pytestmark = [
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="in source checkouts only"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has the library itself"),
]

PROBE = """
#include <cstring>

#include "bindings/cuda_stream.h"

// The stream's address, or 0 and why there is none.
extern "C" long probe(int device, char* error) {
  try {
    return reinterpret_cast<long>(lmdecode::current_cuda_stream(device));
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), 999);
    return 0;
  }
}
"""
STANDS_IN = """
extern "C" int aoti_torch_get_current_cuda_stream(int device, void** stream) {
  *stream = reinterpret_cast<void*>(1000L + device);
  return device < 4 ? 0 : 1;
}
"""
# As torch does it: the library is opened for itself alone, after torch and before ours.
PROGRAM = """
import ctypes, os, sys
import torch
folder, stand_in, *devices = sys.argv[1:]
if stand_in != "none":
    ctypes.CDLL(f"{folder}/{stand_in}/libtorch_cuda.so", mode=os.RTLD_LOCAL | os.RTLD_NOW)
probe = ctypes.CDLL(f"{folder}/probe.so").probe
probe.restype = ctypes.c_long
for device in devices:
    error = ctypes.create_string_buffer(1000)
    print(probe(int(device), error) or error.value.decode())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the stand-ins, and a library with the adapter, linked as _C_cuda is."""
    folder = tmp_path_factory.mktemp("stream")

    def build(name: str, code: str, *flags: str) -> None:
        source = folder / name.replace(".so", ".cpp")
        source.parent.mkdir(exist_ok=True)
        source.write_text(code)
        subprocess.run(
            [COMPILER, "-std=c++20", "-shared", "-fPIC", source, "-o", folder / name, *flags],
            check=True,
        )

    soname = "-Wl,-soname,libtorch_cuda.so"
    build("cuda/libtorch_cuda.so", STANDS_IN, soname)
    build("old/libtorch_cuda.so", "", soname)
    home = Path(torch.__file__).parent
    build(
        "probe.so", PROBE, "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000",
        f"-I{ROOT / 'csrc'}", "-isystem", str(home / "include"), f"-L{home / 'lib'}",
        "-Wl,--as-needed", "-ltorch_cpu", "-lc10",
    )  # fmt: skip
    return folder


def run(folder: Path, stand_in: str, *devices: int) -> list[str]:
    """Return what the adapter answers for each device."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, stand_in, *map(str, devices)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"died with {done.returncode}: {done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_stream_is_found_in_a_library_that_torch_loaded_for_itself(folder: Path) -> None:
    assert run(folder, "cuda", 0, 3, 0) == ["1000", "1003", "1000"]


def test_an_error_of_torch_is_an_error(folder: Path) -> None:
    failed, found = run(folder, "cuda", 4, 1)
    assert "call failed" in failed
    assert found == "1001"


def test_without_the_library_the_error_says_so(folder: Path) -> None:
    expected = "lmdecode: a CUDA tensor came, but torch has not loaded libtorch_cuda.so"
    assert run(folder, "none", 0, 0) == [expected, expected]


def test_without_the_function_the_error_names_it(folder: Path) -> None:
    (error,) = run(folder, "old", 0)
    assert "libtorch_cuda.so has no aoti_torch_get_current_cuda_stream" in error
    assert "torch 2.11" in error
