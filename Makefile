# Every target sets up what it needs: the virtual environment is made once, and filled again only when
# a file that says what goes into it has changed.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := pyproject.toml platforms/torch/pyproject.toml platforms/mindspore/pyproject.toml plugins/sample_accelerator/pyproject.toml \
	plugins/lightning/pyproject.toml plugins/transformers/pyproject.toml constraints.txt requirements-dev.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-mindspore test lint format bench soak docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The constraints choose one torch for everybody: an unpinned one may be a newer CUDA build of gigabytes.
$(INSTALLED): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo "The development set-up needs Python 3.11 or 3.12: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -r requirements-dev.txt -e . -e platforms/torch -e platforms/mindspore -e plugins/sample_accelerator \
		-e plugins/lightning -e plugins/transformers
	@touch $@

setup: $(INSTALLED)  ## make the virtual environment with everything in it

demo: $(INSTALLED)  ## run the example: train, save, resume on another number of ranks
	$(BIN)/python examples/train_gpt/demo.py

demo-mindspore: $(INSTALLED)  ## Model.train on 2 processes: killed, resumed, and its weights in PyTorch
	$(BIN)/python examples/train_mindspore/demo.py

test: $(INSTALLED)  ## run the tests (PYTEST_ARGS='-n 4 -k save' is passed on)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)  ## mend style and format in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED)  ## measure speed
	$(BIN)/python -m pytest -m bench -s --timeout=0 -p no:logging $(PYTEST_ARGS)

soak: $(INSTALLED)  ## look for rare failures, for a long time
	$(BIN)/python -m pytest -m soak -s --timeout=0 $(PYTEST_ARGS)

docs: $(INSTALLED)  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove what was built, but not the virtual environment
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
