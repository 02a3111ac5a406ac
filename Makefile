# Two commands: `make serve` and `make test`. Each sets up .venv by itself; nothing outside this folder is touched.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
HOST ?= 127.0.0.1
PORT ?= 8888
# Any checkpoint folder; without one the tiny trained model is served that comes with tfglm.
MODEL ?=
TESTS ?= tests

.PHONY: serve test lint kernels provision-check lab clean

serve: $(VENV)/.installed
	$(BIN)/tfglm serve $(if $(MODEL),"$(patsubst ~/%,$(HOME)/%,$(MODEL))") --host "$(HOST)" --port "$(PORT)"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(TESTS)

# Compiles every kernel for every supported architecture, without a GPU, and fails where one spills that says it does not.
kernels: $(VENV)/.installed-dev
	$(BIN)/tfglm kernels check

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Lint, syntax and the provisioning tests, with Ansible in an environment of its own. Plays run on three fake machines made of
# namespaces, as root; elsewhere those tests are skipped.
PROVISION := build/provision
provision-check: $(VENV)/.installed-dev $(PROVISION)/.installed
	cd playbooks && PATH="$(CURDIR)/$(PROVISION)/bin:$$PATH" ansible-lint --offline --project-dir .. ../playbooks ../roles
	TFGLM_TEST_VENV="$(CURDIR)/$(VENV)" $(PROVISION)/bin/python -m pytest -p no:cacheprovider tests/provision

# Three fake Sparks on this machine, provisioned by the playbooks and put through faults (docs/lab.md). Needs root and Debian;
# says so and does nothing elsewhere. LAB names steps, or --limit SECONDS.
LAB ?=
lab: $(VENV)/.installed-dev $(PROVISION)/.installed
	PATH="$(CURDIR)/$(PROVISION)/bin:$$PATH" $(BIN)/python tests/lab/lab.py $(LAB)

$(PROVISION)/.installed: pyproject.toml | $(BIN)/pip
	"$(PYTHON)" -m venv $(PROVISION)
	$(PROVISION)/bin/python -m pip install --quiet --disable-pip-version-check $$($(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["provision-dev"], sep="\n")')
	@touch $@

# pip comes last into a virtual environment: one that was interrupted is made again.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "tfglm needs Python 3.11 or later with the venv module (Debian: apt install python3-venv);" \
		"name one with PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/pip
	@echo "installing what tfglm needs into $(VENV); PyTorch is large, this takes minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/pip
	@echo "installing what tfglm and its tests need into $(VENV); this takes minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
