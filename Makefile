# Two commands on a fresh machine with Python 3.11, 3.12 or 3.13:
#   make quickstart   set everything up and train the quickstart
#   make test         set everything up and run the tests
# Both can be repeated. After the installation they need no network.
# PYTHON is the first interpreter that runs: a version manager's shim may be on the path without its interpreter.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# If uv is installed, it is used in place of pip, because it needs a fraction of pip's time. Unlike pip it compiles
# nothing unless asked. Without compiled packages the first start of a program takes two to three times as long, and so
# does every start where PYTHONDONTWRITEBYTECODE is set.
UV ?= $(shell command -v uv)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS ?= test,docs

.PHONY: quickstart test test-cluster test-ray test-extras test-zoo test-zoo-guard test-cases test-optimizers test-gpu test-portable test-bounds test-lowest fuzz-pipeline fuzz-spatial mutants simulate faults lint types docs check clean

quickstart: $(INSTALLED)
	$(BIN)/cnnstrategies fit --config quickstart
	@echo 'To train the same network as a pipeline: $(BIN)/cnnstrategies fit --config quickstart --trainer.strategy hybrid_pipeline'

# Six tests at a time on any machine: much of their time is spent waiting for the processes that they start.
PYTEST := $(BIN)/python -m pytest --numprocesses 6 --maxschedchunk 2

test: $(INSTALLED)
	$(PYTEST) -m "not cluster"

# With real launchers, a SLURM and network namespaces as hosts. Tests that the machine cannot run are skipped.
test-cluster: $(INSTALLED)
	$(PYTEST) --numprocesses 5 --dist loadgroup -m cluster

# With a Ray cluster of several nodes on this machine, in a separate environment with the extra. Takes some minutes.
RAY_VENV ?= .venv-ray
test-ray:
	$(MAKE) VENV=$(RAY_VENV) EXTRAS=test,ray $(RAY_VENV)/.installed
	$(RAY_VENV)/bin/python -m pytest -m ray

# The tests that `make test` and `make test-cluster` skip because a package is missing: loggers, exports, MPICH,
# transforms, notebooks.
EXTRAS_VENV ?= .venv-extras
test-extras:
	$(MAKE) VENV=$(EXTRAS_VENV) EXTRAS=test,wandb,mlflow,export,mpich,transforms,notebook,streams $(EXTRAS_VENV)/.installed
	$(EXTRAS_VENV)/bin/python -m pytest -m extra

# verify with published networks and modules under every strategy, and networks with divided images, in an environment
# with their packages. Takes an hour or more; PART=3/10 runs a tenth, and STRATEGY=hybrid only strategies whose names
# contain this. See tests/zoo. The results are written to build/zoo. A complete run makes the page.
ZOO_VENV ?= .venv-zoo
# torchao, which MONAI imports if it is there, asks for a GPU while it is imported. With these settings
# torch answers without starting CUDA, after which no process could be forked.
WITHOUT_CUDA := CUDA_VISIBLE_DEVICES= PYTORCH_NVML_BASED_CUDA_CHECK=1
PART ?= 1/1
STRATEGY ?=
test-zoo:
	$(MAKE) VENV=$(ZOO_VENV) EXTRAS=test,zoo $(ZOO_VENV)/.installed
	$(WITHOUT_CUDA) CNNSTRATEGIES_ZOO_PART=$(PART) CNNSTRATEGIES_ZOO_STRATEGY=$(STRATEGY) \
		$(ZOO_VENV)/bin/python -m pytest --numprocesses 2 --maxschedchunk 1 --timeout 1500 \
		tests/zoo/networks.py tests/zoo/modules.py tests/zoo/detectors.py tests/zoo/examples.py tests/zoo/stages.py tests/zoo/divided.py \
		tests/zoo/medical.py tests/zoo/vision_models.py
ifeq ($(PART)$(STRATEGY),1/1)
	$(ZOO_VENV)/bin/python -m tests.zoo.table benchmarks/zoo.md
endif

# The callback Guard beside the same networks and modules, which must find nothing. Takes hours; PART as above.
# CONTINUE=1 keeps results that an earlier run has written.
CONTINUE ?=
test-zoo-guard:
	$(MAKE) VENV=$(ZOO_VENV) EXTRAS=test,zoo $(ZOO_VENV)/.installed
	CNNSTRATEGIES_ZOO_PART=$(PART) $(if $(CONTINUE),CNNSTRATEGIES_ZOO_CONTINUE=1) \
		$(ZOO_VENV)/bin/python -m pytest --numprocesses 2 --maxschedchunk 1 --timeout 600 tests/zoo/alarms.py

# Programs as users write them under hybrid_pipeline, with all layouts, and more layouts of pipelines. Takes half an hour.
test-cases: $(INSTALLED)
	$(PYTEST) tests/strategies/whole_step_cases/all_layouts.py tests/pipeline/more_layouts.py

# Published optimizers under every strategy, in an environment with their packages. Takes some minutes; writes the page.
OPTIMIZERS_VENV ?= .venv-optimizers
test-optimizers:
	$(MAKE) VENV=$(OPTIMIZERS_VENV) EXTRAS=optimizers $(OPTIMIZERS_VENV)/.installed
	$(OPTIMIZERS_VENV)/bin/python benchmarks/optimizers/published.py

# The tests that need a machine with GPUs. Takes about 10 minutes, and writes the page. Without a GPU it is a rehearsal,
# which takes half an hour on two cores.
test-gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu.run benchmarks/gpu.md

# The tests with other random numbers, and with the instruction sets of older processors, as far as this one has them.
test-portable: $(INSTALLED)
	$(PYTEST) -m "not cluster" --seed-offset 1
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
		$(PYTEST) -m "not cluster" --seed-offset 2
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
		$(PYTEST) -m "not cluster" --seed-offset 3

# With the newest jsonargparse, omegaconf, matplotlib and rich that Lightning itself allows, in place of the versions in
# constraints.txt, in a second environment.
BOUNDS := $(VENV)-bounds
BOUNDED := jsonargparse|omegaconf|matplotlib|rich
test-bounds:
	test -x $(BOUNDS)/bin/python || $(PYTHON) -m venv $(BOUNDS)
	grep -v -i -E '^($(BOUNDED))==' constraints.txt > $(BOUNDS)/constraints.txt
	$(BOUNDS)/bin/python -m pip install -qq --upgrade --upgrade-strategy eager --constraint $(BOUNDS)/constraints.txt \
		--editable '.[test]' 'lightning[pytorch-extra]'
	$(BOUNDS)/bin/python -m pip list | grep -i -E '^($(BOUNDED)) '
	$(BOUNDS)/bin/python -m pytest --numprocesses 4 --maxschedchunk 2 -m "not cluster"

# With the lowest versions of these packages that pyproject.toml allows, in an environment of their own.
LOWEST := $(VENV)-lowest
LOWEST_OF := torch|torchvision|lightning|torchmetrics|jsonargparse
test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	sed -n -E 's/^ *"($(LOWEST_OF))(\[.*\])?>=([0-9.]+).*/\1==\3/p' pyproject.toml > $(LOWEST)/constraints.txt
	grep -v -i -E '^($(LOWEST_OF)|nvidia-.*|cuda-.*|triton|torchao)==' constraints.txt >> $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install -qq --constraint $(LOWEST)/constraints.txt --editable '.[test]'
	$(LOWEST)/bin/python -m pip list | grep -i -E '^($(LOWEST_OF)) '
	$(LOWEST)/bin/python -m pytest --numprocesses 4 --maxschedchunk 2 -m "not cluster"

# Random layouts of pipelines, with ranks as threads. Takes about ten minutes.
N ?= 2000
fuzz-pipeline: $(INSTALLED)
	$(BIN)/python -m tests.pipeline.random_layouts $(N)

# Random layers on divided images, with ranks as threads. Takes about two minutes.
fuzz-spatial: $(INSTALLED)
	$(BIN)/python -m tests.spatial.random_layers $(N)

# First the faulty versions in tests/mutants whose tests take long. Then mutmut makes more than a thousand small changes
# to ten modules, and the changes that no test notices are printed. Takes some minutes; MODULE=shares.samplers takes only
# this module. See [tool.mutmut] in pyproject.toml.
MUTATED := build/mutants
mutants: $(INSTALLED)
ifeq ($(MODULE),)
	$(PYTEST) tests/long_mutants.py
endif
	test -x $(BIN)/mutmut || $(MAKE) --always-make EXTRAS=$(EXTRAS),mutants $(INSTALLED)
	rm -rf $(MUTATED)
	mkdir -p $(MUTATED)
	ln -s $(addprefix $(CURDIR)/,cnnstrategies tests configs cli.py pyproject.toml) $(MUTATED)
	cd $(MUTATED) && $(abspath $(BIN))/mutmut run $(MODULE:%='cnnstrategies.%.*')
	cd $(MUTATED) && $(abspath $(BIN))/python tests/surviving_mutants.py

# The parameter server in virtual time, with faults. A failing seed is explained; FIRST repeats it.
SEEDS ?= 300
FIRST ?= 0
PROCESSES ?= $(shell nproc)
simulate: $(INSTALLED)
	$(BIN)/python -m tests.paramserver.simulation.run --first $(FIRST) --seeds $(SEEDS) --processes $(PROCESSES)

# Runs of the command line under a parameter server. In each run one process is killed or stopped at a random moment. The
# same number of runs uses connections that change bytes, break, fall silent or are slow. 200 runs of each kind take some
# minutes on an idle machine. FIRST is the first run's seed.
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

# The constraints file holds the tested versions; pyproject.toml holds the accepted versions.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "cnnstrategies needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3.12"; exit 1; }
ifneq ($(UV),)
	test -x $(BIN)/python || $(UV) venv --quiet --seed --python $(PYTHON) $(VENV)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[$(EXTRAS)]'
else
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[$(EXTRAS)]'
endif
	@touch $@

clean:
	rm -rf $(VENV) $(BOUNDS) site build *.egg-info
