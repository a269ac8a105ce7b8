# Everything from a fresh machine with Python 3.11 or newer:
#   make demo    train seven methods on real data and say whether collaborating helps
#   make test    lint, types, documentation, tests
#   make docs    the documentation site, into the folder site
#   make coverage  the tests once more, with the lines and branches that none of them reaches
#   make deployed  tests that start real servers, nodes and machines of a cluster, and kill them
#   make bench   speed and memory beside a plain PyTorch loop; BENCH="W1 W6 --threads 1" makes (a part of) it
# PYTHON=python3.12 make demo takes another interpreter; pip's own configuration decides where packages come from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt
WORKERS ?= auto
BENCH ?=

# One thread per process: the tests are spread over all cores already, and their models are small.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

DEMO := --data digits --partition dirichlet --clients 20 --model dnn --rounds 50 --lr 0.05 --eval-every 5 \
	--algorithms local,fedavg,fedavg_ft,fedprox,pfedme,heurfedamp,fedmcsa --set fedprox.mu=0.1

.DEFAULT_GOAL := help
.PHONY: help demo test coverage deployed bench docs lint types format venv clean

help:
	@echo "make demo    compare seven methods on the digits data, into the folder demo"
	@echo "make test    lint, types, the documentation without a warning, and all tests"
	@echo "make docs    the documentation site, into the folder site"
	@echo "make coverage  the tests once more, and what none of them reaches"
	@echo "make deployed  the tests that kill real servers, nodes and machines of a cluster: some ten minutes"
	@echo "make bench   measure speed and memory beside a plain PyTorch loop (BENCH='W1 --help' and the like)"
	@echo "make lint, make types, make format, make venv (for development), make clean"

# A development install runs the same code, so it is not replaced by a copy.
demo: $(if $(wildcard $(VENV)/dev),$(VENV)/dev,$(VENV)/demo)
	rm -rf demo
	$(BIN)/fedattune compare $(DEMO) --out demo

test: lint types docs
	$(TESTS)

# Apart, for it takes half as long again.
coverage: $(VENV)/dev
	rm -f .coverage .coverage.*
	$(TESTS) --cov --cov-report=term

# Faults of a real federation and a real cluster, in processes that are killed: some ten minutes, so apart from the others.
deployed: $(VENV)/dev
	$(TESTS) -m deployed

bench: $(VENV)/bench
	$(BIN)/python -m benchmarks $(BENCH)

# A warning is a failure. Silenced are two notices on the future of MkDocs, by the variables that they name themselves.
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/dev

clean:
	rm -rf $(VENV) demo site build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The interpreter, and torch before everything else: nothing installed later may move it.
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "FedAttune needs Python 3.11 or newer, and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>/dev/null || echo missing); give one by PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	@touch $@

# For use: a copy of the package.
$(VENV)/demo: $(VENV)/torch pyproject.toml $(shell find src -name '*.py')
	$(INSTALL) .
	@touch $@

# For development: the package from src, with the tools.
$(VENV)/dev: $(VENV)/torch pyproject.toml
	$(INSTALL) -e '.[dev]'
	@touch $@

# The development install with the rivals that are measured.
$(VENV)/bench: $(VENV)/dev
	$(INSTALL) -e '.[dev,bench]'
	@touch $@
