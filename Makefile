# Two commands on a fresh machine with Python 3.11, 3.12 or 3.13:
#   make quickstart   set everything up and train the quickstart
#   make test         set everything up and run the tests
# Both can be repeated; once installed they need no network.
# The first that runs: a version manager's shim may be on the path without its Python.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# Installs in a fraction of pip's time, where there is one.
UV ?= $(shell command -v uv)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS ?= test,docs

.PHONY: quickstart test test-cluster test-ray test-extras test-zoo test-gpu test-portable test-bounds fuzz-pipeline mutants simulate faults lint types docs check clean

quickstart: $(INSTALLED)
	$(BIN)/cnnstrategies fit --config quickstart
	@echo 'Next, the same as a pipeline: $(BIN)/cnnstrategies fit --config quickstart --trainer.strategy hybrid_pipeline'

# Six tests at a time on any machine: much of their time is spent waiting for the processes that they start.
PYTEST := $(BIN)/python -m pytest --numprocesses 6 --maxschedchunk 2

test: $(INSTALLED)
	$(PYTEST) -m "not cluster"

# With real launchers, a SLURM, hosts made of network namespaces; what the machine cannot do is skipped and said.
test-cluster: $(INSTALLED)
	$(PYTEST) --numprocesses 5 --dist loadgroup -m cluster

# With a Ray cluster of several nodes on this machine, in an environment of its own with the extra; some minutes.
RAY_VENV ?= .venv-ray
test-ray:
	$(MAKE) VENV=$(RAY_VENV) EXTRAS=test,ray $(RAY_VENV)/.installed
	$(RAY_VENV)/bin/python -m pytest -m ray

# What `make test` and `make test-cluster` leave out for want of a package: loggers, exports, MPICH.
EXTRAS_VENV ?= .venv-extras
test-extras:
	$(MAKE) VENV=$(EXTRAS_VENV) EXTRAS=test,wandb,mlflow,export,mpich $(EXTRAS_VENV)/.installed
	$(EXTRAS_VENV)/bin/python -m pytest -m extra

# Published networks and modules under every strategy, by verify, in an environment that has them; an hour and more, and
# PART=3/10 takes a tenth. See tests/zoo; the results go to build/zoo, and those of the whole are made into the page.
ZOO_VENV ?= .venv-zoo
PART ?= 1/1
test-zoo:
	$(MAKE) VENV=$(ZOO_VENV) EXTRAS=test,zoo $(ZOO_VENV)/.installed
	CNNSTRATEGIES_ZOO_PART=$(PART) PYTHONPATH=tests/zoo $(ZOO_VENV)/bin/python -m pytest --numprocesses 2 \
		--maxschedchunk 1 --timeout 1500 tests/zoo/networks.py tests/zoo/modules.py tests/zoo/examples.py
ifeq ($(PART),1/1)
	PYTHONPATH=tests:tests/zoo $(ZOO_VENV)/bin/python tests/zoo/table.py benchmarks/zoo.md
endif

# On a machine with GPUs: what nothing else can show. Some 20 minutes; writes the page. Without one it rehearses.
test-gpu: $(INSTALLED)
	$(BIN)/python tests/gpu/run.py benchmarks/gpu.md

# The same on less capable processors, as far as this one can play them, and with other random numbers.
test-portable: $(INSTALLED)
	$(PYTEST) -m "not cluster" --seed-offset 1
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
		$(PYTEST) -m "not cluster" --seed-offset 2
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
		$(PYTEST) -m "not cluster" --seed-offset 3

# With the newest jsonargparse, omegaconf, matplotlib and rich that Lightning itself allows, and not those of the
# constraints, in an environment beside the other.
BOUNDS := $(VENV)-bounds
BOUNDED := jsonargparse|omegaconf|matplotlib|rich
test-bounds:
	test -x $(BOUNDS)/bin/python || $(PYTHON) -m venv $(BOUNDS)
	grep -v -i -E '^($(BOUNDED))==' constraints.txt > $(BOUNDS)/constraints.txt
	$(BOUNDS)/bin/python -m pip install -qq --upgrade --upgrade-strategy eager --constraint $(BOUNDS)/constraints.txt \
		--editable '.[test]' 'lightning[pytorch-extra]'
	$(BOUNDS)/bin/python -m pip list | grep -i -E '^($(BOUNDED)) '
	$(BOUNDS)/bin/python -m pytest --numprocesses 4 --maxschedchunk 2 -m "not cluster"

# Random layouts of pipelines, with ranks as threads; some ten minutes.
N ?= 2000
fuzz-pipeline: $(INSTALLED)
	$(BIN)/python tests/pipeline/random_layouts.py $(N)

# Some thousand small changes of nine modules, made by mutmut: those that no test notices are printed. Some minutes;
# MODULE=data.sampling takes one of the modules alone. See [tool.mutmut] in pyproject.toml.
MUTATED := build/mutants
mutants: $(INSTALLED)
	test -x $(BIN)/mutmut || $(MAKE) --always-make EXTRAS=$(EXTRAS),mutants $(INSTALLED)
	rm -rf $(MUTATED)
	mkdir -p $(MUTATED)
	ln -s $(addprefix $(CURDIR)/,cnnstrategies tests configs cli.py pyproject.toml) $(MUTATED)
	cd $(MUTATED) && $(abspath $(BIN))/mutmut run $(MODULE:%='cnnstrategies.%.*')
	cd $(MUTATED) && $(abspath $(BIN))/python tests/surviving_mutants.py

# The parameter server in virtual time, with faults; a seed that fails is explained, and seen again with FIRST.
SEEDS ?= 300
FIRST ?= 0
PROCESSES ?= $(shell nproc)
simulate: $(INSTALLED)
	PYTHONPATH=tests/paramserver $(BIN)/python -m simulation.run --first $(FIRST) --seeds $(SEEDS) --processes $(PROCESSES)

# Runs of the command line under a parameter server, each with one process killed or stopped at a random moment, and as
# many runs over connections that change bytes, break, fall silent and are slow; some minutes for 200 of each on a
# machine that does nothing else. FIRST is the seed of the first here, too.
RUNS ?= 200
faults: $(INSTALLED)
	CNNSTRATEGIES_FAULTS=$(RUNS) CNNSTRATEGIES_FAULTS_FROM=$(FIRST) \
		$(PYTEST) tests/strategies/test_random_faults.py tests/paramserver/test_wires.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python docs/development/check_words.py

types: $(INSTALLED)
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py site

check: test lint types docs

# The constraints file holds the tested versions; pyproject.toml holds the accepted ones.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "cnnstrategies needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3.12"; exit 1; }
ifneq ($(UV),)
	test -x $(BIN)/python || $(UV) venv --quiet --seed --python $(PYTHON) $(VENV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[$(EXTRAS)]'
else
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[$(EXTRAS)]'
endif
	@touch $@

clean:
	rm -rf $(VENV) $(BOUNDS) site build *.egg-info
