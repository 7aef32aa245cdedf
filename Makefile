# make train: sets up a virtual environment and runs the main job. make test: sets up and tests.
# PYTHON chooses the interpreter that makes the environment (3.11 or later).

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/grpo_smollm2
CONFIG ?= configs/grpo_smollm2.py
BIN := $(VENV)/bin
# tests run in so many processes, a file's in one: each takes up to 2 GiB
WORKERS ?= 2
# nothing of these belongs into the run's environment
DOCS_VENV ?= .venv-docs
TORCH_VENV ?= .venv-torch
LOCK_VENV ?= .venv-lock
PYTEST := $(BIN)/python -m pytest
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
DURATIONS := --durations=40 --durations-min=5
INPUTS := requirements.txt pyproject.toml
# for its protocol in `serve`; without its dependencies: it asks for seqio, and seqio for TensorFlow
JETSTREAM := google-jetstream==0.2.2

.PHONY: train test test-nightly test-soak lint docs reference lock dist clean setup setup-dev setup-torch

# large pages: an update's temporaries are mapped anew each time, 4 KiB a time a tenth of it on a CPU
train: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
train: $(VENV)/installed
	$(BIN)/python scripts/train.py --config=$(CONFIG) --workdir=$(WORKDIR)

# what every change has to pass
test: $(VENV)/installed-dev
	$(PYTEST) $(SPREAD) $(DURATIONS)

# what `make test` leaves out
test-nightly: $(VENV)/installed-trackers
	$(PYTEST) $(SPREAD) --durations=0 --durations-min=1 -m "slow and not soak and not gpu and not tpu"

# faults at random moments, for hours
test-soak: $(VENV)/installed-dev
	$(PYTEST) --durations=0 --durations-min=1 -m soak

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the tested set of packages with hashes, from the ranges in pyproject.toml
lock: $(LOCK_VENV)/installed
	(head -4 requirements.lock; $(LOCK_VENV)/bin/uv pip compile pyproject.toml --universal \
	  --python-version 3.11 --generate-hashes --upgrade --no-header --quiet) > requirements.lock.new
	mv requirements.lock.new requirements.lock

# the wheel and the source distribution
dist: $(VENV)/installed-dev
	$(BIN)/python -m hatchling build -d dist

# the site, strictly and without a network, from an environment of its own; build/docs/index.html
docs: $(DOCS_VENV)/installed
	$(DOCS_VENV)/bin/python scripts/docs/make_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo "built build/docs; look at it with: $(DOCS_VENV)/bin/mkdocs serve"

# the pages of docs/reference that are made from the code
reference: $(VENV)/bin/python
	$(BIN)/python scripts/docs/make_reference.py

setup: $(VENV)/installed

setup-dev: $(VENV)/installed-dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python $(INPUTS)
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --no-deps $(JETSTREAM)
	touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	$(BIN)/python -m pip install -r requirements-dev.txt
	touch $@

# packages of trackers, for the tests that read back what these hold
$(VENV)/installed-trackers: $(VENV)/installed-dev requirements-trackers.txt
	$(BIN)/python -m pip install -r requirements-trackers.txt
	touch $@

$(DOCS_VENV)/installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -r requirements-docs.txt
	touch $@

$(LOCK_VENV)/installed:
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install 'uv>=0.5'
	touch $@

# torch and two releases of transformers: nightly tests load exports there, and read what it saves
setup-torch: $(TORCH_VENV)/installed

$(TORCH_VENV)/installed: scripts/golden/requirements.txt scripts/golden/requirements-newest.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install -r scripts/golden/requirements.txt
	rm -rf $(TORCH_VENV)/newest
	$(TORCH_VENV)/bin/python -m pip install --no-deps --target $(TORCH_VENV)/newest \
		-r scripts/golden/requirements-newest.txt
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(TORCH_VENV) $(LOCK_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
