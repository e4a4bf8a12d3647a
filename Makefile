# `make demo` and `make test` are all that a newcomer needs; both install first, into .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
VLLM_VENV := .venv-vllm
TRAINERS_VENV := .venv-trainers
ENV_VENV := .venv-environments
PAGE_VENV := .venv-page
# Harbor needs Python 3.12 or later: the first of these that is. It is looked for only when it is used.
ENV_PYTHON ?= $(shell for python in '$(PYTHON)' python3.12 python3.13 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[2-9]*/bin/python3; do \
  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then echo "$$python"; break; fi; done)
PACKAGES := core telemetry web hooks engines client buffer replay generators gateway workers server
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install wheel constraints demo demo-rl serve test test-sglang test-vllm test-trainers test-environments test-soak test-attack test-browser test-profile test-ray bench lint fix types layers count docs site clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Make .venv with everything

# torch first and by version: without a version, pip may take a build for GPUs, which is several GB larger.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Forebay needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo not there). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt '$(TORCH)' 'setuptools>=77'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@mkdir -p .typecheck/forebay && for package in $(PACKAGES); do ln -sfn ../../$$package .typecheck/forebay/$$package; done
	@touch $@

# Without the builds of versions (torch==2.13.0+cpu), which not every index has, and without addresses.
wheel: install ## Build the package into dist/
	@rm -rf build/lib
	@$(BIN)/python -m build --quiet --wheel --no-isolation && ls dist/*.whl

constraints: install ## Write the versions of .venv into constraints.txt, for all installations to come
	@{ echo '# The versions that the tests ran with: make install keeps to them, make constraints writes them anew.'; \
	  $(BIN)/python -m pip freeze --exclude-editable | grep '^[A-Za-z0-9._-]*==' | sed 's/+.*//' | grep -v '^forebay=='; } > constraints.new
	@mv constraints.new constraints.txt

demo: install ## Run everything at once: engine, server, a run, a trainer
	@$(BIN)/forebay demo

demo-rl: install ## Watch a tiny model learn: engine, server, GRPO trainer (ARGS='--seed 1 --dir FOLDER')
	@$(BIN)/python examples/grpo_loop/loop.py $(ARGS)

serve: install ## Run the server
	@$(BIN)/forebay serve

# The tests start some thousand processes: each compiles every module anew where Python may not write bytecode.
test test-sglang test-vllm test-trainers test-environments test-soak test-attack test-browser test-profile test-ray: export PYTHONDONTWRITEBYTECODE =

# More at a time than there are processors: for two thirds of its time, a test waits for what it has started.
test: install ## Run the whole test suite
	@$(PYTEST) -q -n 6 --dist loadfile --no-loadscope-reorder

test-sglang: install $(SGLANG_VENV)/.installed $(ENV_VENV)/.installed ## Run the tests that need the real SGLang
	@FOREBAY_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python \
	  FOREBAY_ENVIRONMENT_PYTHON=$(abspath $(ENV_VENV))/bin/python $(PYTEST) -q --timeout 900 -m sglang

$(SGLANG_VENV)/.installed: tests/sglang/install.sh
	@echo "installing SGLang into $(SGLANG_VENV) (some minutes)"
	@PYTHON='$(PYTHON)' bash tests/sglang/install.sh $(SGLANG_VENV)
	@touch $@

test-vllm: install $(VLLM_VENV)/.installed ## Run the tests that need the real vLLM
	@FOREBAY_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(PYTEST) -q --timeout 900 -m vllm tests/vllm

$(VLLM_VENV)/.installed: tests/vllm/install.sh
	@echo "installing vLLM into $(VLLM_VENV) (some minutes)"
	@PYTHON='$(PYTHON)' bash tests/vllm/install.sh $(VLLM_VENV)
	@touch $@

test-trainers: install $(TRAINERS_VENV)/.installed ## Run the tests that need the real TRL, verl and tinker
	@FOREBAY_TRAINERS_PYTHON=$(abspath $(TRAINERS_VENV))/bin/python $(PYTEST) -q --timeout 600 -n 2 --dist loadfile -m trainers tests/trainers

$(TRAINERS_VENV)/.installed: tests/trainers/install.sh
	@echo "installing the trainers into $(TRAINERS_VENV) (some minutes)"
	@PYTHON='$(PYTHON)' bash tests/trainers/install.sh $(TRAINERS_VENV)
	@touch $@

test-environments: install $(ENV_VENV)/.installed ## Run the tests that need the real verifiers and Harbor (ENV_PYTHON: 3.12 or later)
	@FOREBAY_ENVIRONMENT_PYTHON=$(abspath $(ENV_VENV))/bin/python $(PYTEST) -q --timeout 400 -n 2 --dist loadfile -m environments tests/environments

$(ENV_VENV)/.installed: tests/environments/install.sh
	@test -n '$(ENV_PYTHON)' || { echo "verifiers and Harbor need Python 3.12 or later. Try: make ENV_PYTHON=/usr/bin/python3.12 test-environments" >&2; exit 1; }
	@echo "installing verifiers and Harbor into $(ENV_VENV)"
	@PYTHON='$(ENV_PYTHON)' bash tests/environments/install.sh $(ENV_VENV)
	@touch $@

test-soak: install $(TRAINERS_VENV)/.installed ## Run the long crash and load loops, and long variants (ROUNDS=200: many kills; SAMPLES=500000: many samples)
	@FOREBAY_TRAINERS_PYTHON=$(abspath $(TRAINERS_VENV))/bin/python $(PYTEST) -q --timeout 1800 -m soak -n 2 --dist loadfile --no-loadscope-reorder

test-attack: install ## Attack a server with hostile requests, files and neighbours
	@$(PYTEST) -q --timeout 900 -m attack -n 4 --dist loadfile --no-loadscope-reorder

test-profile: install ## Plant faults in runs, and let a profile name them
	@$(PYTEST) -q --timeout 900 -m profile

test-ray: install $(VENV)/.ray ## Run worker groups on Ray, and on two nodes in network namespaces where there are the rights
	@$(PYTEST) -q --timeout 240 -m 'ray or cluster'

$(VENV)/.ray: pyproject.toml constraints.txt
	@echo "installing Ray into $(VENV)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

test-browser: wheel $(VENV)/axe.min.js ## Open the page of an installed wheel, and the report of a run, in a real Chromium (apt-get install chromium)
	@echo "installing the wheel into $(PAGE_VENV)"
	@PYTHON='$(PYTHON)' bash tests/browser/install.sh $(PAGE_VENV) "$$(ls -t dist/*.whl | head -1)"
	@env -u PYTHONPATH FOREBAY_SERVER_PYTHON=$(abspath $(PAGE_VENV))/bin/python $(PYTEST) -q -n 2 --dist loadfile -m browser tests/browser

$(VENV)/axe.min.js: tests/browser/fetch_axe.py pyproject.toml constraints.txt
	@echo "installing Playwright and axe-core into $(VENV)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@$(BIN)/python tests/browser/fetch_axe.py $@

bench: install ## Measure writes, reads and workers against their floors
	@$(PYTEST) -q -s --timeout 0 -m bench tests/benchmarks

lint: install ## Check style and formatting
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .

fix: install ## Repair style and formatting
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

types: install ## Check types
	@cd .typecheck && ../$(BIN)/mypy --no-error-summary --config-file ../pyproject.toml -p forebay

layers: install ## Check that each layer imports only what lies below it
	@cd .typecheck && PYTHONPATH=. ../$(BIN)/lint-imports --no-logo --config ../pyproject.toml

count: ## Count lines and modules of each top folder
	@$(PYTHON) tests/count_lines.py

docs: install ## Write the generated tables and pages in docs/
	@$(BIN)/python docs/settings_tables.py
	@$(BIN)/python docs/client_reference.py
	@$(BIN)/python docs/cli_options.py

site: install $(VENV)/.docs ## Build the docs site into build/site, and check its links (to read it: python -m http.server -d build/site)
	@rm -rf build/pages && mkdir -p build/pages
	@git ls-files '*.md' LICENSE Containerfile deploy docs examples ':!tests' | tar -cf - -T - | tar -xf - -C build/pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(PYTEST) -q -m site tests/test_site.py

$(VENV)/.docs: pyproject.toml constraints.txt
	@echo "installing MkDocs into $(VENV)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean: ## Remove what was made, but for .venv and data
	@rm -rf .typecheck .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@rm -f $(VENV)/.installed
