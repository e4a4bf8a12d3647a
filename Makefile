# `make demo` and `make test` are all that a newcomer needs; both install first, into .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
PACKAGES := core telemetry web hooks engines client buffer generators gateway server
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install demo demo-rl serve test test-sglang test-soak bench lint fix types layers docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Make .venv with everything

# torch first and by version: without a version, pip may take a build for GPUs, which is several GB larger.
$(VENV)/.installed: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Forebay needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo not there). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check '$(TORCH)' 'setuptools>=77'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[local,dev]'
	@mkdir -p .typecheck/forebay && for package in $(PACKAGES); do ln -sfn ../../$$package .typecheck/forebay/$$package; done
	@touch $@

demo: install ## Run everything at once: engine, server, a run, a trainer
	@$(BIN)/forebay demo

demo-rl: install ## Watch a tiny model learn: engine, server, GRPO trainer (ARGS='--seed 1 --dir FOLDER')
	@$(BIN)/python examples/grpo_loop/loop.py $(ARGS)

serve: install ## Run the server
	@$(BIN)/forebay serve

# The tests start some thousand processes: each compiles every module anew where Python may not write bytecode.
test test-sglang test-soak: export PYTHONDONTWRITEBYTECODE =

test: install ## Run the whole test suite
	@$(PYTEST) -q -n 4 --dist loadfile --no-loadscope-reorder

test-sglang: install $(SGLANG_VENV)/.installed ## Run the tests that need the real SGLang
	@FOREBAY_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(PYTEST) -q -m sglang

$(SGLANG_VENV)/.installed: tests/sglang/install.sh
	@echo "installing SGLang into $(SGLANG_VENV) (some minutes)"
	@PYTHON='$(PYTHON)' bash tests/sglang/install.sh $(SGLANG_VENV)
	@touch $@

test-soak: install ## Run the long crash and load loops
	@$(PYTEST) -q -m soak

bench: install ## Measure writes and reads against their floors
	@$(PYTEST) -q -s -m bench tests/benchmarks

lint: install ## Check style and formatting
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .

fix: install ## Repair style and formatting
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

types: install ## Check types
	@cd .typecheck && ../$(BIN)/mypy --no-error-summary --config-file ../pyproject.toml -p forebay

layers: install ## Check that each layer imports only what lies below it
	@cd .typecheck && PYTHONPATH=. ../$(BIN)/lint-imports --no-logo --config ../pyproject.toml

docs: install ## Write the generated tables and pages in docs/
	@$(BIN)/python docs/settings_tables.py
	@$(BIN)/python docs/client_reference.py

clean: ## Remove what was made, but for .venv and data
	@rm -rf .typecheck .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@rm -f $(VENV)/.installed
