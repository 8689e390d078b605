"""What launches ask the CUDA runtime, which stands in here: once for a device and a kernel."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", "c++")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="in source checkouts only"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler"),
]

PROGRAM = r"""
#include "common/cuda_launch.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

static thread_local int current = 0;
static std::atomic<int> attributes{0}, prepared{0};
static std::atomic<bool> fails{false};

extern "C" {
cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  ++attributes;
  *value = which == cudaDevAttrMultiProcessorCount ? 100 + device : 1000 + device;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* code, const void*) {
  if (fails) return cudaErrorInvalidDeviceFunction;
  code->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  if (bytes != 1000 + current) std::abort();
  ++prepared;
  return cudaSuccess;
}
}

static void one(int) {}
static void two(int) {}

#define EXPECT(x) if (!(x)) { std::printf("line %d: %s\n", __LINE__, #x); return 1; }

int main() {
  using namespace lmdecode;
  {
    fails = true;  // what failed is asked for again
    const CurrentDevice device("op");
    bool threw = false;
    try { prepare_kernel("op", &one, device); } catch (const std::runtime_error& error) {
      threw = std::string(error.what()) == "op: cudaFuncGetAttributes: an error";
    }
    EXPECT(threw && prepared == 0);
    fails = false;
  }
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        current = (t + i) % 3;
        const CurrentDevice device("op");
        wrong += device.index != current || device.multiprocessors != 100 + current ||
                 device.shared_limit != 1000 + current || !device.has_clusters;
        wrong += prepare_kernel("op", &one, device) != kPortableClusterSize;
        wrong += prepare_kernel("op", &two, device) != kPortableClusterSize;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(wrong == 0);
  EXPECT(attributes == 3 * 4);  // of three devices
  EXPECT(prepared == 3 * 2);
  std::puts("done");
  return 0;
}
"""


def _include() -> Path | None:
    nvcc = shutil.which("nvcc")
    places = [Path("/usr/local/cuda/include")]
    if nvcc is not None:
        places += [Path(nvcc).resolve().parent.parent / "include"]
        said = subprocess.run(
            [nvcc, "-v", "--dryrun", "-x", "cu", "/dev/null"],
            capture_output=True,
            text=True,
            check=False,
        ).stderr
        places += [
            Path(line.split("=", 1)[1].strip()) / "include"
            for line in said.splitlines()
            if line.startswith("#$ TOP=")
        ]
    return next((place for place in places if (place / "cuda_runtime.h").is_file()), None)


@pytest.mark.parametrize("options", [[], ["-fsanitize=thread"]], ids=["plain", "thread sanitizer"])
def test_the_runtime_is_asked_once(tmp_path: Path, options: list[str]) -> None:
    include = _include()
    if include is None:
        pytest.skip("needs the headers of CUDA")
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", "-g", *options, f"-I{ROOT / 'csrc'}", "-isystem", include,
         source, "-o", program, "-pthread"],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr
