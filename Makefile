# make run    the main job: installs into .venv, then `dblp-netem run scenarios/burst90.yaml` (with sudo if not root)
# make test   the same set-up, then lint, types and every tier of tests (with sudo if not root: namespaces, eBPF)
# make check  lint and types only          make unit   the tiers that need no privileges
# make bench  every benchmark in one run, judged (with sudo if not root; minutes of an idle machine; not part of the tests)
# make wheel  dist/*.whl, and proof that it runs outside the checkout
# make clean  removes what the above made (results in runs/ stay)
#
# make run SCENARIO=scenarios/clean.yaml ARGS='--seed 3'      make test ARGS='-k oracle'

PYTHON   ?= python3
SCENARIO ?= scenarios/burst90.yaml
ARGS     ?=
# Where PyPI's torch would be the large CUDA build: make run TORCH_INDEX=URL of PyTorch's index of CPU builds
TORCH_INDEX ?=

VENV  := .venv
BIN   := $(VENV)/bin
# The stamp carries the folder: scripts in a venv hold absolute paths, so a moved checkout is installed anew.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(CURDIR)' | cksum | cut -d' ' -f1)
OURS  := $(VENV)/.made-by-make
# A Python that was removed or upgraded leaves a venv that does not start.
STALE := $(shell [ ! -e $(STAMP) ] || $(BIN)/python -c '' 2>/dev/null || echo force)
SUDO  := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)
PIP   := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# Root leaves no caches behind in a user's checkout.
PYTEST := PYTHONDONTWRITEBYTECODE=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -p no:cacheprovider

.PHONY: run test check unit bench install vm-requirements wheel clean force
.DELETE_ON_ERROR:

run: install
	$(SUDO) $(BIN)/dblp-netem run $(SCENARIO) $(ARGS)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(STALE)
	@if [ ! -e $@ ] || ! $(BIN)/python -c '' 2>/dev/null; then \
	  $(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=/path/to/python3")' && \
	  echo "making $(VENV) with $$($(PYTHON) -c 'import sys; print(sys.executable, sys.version.split()[0])')" && \
	  $(PYTHON) -m venv --clear $(VENV) && touch $(OURS); \
	fi
	@echo "installing into $(VENV) (constraints.txt pins the versions)"
	@# torch first and by itself: a build for CPU that the machine provides is taken, whatever else is resolved later.
	$(PIP) -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

test: check vm-requirements
	$(SUDO) env DBLP_NETEM_NO_SKIP="$$DBLP_NETEM_NO_SKIP" $(PYTEST) $(ARGS)

check: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

unit: install
	$(BIN)/python -m pytest tests/unit tests/sim tests/loopback $(ARGS)

bench: install
	@for program in iperf3 mn; do command -v $$program >/dev/null || \
	  echo "$$program is not installed: its lines will be missing (Debian, Ubuntu: apt-get install iperf3 mininet)"; done
	$(SUDO) env PYTHONDONTWRITEBYTECODE=1 $(BIN)/python -m benchmarks $(ARGS)

vm-requirements: install
	@if [ -f tests/vm/requirements.sh ]; then $(SUDO) bash tests/vm/requirements.sh; fi

wheel: install
	$(BIN)/python -m hatchling build --target wheel --directory dist
	$(BIN)/python -m pytest tests/unit/test_wheel.py

clean:
	@if [ -d $(VENV) ] && [ ! -e $(OURS) ]; then echo "$(VENV) was not made by make: left alone"; else rm -rf $(VENV); fi
	rm -rf dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find dblp netem tests -type d -name __pycache__ -prune -exec rm -rf {} +
