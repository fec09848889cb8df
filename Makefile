# The two commands a newcomer needs are `make up` and `make test`. Everything happens in .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# As variables the pins hold for the build backend too: the first one with an older pip, the second since pip 25.3.
PINNED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
INSTALL := $(PINNED) $(BIN)/python -m pip install --disable-pip-version-check --quiet
PROTO := wire/worker.proto wire/transfer.proto
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" python -m grpc_tools.protoc -I.

.DEFAULT_GOAL := help
.PHONY: help up test test-full lint format proto proto-check docs clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(VENV)/.installed ## Run the whole mesh at http://127.0.0.1:8000/v1; Ctrl-C stops it. ARGS='--workers 2' passes options.
	@$(BIN)/python -m gpu_worker.kernels
	@$(BIN)/phasemesh up $(ARGS)

test: $(VENV)/.installed-dev ## Run every test but the whole exactness matrix. ARGS='tests/wire -x' passes options.
	$(BIN)/phasemesh models pull
	$(BIN)/python -m pytest -m 'not full' $(ARGS)

test-full: $(VENV)/.installed-dev ## Run every test.
	$(BIN)/phasemesh models pull
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev proto-check ## Check style, types, import contracts and generated code, as CI does.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## Fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.installed-dev ## Regenerate the code of wire/*.proto.
	$(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTO)

proto-check: $(VENV)/.installed-dev ## Fail when the committed generated code is not that of wire/*.proto.
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out="$$fresh" --grpc_python_out="$$fresh" \
	  --mypy_out=quiet:"$$fresh" --mypy_grpc_out=quiet:"$$fresh" $(PROTO) && \
	for file in "$$fresh"/wire/*; do \
	  diff -u "wire/$$(basename "$$file")" "$$file" || { echo "generated code is old: make proto"; exit 1; }; \
	done

docs: $(VENV)/.installed-dev ## Rewrite README.md's table of variables from wire/config.py.
	$(BIN)/python -m phasemesh.config_table README.md

clean: ## Remove the virtual environment and every cache; the pulled models stay.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: apt-get install python3.11 python3.11-venv, or make PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is older than the pins only when they changed, so a second `make up` installs nothing. The second stamp implies the first.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pinned dependencies into $(VENV): torch is large, this takes some minutes the first time"
	$(INSTALL) --editable '.[models]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pinned dependencies into $(VENV): torch is large, this takes some minutes the first time"
	$(INSTALL) --editable '.[models,dev]'
	@touch $@ $(VENV)/.installed
