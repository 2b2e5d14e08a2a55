# `make` lists the targets. Each one installs what it needs into .venv, once.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= auto

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# the CPU kernels are compiled once and kept; later imports load them
COMPILE := $(PY) -c 'import harness.compiled.lockstep, harness.compiled.inspect'
INPUTS := pyproject.toml constraints.txt
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help drift bench test test-slow gate mutants notebooks lint format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

drift: $(VENV)/.run ## run the default side-by-side decode; prints where the table and the figure lie
	$(PY) -m harness

bench: $(VENV)/.bench ## tokens*heads/s of every implementation beside its peer, as ratios
	$(PY) -m harness experiment=bench

test: lint ## lint, type check and the fast tests
	$(PY) -m pytest -q -n $(JOBS)

test-slow: $(VENV)/.dev ## the long tests
	$(PY) -m pytest -q -n $(JOBS) -m slow

gate: $(VENV)/.dev ## hold errors, slopes and tails of every variant against results/baselines
	$(PY) -m harness.gate check

mutants: $(VENV)/.dev ## plant every listed defect, one at a time: which test catches it
	$(PY) tests/mutants/run.py --report results/mutants.md

notebooks: $(VENV)/.dev ## execute every notebook in place, from the published runs
	$(PY) notebooks/run.py

lint: $(VENV)/.dev ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev ## let ruff repair and format the tree
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove .venv and every cache; results stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find harness tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 …' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'the venv module is missing: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch alone first: without its pin the resolver may fetch other builds of several gigabytes
$(VENV)/.torch: constraints.txt | $(PY)
	$(PIP) install -q -c constraints.txt torch
	@touch $@

$(VENV)/.run: $(INPUTS) $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e .
	$(COMPILE)
	@touch $@

$(VENV)/.dev: $(INPUTS) $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e '.[dev,bench,joblib,submitit,ray,optuna,notebooks]'
	$(COMPILE)
	@touch $@ $(VENV)/.run $(VENV)/.bench

$(VENV)/.bench: $(INPUTS) $(VENV)/.torch
	$(PIP) install -q -c constraints.txt -e '.[bench]'
	$(COMPILE)
	@touch $@ $(VENV)/.run
