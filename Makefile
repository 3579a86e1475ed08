# `make` lists the targets. Everything runs in .venv, which the first target creates.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
ARGS ?=
TRL ?=

BIN := .venv/bin
READY := .venv/.ready
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: help demo test check format test-gpu test-upstream clean
.DEFAULT_GOAL := help

help:  ## list all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(READY)  ## train a small model with GRPO; ARGS="..." adds options
	$(BIN)/python examples/grpo.py --config examples/demo.yaml $(ARGS)

test: $(READY)  ## run the tests; PYTEST_ARGS="..." replaces the pytest options
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)  ## check lint, formatting, types and import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## format the code and apply ruff's fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-gpu: $(READY)  ## run the tests that need a GPU; fails without a GPU
	ROLLOUT_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu $(ARGS)

# Puts another TRL in front of the one in .venv, for this run only.
test-upstream: $(READY)  ## test against another version of TRL: TRL=1.15.0
	@test -n "$(TRL)" || { echo "TRL is not set. Example: make test-upstream TRL=1.15.0" >&2; exit 2; }
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		$(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps \
			--target "$$folder" "trl==$(TRL)" && \
		PYTHONPATH="$$folder" OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_upstream.py

clean:  ## delete .venv, caches and build files; keeps wandb/ and outputs/
	rm -rf .venv build dist *.egg-info .hypothesis
	rm -rf .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: packages that need it must find the pinned version.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "twinslot needs Python 3.11 or newer; '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo 'missing or does not start')." \
			"Set PYTHON, for example: make PYTHON=python3.11 ..." >&2; \
		exit 1; }
	@echo "Creating .venv (only once, 2 to 10 minutes, several GB because of torch) ..."
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e ".[dev]"
	@touch $@
