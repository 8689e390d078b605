#!/bin/sh
# Makes the environments of the peers that `python -m benchmarks whole_model` has beside those of
# benchmarks/install_peers.sh, each in a folder of its own:
#   sh benchmarks/decoder/whole_model/install_peers.sh FOLDER
#   LMDECODE_PEERS=FOLDER python -m benchmarks whole_model
# The models are written to FOLDER/models and kept: 10 GB for model A, 20 GB for model B.
set -eu
FOLDER="${1:?usage: install_peers.sh FOLDER}"
PYTHON="${PYTHON:-python3}"
mkdir -p "$FOLDER"
environment() {
  [ -x "$FOLDER/$1/bin/python" ] || "$PYTHON" -m venv "$FOLDER/$1"
  pip="$FOLDER/$1/bin/pip"
}
environment llama_cpp
# A portable build would measure llama.cpp below its worth.
CMAKE_ARGS="-DGGML_NATIVE=ON" "$pip" install --no-binary llama-cpp-python \
  llama-cpp-python gguf safetensors numpy
# torch pinned in the same command: what asks for a newer one would fetch its CUDA packages.
environment openvino
# optimum-intel exports Qwen 3.5 from this release of transformers alone.
"$pip" install torch==2.13.0 openvino nncf optimum-intel "transformers==5.2.*"
"$pip" uninstall --yes torchvision  # of no use here, and it cannot be imported beside a CPU build
environment torchao
"$pip" install torch==2.13.0 "transformers>=5.0" numpy torchao
