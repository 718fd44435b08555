# make demo    train a small GPT on two local ranks and compare prediction with measurement
# make test    the tests
# make matrix  30 architectures under 15 plans against one process (MATRIX="--only T5 --plan zbv")
# make zoo     model classes of transformers under four plans, an hour or two (ZOO="--sample 200 --plan tp2")
# make scorecard  published runs predicted, with and without their publisher, into tests/README.md
# make scorecard-nested HELD_OUT=FOLDER  files that no rule was chosen on, scored once
# make soak    trainings killed, saves broken off, loads under other plans, faults (SOAK="--quick")
# make regret  every legal plan of 24 cases timed, and our choice among them (REGRET="--quick")
# make fuzz    100,000 hostile files for every reader, an hour or two (FUZZ="--cases 1000 --reader plan")
# make mutants 200 places of the library changed one by one: hours (MUTANTS="--count 20 --seed 1")
# make fuzz-modules  2,000 random modules under plans, each against one process (FUZZ="--seed 9")
# make gpu     all that needs a GPU, 9 minutes at a time; without one the cases are tried in small
# make growth  time and memory against layers, devices, experts, ranks: an hour (GROWTH="--show")
# make nightly  tests on further plans, sizes and random cases, which `make test` leaves out
# make timed   the tests that compare clocks, for a machine that does nothing else
# make peers   plain torch, Accelerate, DeepSpeed and Transformers beside us, root (PEERS="--show")
# make other-torch  what engines and captures are tested by, on another torch (TORCH=2.15.0, GB)
# make check   formatting, lint, types, layers, spelling, wording
#
# Every target sets itself up: a virtual environment in .venv, CPU build of torch, this project.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export PYTHONUNBUFFERED := 1
# Modules are compiled once, not by every process that a test or a job starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test matrix zoo scorecard scorecard-nested soak regret peers gpu growth fuzz \
    fuzz-modules mutants nightly timed other-torch check format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@echo "== set-up: virtual environment in .venv with the CPU build of torch (1-3 minutes, once)"
	@start=$$SECONDS; ./.ci/venv "$(PYTHON)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[dev]'; \
	touch $@; echo "== set-up took $$((SECONDS - start)) s"

demo: $(STAMP)
	@echo "== demo: look at this machine, decide, train a 10 M parameter GPT (under 2 minutes)"
	@start=$$SECONDS; $(BIN)/advise demo $(DEMO); echo "== demo took $$((SECONDS - start)) s"

test: $(STAMP)
	@echo "== tests: 20 to 35 minutes on 2 cores"
	@start=$$SECONDS; $(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS); \
	echo "== tests took $$((SECONDS - start)) s"

matrix: $(STAMP)
	@echo "== the matrix: 450 cells, about 10 minutes on 2 cores; kept in tests/matrix/results.json"
	@start=$$SECONDS; $(BIN)/python -m tests.matrix $(MATRIX); \
	echo "== the matrix took $$((SECONDS - start)) s"

zoo: $(STAMP)
	@echo "== model classes: an hour or two; a stopped run goes on; kept in tests/validation/zoo.json"
	@$(BIN)/python -m tests.zoo_classes $(ZOO)

scorecard: $(STAMP)
	@echo "== the scorecard: minutes for the fits; kept in tests/scorecard/scorecard.json"
	@start=$$SECONDS; $(BIN)/python -m tests.scorecard $(SCORECARD); \
	echo "== the scorecard took $$((SECONDS - start)) s"

scorecard-nested: $(STAMP)
	@$(BIN)/python -m tests.scorecard.nested $(if $(HELD_OUT),--held-out "$(HELD_OUT)")

soak: $(STAMP)
	@$(BIN)/python -m tests.soak $(SOAK)

regret: $(STAMP)
	@echo "== regret: under two hours on cores that do nothing else; a stopped run goes on"
	@$(BIN)/python -m tests.regret $(REGRET)

fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz $(FUZZ)

mutants: $(STAMP)
	@$(BIN)/python -c "import cosmic_ray" 2>/dev/null || $(BIN)/python -m pip install --quiet \
	    --disable-pip-version-check --constraint constraints.txt cosmic-ray
	@$(BIN)/python -m tests.mutants $(MUTANTS)

fuzz-modules: $(STAMP)
	@$(BIN)/python -m tests.fuzz_modules $(FUZZ)

gpu: $(STAMP)
	@echo "== what needs a GPU: 9 minutes, the rest next time; kept in tests/validation/gpu.json"
	@$(BIN)/python -m tests.gpu $(GPU)

growth: $(STAMP)
	@echo "== growth: up to an hour; a stopped run goes on; kept in tests/validation/growth.json"
	@$(BIN)/python -m tests.benchmarks.growth $(GROWTH)

nightly: $(STAMP)
	@start=$$SECONDS; $(BIN)/python -m pytest -n 2 --dist worksteal \
	    -m "nightly or hypothesis" --hypothesis-profile "other cases"; \
	echo "== tests took $$((SECONDS - start)) s"

timed: $(STAMP)
	@echo "== tests that compare clocks: about 10 minutes on 2 cores that do nothing else"
	@start=$$SECONDS; $(BIN)/python -m pytest -m timed; echo "== tests took $$((SECONDS - start)) s"

# The newest that pyproject.toml allows; private names of torch change from one to the next.
TORCH ?= 2.15.0

other-torch:
	@echo "== torch $(TORCH) in .venv-torch (a CUDA build is gigabytes), then half an hour of tests"
	@$(PYTHON) -m venv --clear .venv-torch
	@grep -v '^torch==' constraints.txt > .venv-torch/constraints.txt
	@.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint .venv-torch/constraints.txt "torch==$(TORCH)" --editable '.[dev]'
	@# Closed forms count what the pinned torch does.
	@.venv-torch/bin/python -m pytest -n 2 --dist worksteal tests/profiles tests/engines \
	    tests/contract tests/matrix tests/examples tests/fuzz_modules tests/advisor/auto \
	    --ignore tests/profiles/closed_forms

# Packages that are compared stay out of .venv; they find its torch through a .pth file.
PEERS_STAMP := .venv-peers/.installed

$(PEERS_STAMP): tests/peers/requirements.txt $(STAMP)
	@echo "== set-up: the compared packages in .venv-peers (a minute, once)"
	@$(BIN)/python -m venv --clear .venv-peers; \
	where='import site; print(site.getsitepackages()[0])'; \
	$(BIN)/python -c "$$where" > "$$(.venv-peers/bin/python -c "$$where")/project.pth"; \
	pip=".venv-peers/bin/python -m pip install --quiet --disable-pip-version-check"; \
	$$pip --constraint tests/peers/requirements.txt setuptools wheel; \
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $$pip --no-build-isolation --constraint constraints.txt \
	    --requirement tests/peers/requirements.txt; \
	touch $@

peers: $(PEERS_STAMP)
	@echo "== peers: 15 minutes on 2 cores that do nothing else; kept in tests/validation/peers.json"
	@OMP_NUM_THREADS=1 .venv-peers/bin/python -m tests.peers $(PEERS)

check: $(STAMP)
	@echo "== static checks: half a minute"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python .ci/words.py profiles engines advisor tests

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	find profiles engines advisor tests -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .venv .venv-peers .venv-torch .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache runs
