#!/usr/bin/env bash
# torch 2.13.0: an op of the stable ABI loses the memory of each `str` argument.
#
# A library that is written against torch/csrc/stable (STABLE_TORCH_LIBRARY, TORCH_BOX) may declare a
# `str` argument, which arrives as std::string. A copy of it is made on the way, and nothing frees
# it: a million calls with a text of 1,000 characters keep a gigabyte. An `int` costs nothing. A C++
# compiler is needed.
#
# Seen: 20,000 calls with a text of 10,000 characters keep 200 MB or more; with an integer, below 10 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
cat >"$folder/op.cpp" <<'CPP'
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

int64_t length(std::string text) { return text.size(); }
int64_t same(int64_t number) { return number; }

STABLE_TORCH_LIBRARY(finding, library) {
  library.def("length(str text) -> int");
  library.def("same(int number) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(finding, CompositeExplicitAutograd, library) {
  library.impl("length", TORCH_BOX(&length));
  library.impl("same", TORCH_BOX(&same));
}
CPP
include=$("$folder/venv/bin/python" -c 'import torch; print(torch.__path__[0] + "/include")')
"${CXX:-c++}" -std=c++20 -O1 -shared -fPIC -DTORCH_TARGET_VERSION=0x020b000000000000 -I"$include" \
  -I"$include/torch/csrc/api/include" "$folder/op.cpp" -o "$folder/op.so" -L"$include/../lib" -ltorch_cpu
"$folder/venv/bin/python" -W ignore - "$folder/op.so" <<'PY'
import sys

import torch

torch.ops.load_library(sys.argv[1])


def kept_megabytes(op, argument):
    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096 / 1e6

    op(argument)
    before = resident()
    for _ in range(20_000):
        op(argument)
    return resident() - before


print("torch", torch.__version__)
text = kept_megabytes(torch.ops.finding.length, "x" * 10_000)
number = kept_megabytes(torch.ops.finding.same, 7)
print(f"20,000 calls keep {text:.0f} MB with a text of 10 kB, {number:.0f} MB with a number")
assert text > 150 and number < 10
PY
echo "as it was found"
