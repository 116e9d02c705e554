# Everything runs from a clean clone with python3 (3.11 or newer) and make: each target does the set-up it needs.
PYTHON ?= python3
BIN := .venv/bin
MESH ?= auto
# The bytes of the lock decide whether .venv is current; pyproject adds console scripts.
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo-model demo test check bench bench-convert bench-identity demo-heads train-smoke proto

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## .venv/ with the locked dependencies (hashes checked) and the project, editable

$(STAMP): requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit(f"expected python 3.11 or newer, got {v[0]}.{v[1]}")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --require-hashes -r requirements/lock.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	@touch $@

demo-model: $(STAMP) ## models/smollm2-135m: fetched, checked, converted
	$(BIN)/python scripts/demo_model.py

demo: demo-model ## serve the demo model and stream three prompts, plain and speculative (MESH=4: four virtual devices)
	$(BIN)/python scripts/demo.py --mesh $(MESH)

test: demo-model ## the test suite (ARGS="-k name" selects)
	$(BIN)/python scripts/test.py $(ARGS)

check: $(STAMP) ## lint, format, types, import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo

bench: demo-model ## measure, as docs/benchmarks.md says
	$(BIN)/python -m scripts.bench $(ARGS)

bench-convert: $(STAMP) ## measure a conversion of 4 GB: peak memory, time against cp, sync and sha256sum (12 GB of disk)
	$(BIN)/python scripts/bench_convert.py $(ARGS)

bench-identity: demo-model ## count where speculative greedy text departs from plain (ARGS="--limit 480": all of Spec-Bench)
	$(BIN)/python -m scripts.bench_identity $(ARGS)

demo-heads: demo-model ## train the heads of assets/ anew (hours; a killed run goes on)
	$(BIN)/python -m scripts.train_demo_heads $(ARGS)

train-smoke: demo-model ## train every kind of head for a few steps and serve each
	$(BIN)/python -m scripts.train_smoke

proto: $(STAMP) ## generate the gRPC code again after a change of the .proto file
	$(BIN)/python scripts/proto.py
