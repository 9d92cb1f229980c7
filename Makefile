# Each target sets up what it needs, so that every one of them works in a fresh clone.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2
# Most tests wait for processes more than they compute.
WAITERS ?= 4

.PHONY: demo test proof check bench setup lock clean

demo: $(STAMP)
	@$(BIN)/waypost demo

test: $(STAMP)
	$(BIN)/pytest -n $(WAITERS) --dist worksteal

proof: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m proof --timeout 900

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m bench.run

setup: $(STAMP)

# requirements.lock is what runs (the image installs it), requirements-dev.lock what tests and demonstrates it too.
# Both are written by `make lock`. Done again when the lock changes. The packages are read from this folder; `waypost` is a script that says so.
$(STAMP): requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Waypost needs Python 3.11 or newer, found $$($(PYTHON) -V 2>&1). Say which: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) from requirements-dev.lock …" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/waypost.pth"
	@printf '#!/bin/sh\nexec "%s" -m orchestrator "$$@"\n' "$(CURDIR)/$(BIN)/python" > $(BIN)/waypost
	@chmod +x $(BIN)/waypost
	@touch $@

lock:
	uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
	  --all-extras --group dev pyproject.toml -o requirements-dev.lock
	uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
	  -c requirements-dev.lock pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV)
