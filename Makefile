# make serve    set up, start, serve real embeddings until Ctrl-C     make serve CONFIG=serve_app/rehearsal.yaml
# make calibrate SLO=1   find the depths of what `make serve` serves, write and apply them     (SLO in seconds)
# make paper    replay the papers' tables and figures (40 minutes)   make paper ARGS='--only neo'
# make bench    beside a floor, peers and itself (some hours)       make bench ARGS='path service --quick'
# make test     set up, run all tests                                 make test TESTS=tests/unit
# make test-more ROUNDS=10   property tests with examples that nobody has seen
# make mutants  plant faults in pure modules: which does no test notice?   make mutants ARGS='fair_share'
# make soak     fault after fault under load on a small cluster of this machine, each once   make soak MINUTES=60
# make check    ruff, mypy and import-linter
# make docs     the documentation with search, on http://127.0.0.1:8001
# make proto    the gRPC messages anew, after a change to serve_app/proto/*.proto
# make manifests   what is generated, anew: k8s/'s Serve configs

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
CONFIG ?= serve_app/config.yaml
TESTS  ?=
MINUTES ?= 0
ROUNDS ?= 10
VENV   := .venv
BIN    := $(VENV)/bin
# An Ascend machine gets torch-npu as well.
EXTRAS := demo$(if $(wildcard /dev/davinci0),$(shell echo ,npu))
SOURCES := serve_app deployments calibration benchmarks k8s docs tests

.DEFAULT_GOAL := help
.PHONY: help serve calibrate paper bench test test-more mutants soak check docs proto manifests format clean

help:
	@sed -n 's/^# //p' Makefile | head -12

# exec: Ctrl-C reaches the service itself, and make does not print an error over its last words.
serve: $(VENV)/.serve
	@exec $(BIN)/windve serve $(CONFIG)

calibrate: $(VENV)/.calibration
	@$(BIN)/windve calibrate --config $(CONFIG) --apply $(if $(SLO),--slo $(SLO)) $(ARGS)

paper: $(VENV)/.calibration
	@$(BIN)/windve bench paper $(ARGS)

bench: $(VENV)/.bench
	@$(BIN)/windve bench $(ARGS)

test: $(VENV)/.test
ifeq ($(TESTS),)
	$(BIN)/python -m tests
else
	$(BIN)/python -m pytest $(TESTS)
endif

# Property tests draw new examples; `make test` draws the same ones each time.
test-more: $(VENV)/.test
	for round in $$(seq $(ROUNDS)); do $(BIN)/python -m pytest tests/unit tests/models -m hypothesis -n auto --maxprocesses 4 --hypothesis-profile=new || exit 1; done

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants $(ARGS)

# Linux: each node has a loopback address of its own. As root it also fills the disk of logs and cuts a node off.
soak: $(VENV)/.test
	$(BIN)/python -m tests.faults --minutes $(MINUTES) --out reports/soak $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

docs: $(VENV)/.docs
	@$(BIN)/python -m mkdocs serve

proto: $(VENV)/.test
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. serve_app/proto/tei.proto serve_app/proto/generation.proto

manifests: $(VENV)/.test
	$(BIN)/python -m k8s.serve_config

format: $(VENV)/.test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "windve needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing (on Debian: apt-get install python3-venv)"; exit 1; }

$(VENV)/.serve: pyproject.toml setup.py $(wildcard deployments/generation/kernels/*.[ch]) $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing windve and what it needs (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.calibration: $(VENV)/.serve
	@echo "installing what the calibration needs"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS),calibration]'
	@touch $@

$(VENV)/.bench: $(VENV)/.calibration
	@echo "installing what the benchmarks compare with"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS),bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.serve
	@echo "installing what the documentation needs"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS),docs]'
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	@echo "installing what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS),test]'
	@touch $@
