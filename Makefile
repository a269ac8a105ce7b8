# All targets work on a fresh machine with Python 3.11 or newer; `make` lists them.
# PYTHON=python3.12 make demo uses another interpreter. pip's own configuration decides the source of packages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt
WORKERS ?= auto
BENCH ?=

# One thread per process: the tests run on all cores already, and their models are small.
# They start a hundred processes, which should not compile the package anew, as they would without byte code on disk.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

DEMO := --data digits --partition dirichlet --clients 20 --model dnn --budget 2m

.DEFAULT_GOAL := help
.PHONY: help demo test golden coverage deployed bench docs lint types format venv clean

help:
	@echo "make demo      decide on real data whether and how to federate; write demo/report.html"
	@echo "make test      check lint, types, documentation and all tests"
	@echo "make golden    compare 476 small runs with recorded numbers, bit for bit, after a change that moves code only"
	@echo "make docs      build the documentation site into the folder site; a warning is a failure"
	@echo "make coverage  run the tests and list the lines that no test reaches"
	@echo "make deployed  kill real commands, servers, nodes and actors of a cluster in tests: some ten minutes"
	@echo "make bench     measure speed and memory beside a plain PyTorch loop (BENCH='W1 W6 --threads 1', BENCH=--help)"
	@echo "make venv      install the package from src and all tools into .venv"
	@echo "make format    let ruff correct the style"
	@echo "make lint, make types, make clean"

# A development install runs the same code, so a copy does not replace it.
demo: $(if $(wildcard $(VENV)/dev),$(VENV)/dev,$(VENV)/demo)
	rm -rf demo
	$(BIN)/fedattune compare $(DEMO) --out demo

# The three checks before the tests run side by side.
test: $(VENV)/dev
	$(MAKE) --jobs=3 lint types docs
	$(TESTS)

# Separate from `test`, because it takes half as long again.
coverage: $(VENV)/dev
	rm -f .coverage .coverage.*
	$(TESTS) --cov --cov-report=term

# Separate from `test`, because killing the processes of a real federation and a real cluster takes some ten minutes.
deployed: $(VENV)/dev
	$(TESTS) -m deployed

golden: $(VENV)/dev
	$(BIN)/python tests/golden/golden.py check

bench: $(VENV)/bench
	$(BIN)/python -m benchmarks $(BENCH)

# A warning is a failure. The variables silence two notices on the future of MkDocs, which name these variables.
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff check --quiet --preview --select DOC102 src  # arguments in docstrings that do not exist
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/dev

clean:
	rm -rf $(VENV) demo site build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Install torch alone and first, so that no later installation changes its version.
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "FedAttune needs Python 3.11 or newer, but $(PYTHON) is" \
			"$$($(PYTHON) --version 2>/dev/null || echo missing); set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	@touch $@

# For use: install a copy of the package.
$(VENV)/demo: $(VENV)/torch pyproject.toml $(shell find src -name '*.py')
	$(INSTALL) .
	@touch $@

# For development: install the package from src, with the tools.
$(VENV)/dev: $(VENV)/torch pyproject.toml
	$(INSTALL) -e '.[dev]'
	@touch $@

# For benchmarks: add the libraries to compare with.
$(VENV)/bench: $(VENV)/dev
	$(INSTALL) -e '.[dev,bench]'
	@touch $@
