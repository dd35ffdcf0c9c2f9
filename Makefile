# Two commands set everything up: `make train` and `make test`. All targets are listed by `make help`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/llama3_debug.toml
PROCESSES ?= 2
ARGS ?=
SHARD ?= 0/12
BUDGET_S ?= 600
# An environment of requirements.txt alone.
USER_VENV := .venv-user
# An environment with a CUDA build of torch, for tests of the code for GPUs on a machine without one.
CUDA_VENV := .venv-cuda
CUDA_TEST_PACKAGES := pytest|pytest-timeout|pytest-xdist|hypothesis|scipy|torchao|transformers
# One process more than cores, because many tests wait. Files stay whole, so that their pools do, and
# in order: the slow folders come first, so that the end is balanced.
TEST_PROCESSES ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# The processes of runs and tests import the package again and again: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: the processes of a run share the cores.
export OMP_NUM_THREADS ?= 1
# Tests and checks ask no hub.
test test-all test-shard test-fake-cuda test-gpu chaos mutants bench: export HF_HUB_OFFLINE = 1
test test-all test-shard test-fake-cuda test-gpu chaos mutants bench: export HF_DATASETS_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-shard test-fake-cuda test-gpu chaos mutants check fmt bench docs clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed-dev ## Make .venv with everything that tests and checks need.

train: $(VENV)/.installed ## Train the small Llama 3 (CONFIG=, PROCESSES=, ARGS="--section.key value").
	$(BIN)/torchtitan-lite train --nproc $(PROCESSES) --config $(CONFIG) $(ARGS)

test: setup ## Run the tests that every change must pass (ARGS="-k name" to choose).
	$(PYTEST) -m "not matrix and not gpu" --durations 30 $(ARGS)

test-all: setup ## Run all tests, the long matrices included.
	$(PYTEST) -m "not gpu" $(ARGS)

test-shard: setup ## Run a part of the long matrices (SHARD=K/N, BUDGET_S=seconds).
	$(PYTEST) -m "matrix and not gpu" --shard $(SHARD) --budget-s $(BUDGET_S) $(ARGS)

test-gpu: setup ## Run the tests that need a GPU, WORKERS at a time, and then those that measure time.
	PYTHON=$(BIN)/python BUDGET_S=3600 bash scripts/gpu_suite.sh test - outputs/gpu $(ARGS)

test-fake-cuda: $(CUDA_VENV)/.installed $(CUDA_VENV)/libcuda.so.1 ## Run the tests of a GPU without values (a CUDA build of torch, no GPU).
	LD_PRELOAD=$(abspath $(CUDA_VENV)/libcuda.so.1) TORCHTITAN_LITE_FAKE_CUDA=1 \
	  $(CUDA_VENV)/bin/python -m pytest -n 2 tests/fake_cuda $(ARGS)

chaos: setup ## Inject 200 seeded faults into a run, and compare it with an undisturbed run.
	$(BIN)/python -m tests.chaos --faults 200 $(ARGS)

mutants: setup ## Run drawn mutants of the product against the tests that reach them (hours).
	$(BIN)/python -m pip install --quiet cosmic-ray==8.7.0
	$(BIN)/python -m tests.mutants record
	$(BIN)/python -m tests.mutants run $(ARGS)
	$(BIN)/python -m tests.mutants table

check: setup ## Lint, format, types, layers, generated docs.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.config_reference --check
	$(BIN)/python -m scripts.architecture_page --check
	$(BIN)/python -m scripts.benchmark_page --check
	$(BIN)/python -m scripts.failure_page --check
	$(BIN)/python -m tests.models_page --check

fmt: setup ## Format the code and mend what lint can mend.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Run every benchmark and write benchmarks/results/.
	$(BIN)/python -m benchmarks.step --json benchmarks/results/step.json
	$(BIN)/python -m benchmarks.parallel --json benchmarks/results/parallel.json
	$(BIN)/python -m benchmarks.redistribute --json benchmarks/results/redistribute.json
	$(BIN)/python -m benchmarks.optimizer --json benchmarks/results/optimizer.json
	$(BIN)/python -m benchmarks.checkpoint --json benchmarks/results/checkpoint.json
	$(BIN)/python -m benchmarks.recovery --json benchmarks/results/recovery.json
	$(BIN)/python -m benchmarks.rank_recovery --json benchmarks/results/rank_recovery.json
	$(BIN)/python -m benchmarks.resize --json benchmarks/results/resize.json
	$(BIN)/python -m benchmarks.publish --json benchmarks/results/publish.json
	$(BIN)/python -m benchmarks.buddies --json benchmarks/results/buddies.json
	$(BIN)/python -m benchmarks.lost_machine --json benchmarks/results/lost_machine.json
	$(BIN)/python -m benchmarks.convert --json benchmarks/results/convert.json
	$(BIN)/python -m benchmarks.failures --json benchmarks/results/failures.json

docs: setup ## Write the generated pages of docs/ and the figures of all pages again.
	$(BIN)/python -m scripts.config_reference
	$(BIN)/python -m scripts.architecture_page
	$(BIN)/python -m scripts.benchmark_page
	$(BIN)/python -m scripts.failure_page
	$(BIN)/python -m tests.models_page

clean: ## Remove what runs and tests have written; .venv stays.
	rm -rf outputs test-logs build dist *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or later is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Set PYTHON=python3.12, say."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

# What users have, for the tests of the commands of the documentation.
$(USER_VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(USER_VENV)
	$(USER_VENV)/bin/python -m pip install --quiet --requirement requirements.txt
	$(USER_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# Without the user's links, which may lead to a CPU build.
$(CUDA_VENV)/.installed: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -hE '^($(CUDA_TEST_PACKAGES))==' requirements-dev.txt > $(CUDA_VENV)/test-packages.txt
	PIP_FIND_LINKS= PIP_CONFIG_FILE=/dev/null $(CUDA_VENV)/bin/python -m pip install --quiet \
	  --requirement requirements.txt --requirement $(CUDA_VENV)/test-packages.txt
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(CUDA_VENV)/libcuda.so.1: tests/fake_cuda/runtime.c $(CUDA_VENV)/.installed
	$(CC) -shared -fPIC -O1 -Wl,-soname,libcuda.so.1 -o $@ tests/fake_cuda/runtime.c -I \
	  "$$($(CUDA_VENV)/bin/python -c 'import os, triton; print(os.path.dirname(triton.__file__))')/backends/nvidia/include"
