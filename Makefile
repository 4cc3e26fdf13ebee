# Every target sets up what it needs: `make test` works in a fresh checkout with only Python >= 3.11, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
LINT_READY := $(VENV)/lint-ready
DOCS_READY := $(VENV)/docs-ready
VLLM ?= 0.32
VLLM_VENV := .venv-vllm$(if $(filter-out 0.32,$(VLLM)),-$(VLLM))
VLLM_READY := $(VLLM_VENV)/ready
LLAMA_VENV := .venv-llama
KVPRESS_VENV := .venv-kvpress
KVPRESS_READY := $(KVPRESS_VENV)/ready

# The checkout has folders named kernels, graphs and eval: keep it off sys.path.
export PYTHONSAFEPATH := 1
# Most of what the libraries bring is never imported; what is, Python compiles then, once: images that forbid it to keep
# the bytecode would have every process compile torch and transformers again.
export PIP_NO_COMPILE := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-exhaustive docs test-versions test-torch-2.11 test-torch-2.15 vllm test-vllm test-real compare-kvpress compare-llama-cpp lint typecheck support-table mutations gpu-check clean

help: ## show this list
	@sed -n 's/^\([a-z0-9.-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(READY) ## compress the cache of the built-in model and show what is kept and lost; MODEL=smollm2-135m: of a real one
	@$(if $(filter smollm2-135m,$(MODEL)),$(BIN)/kvpass fetch $(MODEL) &&) $(BIN)/kvpass demo $(MODEL)

test: $(READY) ## run the quick tests that this machine can run
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-exhaustive: $(READY) ## run the full products of policies and families that make test samples (hours)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m exhaustive

lint: $(LINT_READY) ## ruff: style and formatting; import-linter: which package may import which
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-logo --no-cache

typecheck: $(LINT_READY) ## mypy, and what it says of wrong uses of kvpass
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -m exhaustive -W ignore tests/test_types.py

# Not --quiet: mkdocs then counts no warnings, and --strict does nothing.
docs: $(DOCS_READY) ## build the site in build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "docs: build/site/index.html"

test-versions: $(READY) ## model and kernel tests on older versions of transformers, and on the newest
	@scripts/test-versions $(VENV) transformers==5.2.0 transformers==5.17.0 transformers

test-torch-2.11: $(READY) ## the same on the oldest torch, with its CUDA libraries (5 GB)
	@scripts/test-versions $(VENV) "torch==2.11.0 triton==3.6.0 transformers==5.17.0 numpy<2.4"

test-torch-2.15: $(READY) ## the same on the newest torch, with its CUDA libraries unless pip finds a CPU build
	@scripts/test-versions $(VENV) "torch==2.15.0 triton==3.9.0 transformers==5.23.0"

vllm: $(VLLM_READY) ## set up vLLM for `kvpass serve` on the CPU, in an environment of its own, .venv-vllm (4 GB)
	@echo "there: $(VLLM_VENV)/bin/kvpass serve --help"

test-vllm: vllm ## run kvpass in vLLM on the CPU, in .venv-vllm (half an hour); VLLM=0.33: its Python files
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm

test-real: $(READY) ## real weights: fetch SmolLM2-135M, compare with transformers, answers at a quarter of the cache
	@$(BIN)/python -m pytest -m real -s tests/real tests/test_docs.py

compare-kvpress: $(READY) $(KVPRESS_READY) ## the same prompts, weights and budgets in kvpress 0.5.5, beside kvpass (hours)
	@$(BIN)/kvpass fetch smollm2-135m
	@$(BIN)/python scripts/compare-kvpress ours build/compare-kvpress
	@$(KVPRESS_VENV)/bin/python scripts/compare-kvpress theirs build/compare-kvpress
	@$(BIN)/python scripts/compare-kvpress table build/compare-kvpress --json build/compare-kvpress.json

compare-llama-cpp: $(READY) $(LLAMA_VENV)/ready ## a model in llama.cpp and in kvpass on this CPU (hours); MODEL=folder with model.gguf
	@$(BIN)/python scripts/compare-llama-cpp prompts build/compare-llama-cpp --model $(MODEL)
	@$(BIN)/python scripts/compare-llama-cpp run build/compare-llama-cpp --model $(MODEL) --other $(LLAMA_VENV)/bin/python
	@$(BIN)/python scripts/compare-llama-cpp table build/compare-llama-cpp --model $(MODEL) --json build/compare-llama-cpp.json

support-table: $(READY) ## write the tables of decoders in docs/models.md
	@PYTHONPATH=tests/support $(BIN)/python -m support_table docs/models.md

mutations: $(READY) ## break one line of the code at a time: the tests must notice (ten minutes)
	@$(BIN)/python scripts/mutations

# A machine with a GPU may have no way to install anything: a PYTHON that has all it takes is used as it is.
gpu-check: ## correctness and speed on the GPU of this machine, in under 10 minutes; goes on where it stopped; ARGS="--only tests"
	@if nvidia-smi -L >/dev/null 2>&1 && $(PYTHON) -c 'import torch, triton, transformers, rich, typer, matplotlib'; then \
	    mkdir -p .editable && ln -sfn ../kvpass .editable/ && \
	    PYTHONPATH="$(CURDIR)/.editable" $(PYTHON) scripts/gpu-check $(ARGS); \
	else \
	    $(MAKE) --no-print-directory $(READY) && $(BIN)/python scripts/gpu-check $(ARGS); \
	fi

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) .venv-vllm .venv-vllm-* $(KVPRESS_VENV) $(LLAMA_VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt scripts/setup
	@echo "setting up $(VENV) (first time: a few minutes)"
	@scripts/setup "$(PYTHON)" "$(VENV)"
	@touch $@

$(VLLM_READY): pyproject.toml scripts/setup-vllm
	@echo "setting up $(VLLM_VENV)"
	@scripts/setup-vllm "$(PYTHON)" "$(VLLM_VENV)" "$(VLLM)"
	@touch $@

$(KVPRESS_READY):
	@echo "setting up $(KVPRESS_VENV)"
	@$(PYTHON) -m venv $(KVPRESS_VENV)
	@$(KVPRESS_VENV)/bin/python -m pip install -qq kvpress==0.5.5 transformers==5.2.0 torch==2.13.0
	@touch $@

$(LLAMA_VENV)/ready:
	@echo "setting up $(LLAMA_VENV): llama.cpp is built (ten minutes)"
	@$(PYTHON) -m venv $(LLAMA_VENV)
	@$(LLAMA_VENV)/bin/python -m pip install -qq llama-cpp-python==0.3.36
	@touch $@

$(DOCS_READY): $(READY)
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[docs]'
	@touch $@

$(LINT_READY): $(READY)
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@
