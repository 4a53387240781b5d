# make run    the main job: installs into .venv, then `dblp-netem run scenarios/burst90.yaml` (with sudo if not root)
# make test   the same set-up, then lint, types and every tier of tests
# make check  lint and types only          make unit   the tiers that need no privileges
# make wheel  dist/*.whl, and proof that it runs outside the checkout
# make clean  removes what the above made (results in runs/ stay)

PYTHON   ?= python3
SCENARIO ?= scenarios/burst90.yaml
ARGS     ?=
# Where PyPI's torch would be the large CUDA build: make run TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

VENV  := .venv
BIN   := $(VENV)/bin
# The stamp carries the folder: scripts in a venv hold absolute paths, so a moved checkout is installed anew.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(CURDIR)' | cksum | cut -d' ' -f1)
SUDO  := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
PIP   := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: run test check unit vm-requirements wheel clean install
.DELETE_ON_ERROR:

run: install
	$(SUDO) $(BIN)/dblp-netem run $(SCENARIO) $(ARGS)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -e $@ ] || ! $(BIN)/python -c ''; then \
	  $(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=/path/to/python3")' && \
	  echo "making $(VENV) with $$($(PYTHON) -c 'import sys; print(sys.executable, sys.version.split()[0])')" && \
	  $(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo "installing (constraints.txt pins the versions)"
	@# torch first and by itself: a build for CPU that the machine provides is taken, whatever else is resolved later.
	$(PIP) -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

test: check vm-requirements
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(ARGS)

check: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

unit: install
	$(BIN)/python -m pytest tests/unit tests/sim tests/loopback $(ARGS)

vm-requirements: install
	@if [ -f tests/vm/requirements.sh ]; then bash tests/vm/requirements.sh; fi

wheel: install
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m pytest tests/unit/test_wheel.py

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find dblp netem tests -type d -name __pycache__ -prune -exec rm -rf {} +
