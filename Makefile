# The interpreter that .venv is made with. Everything runs in .venv, whatever else is active.
PYTHON ?= python3
PYTEST_FLAGS ?= -n auto --maxprocesses 8 --dist worksteal

VENV := .venv
BIN := $(VENV)/bin/python

# Another environment's settings must not leak into ours.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER

.DEFAULT_GOAL := help
.PHONY: help demo native nvidia test lint accuracy clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter of a new $(VENV);"
	@echo "  PYTEST_FLAGS='-x -k nvfp4' replaces the flags of make test."

demo: $(VENV)/.installed-examples ## Train a small language model with FP4 attention
	$(BIN) -m examples.train_language_model

native: $(VENV)/.installed-build ## Build the CUDA kernels and the library that launches them
	$(BIN) cuda/build.py --install

nvidia: $(VENV)/.installed-nvidia ## Install NVIDIA's kernels, which tests of the emulator then run

test: $(VENV)/.installed-test ## Run the tests and doctests
	$(BIN) -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.installed-dev ## Check style, format and types
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy

accuracy: $(VENV)/.installed-examples ## Measure the accuracy of each recipe
	$(BIN) -m benchmarks.accuracy

clean: ## Remove .venv, caches and build products
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache jax_fp4attn/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra that has been installed, renewed when pyproject.toml changes.
$(VENV)/.installed-%: pyproject.toml | $(BIN)
	@$(call require_python,$(BIN),remove $(VENV) to have it made again)
	@$(BIN) -m pip --version >/dev/null 2>&1 || $(BIN) -m ensurepip
	$(BIN) -m pip install --quiet --editable '.[$*]'
	@touch $@

$(BIN):
	@command -v $(PYTHON) >/dev/null \
	  || { echo "No '$(PYTHON)' found; name an interpreter with PYTHON=python3.12" >&2; exit 1; }
	@$(call require_python,$(PYTHON),name another with PYTHON=python3.12)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# $(call require_python,interpreter,advice)
require_python = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo "jax_fp4attn needs Python 3.11 or newer, but $(1) is $$($(1) --version 2>&1); $(2)" >&2; \
       exit 1; }
