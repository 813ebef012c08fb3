# Set-up and checks. `make demo` and `make test` need only Python >= 3.11 and make.
# Another Python: make PYTHON=python3.13 ...

PYTHON ?= python3
VENV := .venv
VENV_MIN := .venv-min
VENV_NIGHTLY := .venv-nightly
BIN := $(VENV)/bin
# uv takes seconds where pip takes a minute; `make UV= ...` uses pip all the same.
UV ?= $(shell command -v uv)
INSTALL = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,\
	$(BIN)/python -m pip --disable-pip-version-check --quiet install)
PYTEST_FLAGS ?= --numprocesses auto --dist worksteal
# Tests start hundreds of processes: without this, where the variable is set, as in many containers,
# each of them compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=
# make torture MINUTES=5 SEED=1 PARTS=reading PAGE=no
MINUTES ?= 10

.DELETE_ON_ERROR:
.PHONY: help venv demo test test-min test-nightly lint bench torture release-check docs clean

help:
	@echo "make demo      write a sample checkpoint, open it, print its summary and statistics"
	@echo "make test      run the tests; says what it skips and why"
	@echo "make test-min  run the tests with the lowest versions of all dependencies"
	@echo "make test-nightly  run the tests with nightly builds of numpy, xarray and dask"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make bench     run the benchmarks; lists what changed since the last version"
	@echo "make torture   try what is promised on damaged files; MINUTES=5 SEED=1 PARTS=reading"
	@echo "make docs      build the documentation"
	@echo "make release-check  build the archives, and try the wheel in empty environments"
	@echo "make clean     remove all that these commands made"

# Every file .venv/.<extras> is touched when the extras are installed; a change of pyproject.toml
# installs anew.
venv: $(VENV)/.user

demo: $(VENV)/.user
	@$(BIN)/python -m xckpt.sample

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-min: $(VENV_MIN)/.test
	$(VENV_MIN)/bin/python -m pytest $(PYTEST_FLAGS)

# https://scientific-python.org/specs/spec-0004 describes these wheels.
test-nightly: $(VENV_NIGHTLY)/bin/python
	$(VENV_NIGHTLY)/bin/python -m pip --quiet install --editable '.[test]'
	$(VENV_NIGHTLY)/bin/python -m pip --quiet install --upgrade --pre --extra-index-url \
		https://pypi.anaconda.org/scientific-python-nightly-wheels/simple numpy xarray
	$(VENV_NIGHTLY)/bin/python -m pip --quiet install --upgrade git+https://github.com/dask/dask \
		git+https://github.com/dask/distributed
	$(VENV_NIGHTLY)/bin/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

bench: $(VENV)/.bench
	@$(BIN)/python -m benchmarks $(BENCHMARKS)

torture: $(VENV)/.test
	@$(BIN)/python -m torture $(PARTS) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
		$(if $(filter no,$(PAGE)),--no-page)

# Archives are built, and the wheel is tried in empty environments with the lowest and the newest
# versions of what it needs.
release-check: $(VENV)/.test
	@$(BIN)/python -m torture.release

docs: $(VENV)/.docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) $(VENV_MIN) $(VENV_NIGHTLY) demo docs/_build .hypothesis .mypy_cache \
		.pytest_cache .ruff_cache torture-failures
	find benchmarks src tests torture -name __pycache__ -prune -exec rm -rf {} +


$(VENV)/.user: pyproject.toml | $(BIN)/python
	@echo "Installing xckpt in $(VENV)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.test $(VENV)/.lint $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	@echo "Installing xckpt in $(VENV), with what $* needs"
	$(INSTALL) --editable '.[$*]'
	@touch $@ $(VENV)/.user

$(VENV_MIN)/.test: pyproject.toml | $(VENV_MIN)/bin/python
	@echo "Installing xckpt in $(VENV_MIN), with the lowest versions"
	$(VENV_MIN)/bin/python -m pip --disable-pip-version-check --quiet install uv
	$(VENV_MIN)/bin/uv pip install --quiet --python $(VENV_MIN)/bin/python \
		--resolution lowest-direct --editable '.[test]'
	@touch $@

%/bin/python:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "$(PYTHON) is not there: xckpt needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("xckpt needs Python 3.11 or \
	newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.13")'
	$(PYTHON) -m venv $*
