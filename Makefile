# Two commands on a fresh machine with Python 3.11 or 3.12:
#   make quickstart   set everything up and train the quickstart
#   make test         set everything up and run the tests
# Both can be repeated; once installed they need no network.
# The first that runs: a version manager's shim may be on the path without its Python.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: quickstart test lint types docs check clean

quickstart: $(INSTALLED)
	$(BIN)/python cli.py fit --config configs/quickstart.yaml

# Two tests at a time on any machine: much of their time is spent waiting for the processes that they start.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet

check: test lint types docs

# The constraints file holds the tested versions; pyproject.toml holds the accepted ones.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "cnnstrategies needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,docs]'
	@touch $@

clean:
	rm -rf $(VENV) site build *.egg-info
