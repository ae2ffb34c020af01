# Every target sets itself up: a virtual environment in .venv and normexp in it, from pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help quickstart test test-slow check format results bench bench-norms clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch and torchvision are resolved together with everything else, in one call, so that they fit.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

quickstart: $(VENV)/.installed  ## Install, train the quickstart experiment, print its table
	$(BIN)/normexp run experiment=quickstart

test: $(VENV)/.installed-dev  ## Install, run the tests (under 10 minutes on two cores)
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev  ## Run the slow tests too
	$(BIN)/python -m pytest -m 'not gpu and not network'

check: $(VENV)/.installed-dev  ## Lint, format check, types, import layers, catalogue of norms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/document_norms.py --check

format: $(VENV)/.installed-dev  ## Format the code, write the catalogue of norms
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/document_norms.py

# A folder with the four original files; Debian's package dataset-fashion-mnist puts them there.
FASHION_MNIST ?= /usr/share/datasets/fashion-mnist

results: $(VENV)/.installed  ## Train all published experiments (some half an hour on two cores)
	$(BIN)/normexp run experiment=quickstart
	$(BIN)/normexp run experiment=small_batch data.params.root=$(FASHION_MNIST) \
	  data.params.num_train=10000 data.params.image_size=14 model.params.depth=8 \
	  micro_batch_size=2,8,32,128 budget.epochs=2 num_evaluations=4
	$(BIN)/normexp run experiment=with_without_bn
	$(BIN)/normexp run experiment=batch_size_accumulation
	$(BIN)/normexp run experiment=statistic_set

bench: $(VENV)/.installed  ## Time the solo path against a hand-written loop
	$(BIN)/python scripts/bench_solo.py

bench-norms: $(VENV)/.installed-dev  ## Time the norm layers against torch's and timm's
	$(BIN)/python scripts/bench_norms.py

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
