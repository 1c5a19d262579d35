# Each target makes .venv on first use and keeps it; it is brought up to date when pyproject.toml or constraints.txt change.
#   make demo     train a small network on a worker, on this machine
#   make test     the suite, as CI runs it          make test ARGS="-k rfc -x"
#   make test-all the suite with its slow tests: the whole databases, all examples, what takes more than 2 s
#   make check    format, lint, types, layers, links: before every commit
#   make rooms    the rooms of both packages, and which imports which
#   make docs     the documentation as a site, in build/docs; a warning is an error
#   make bench    the figures of the README and docs/design.md; ARGS="--against REV" has them of another commit and of this tree
#   make gpu      29 checks on a machine with a GPU and its figures, in ten minutes; nothing is downloaded
#   make accelerator  the GPU's path on an accelerator that is simulated: it needs a C++ compiler, and says so without one
#   make test-machines  the tests that depend on a machine, on 13 unlike ones: another processor, home, user, language
#   make cluster  hosts on a bad network, made of this machine: one program in every weather; root on Linux, or it says what is missing
#   make ecosystem  a script for each of 43 libraries, here and on a worker, in a venv of their own: some five minutes
#   make scripts SCRIPTS=folder  scripts of other people's repositories, here and on a worker; it clones what the folder has not
#   make torch-tests  PyTorch's own tests on remote tensors and in dr.spmd, a sample of them: some 20 minutes
#   make examples  every example, with those that take long
#   make piece    a piece of the lanes that take long, another one at each commit
#   make lanes    all of these that check, with a line for each: 77 minutes with AT_ONCE=2
#   make long     what takes hours: every dtype of op_db, its wrong inputs, every architecture of transformers, an hour of fuzzing, 200 faults, half an hour
#                 of soak, 24,000 random programs, 200 random programs of dr.program, 60 mistakes that the suite must notice
# PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" takes torch's CPU build (0.2 GB instead of 3 GB with CUDA).

PYTHON := $(firstword $(foreach p,$(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python3.10,\
	$(shell $(p) -c 'import sys, venv; sys.version_info >= (3, 10) and print("$(p)")' 2>/dev/null)))
BIN := .venv/bin
ARGS ?=
# The tests of a file stay together as long as both processes have work, and then each takes from the other's rest.
DIST := worksteal
# Tests wait a quarter of their time, for workers and for what must not happen. So there is one process more than
# the two cores that the suite is made for. A fourth one takes more processor time than it saves waiting.
PROCESSES := 3

demo: .venv/.demo
	$(BIN)/python examples/02_digits.py

# The tests start hundreds of processes. Each would compile our modules anew where the environment forbids
# that they are kept, which took a third of the time to collect the tests.
KEPT := PYTHONDONTWRITEBYTECODE=

# The tests of form are a part of `make check`. WITHOUT_FORM=1 leaves them out of `make test`, for who runs both.
FORM := tests/test_layering.py tests/test_exports.py tests/wire/test_protocol_doc.py tests/test_links.py \
	tests/test_words.py

test: .venv/.tests
	$(KEPT) $(BIN)/python -m pytest -n $(PROCESSES) --dist $(DIST) -m "not slow" \
		$(if $(WITHOUT_FORM),$(FORM:%=--ignore=%)) $(ARGS)

test-all: .venv/.tests
	$(KEPT) $(BIN)/python -m pytest -n $(PROCESSES) --dist $(DIST) $(ARGS)

# PLW1514: a text file has its own encoding, whatever the locale is.
check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(FORM)

docs: .venv/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -c docs . build/docs
	@echo "the site is in build/docs, its first page is build/docs/index.html"

rooms: .venv/.tests
	PYTHONPATH=tests/help $(BIN)/python -m rooms

bench: .venv/.tests
	$(BIN)/python -m benchmarks $(ARGS)

examples: .venv/.tests
	$(KEPT) $(BIN)/python -m pytest -n $(PROCESSES) --dist $(DIST) tests/test_examples.py $(ARGS)

# It installs nothing from a registry: it takes the Python that has torch with a GPU, and says which wheels to
# bring where one of our packages is missing. PYTHON=/path/to/python3 names that Python.
# ARGS="--only 7 14" runs some of the checks, ARGS="--simulate-cuda 2" tries the script without a GPU.
# The first one whose torch sees an accelerator is taken, and one that was named in any case.
GPU_PYTHONS := $(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(PYTHON) python $(wildcard $(BIN)/python))
GPU_PYTHON = $(or $(shell for p in $(GPU_PYTHONS); do $$p -c \
	'import sys, torch; sys.exit(not torch.accelerator.is_available())' 2>/dev/null && echo $$p && break; done),\
	$(lastword $(GPU_PYTHONS)))

gpu:
	$(KEPT) $(GPU_PYTHON) tests/gpu/checks $(ARGS)

long: .venv/.tests
	$(BIN)/python -m pytest tests/long $(ARGS)
	PYTHONPATH=tests/help $(BIN)/python tests/long/op_db_dtypes.py
	PYTHONPATH=.:worker:tests/help $(BIN)/python tests/long/error_inputs.py
	PYTHONPATH=.:worker:tests/help $(BIN)/python tests/long/mistakes.py
	PYTHONPATH=tests/help $(BIN)/python tests/long/mutants.py
	PYTHONPATH=tests/help $(BIN)/python tests/long/transformers_many.py
	PYTHONPATH=.:worker:tests/help $(BIN)/python tests/long/fuzz_hour.py
	PYTHONPATH=.:worker:tests/help OMP_NUM_THREADS=1 $(BIN)/python tests/long/chaos.py --seed 0 --faults 200
	PYTHONPATH=.:worker:tests/help $(BIN)/python tests/long/soak.py --minutes 30
	PYTHONPATH=.:worker:tests/help $(BIN)/python tests/long/programs.py --programs 20000 --publish
	PYTHONPATH=.:worker:tests/help $(BIN)/python tests/long/programs.py --programs 2000 --publish --masters 2 --simulate-cuda 2
	PYTHONPATH=.:worker:tests/help $(BIN)/python tests/long/programs.py --programs 2000 --nodes 4 --threads 3
	PYTHONPATH=.:worker:tests/help OMP_NUM_THREADS=1 $(BIN)/python tests/long/recorded.py --programs 200 --calls 25
	PYTHONPATH=.:worker:tests/help OMP_NUM_THREADS=1 $(BIN)/python tests/long/compiled.py --functions 200
	$(BIN)/python tests/accelerator/run.py --programs 5000 -k random_programs

# These see that a lane runs, on a machine that has not what its figures need.
gpu-simulated: .venv/.tests
	$(KEPT) $(BIN)/python tests/gpu/checks --simulate-cuda 2 --minutes 30

bench-quick: .venv/.tests
	$(BIN)/python -m benchmarks --quick

# ARGS=--list prints them, ARGS="gpu examples" runs these.
piece: .venv/.tests
	$(BIN)/python .ci/pieces.py $(ARGS)

# One lot of each part of `make long`, another one at each commit.
long-lots: .venv/.tests
	$(BIN)/python .ci/pieces.py programs op-db-dtypes transformers long-tests mutants wrong-inputs hostile cluster-chaos \
		recorded compiled accelerator-programs

# It goes on behind a lane that fails, and fails at the end. ARGS="docs long" runs these two. The lane of the clusters
# waits for most of its time, so AT_ONCE=2 runs others beside it. `make test-all` has the examples.
LANES = $(or $(ARGS),cluster check docs test-all test-machines accelerator gpu-simulated bench-quick ecosystem torch-tests long-lots)
AT_ONCE := 1

lanes:
	@mkdir -p build/lanes; printf '%s\n' $(LANES) | xargs -P $(AT_ONCE) -I {} $(MAKE) --no-print-directory lane LANE={}

lane:
	@began=$$(date +%s); told=RED; \
	$(MAKE) --no-print-directory $(LANE) ARGS= > build/lanes/$(LANE).txt 2>&1 && told=green; \
	echo "$(LANE): $$told on $$(git rev-parse --short HEAD) in $$(($$(date +%s) - began)) s, see build/lanes/$(LANE).txt"; \
	test $$told = green

accelerator: .venv/.tests
	$(KEPT) $(BIN)/python tests/accelerator/run.py $(ARGS)

# ARGS="path home" runs under some of the conditions, ARGS=--list prints them, ARGS=--all runs all of `make test` under each.
test-machines: .venv/.tests
	$(KEPT) $(BIN)/python tests/machines/run.py $(ARGS)

# ARGS="drop-30 ipv6" runs some of the scenarios, ARGS=--list prints them, ARGS=--long runs what takes minutes too.
# ARGS="--chaos 1000" runs random programs through so many faults, some 5 s each, ARGS="--soak 120" for so many minutes.
cluster: .venv/.tests
	$(KEPT) PYTHONPATH=.:worker:tests/help $(BIN)/python tests/box/run.py $(ARGS)

# The libraries have a venv of their own: they bring 200 packages, and their plug-ins would be found by the suite.
# ARGS="timm peft" runs some, ARGS="--page docs/tables/ecosystem.md" also writes the page's table.
ecosystem: .venv-ecosystem/.libraries
	$(KEPT) .venv-ecosystem/bin/python tests/ecosystem/run.py $(ARGS)

.venv-ecosystem/.libraries: pyproject.toml constraints.txt tests/ecosystem/libraries.txt
	$(if $(PYTHON),,$(error no Python 3.10 or later found: make PYTHON=/path/to/python3))
	@echo "installing 200 packages into .venv-ecosystem, some five minutes the first time"
	@$(PYTHON) -m venv .venv-ecosystem
	@.venv-ecosystem/bin/pip install $(PIP_FLAGS) -qq --disable-pip-version-check -c constraints.txt \
		-r tests/ecosystem/libraries.txt -e '.[tests]'
	@touch $@

# ARGS="nanoGPT cleanrl" runs some, ARGS="--kept" those that have no row yet, and ARGS="--page docs/tables/ecosystem.md" also
# writes the table of all rows that are kept.
SCRIPTS ?= build/clones

scripts: .venv-ecosystem/.scripts
	@mkdir -p $(SCRIPTS)
	$(KEPT) .venv-ecosystem/bin/python tests/scripts/run.py $(SCRIPTS) $(ARGS)

.venv-ecosystem/.scripts: .venv-ecosystem/.libraries tests/scripts/libraries.txt
	@.venv-ecosystem/bin/pip install $(PIP_FLAGS) -qq --disable-pip-version-check -c constraints.txt \
		-c tests/ecosystem/libraries.txt -r tests/scripts/libraries.txt
	@touch $@

# It installs these libraries alone, and runs their scripts: LIBRARIES="timm peft". Where nothing can be downloaded, not
# even the smallest of them, it says that it cannot run.
ecosystem-some: .venv/bin/pip
	@$(PYTHON) -m venv .venv-ecosystem
	@.venv-ecosystem/bin/pip install $(PIP_FLAGS) -qq --disable-pip-version-check -c constraints.txt \
		-c tests/ecosystem/libraries.txt $(LIBRARIES) -e '.[tests]' \
		|| { $(BIN)/pip download -qq --no-deps -d build/downloaded einops && exit 1; } \
		|| { echo "cannot run here: no package can be downloaded"; exit 1; }
	$(KEPT) .venv-ecosystem/bin/python tests/ecosystem/run.py $(LIBRARIES)

# PyTorch's test files are downloaded (33 MB), or TORCH_TESTS=/path/to/pytorch/test names them.
# ARGS="--all" runs all of them, ARGS="test_linalg" those with it in their names.
torch-tests: .venv/.torch-tests
	$(KEPT) $(BIN)/python tests/torch_tests/run.py $(ARGS)

.venv/bin/pip:
	$(if $(PYTHON),,$(error no Python 3.10 or later found: make PYTHON=/path/to/python3))
	@$(PYTHON) -m venv .venv

.venv/.%: .venv/bin/pip pyproject.toml constraints.txt
	@echo "installing distruntime[$*] into .venv, a minute or two the first time"
	@$(BIN)/pip install $(PIP_FLAGS) -qq --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

.PHONY: demo test test-all check rooms docs bench bench-quick examples gpu gpu-simulated accelerator ecosystem ecosystem-some
.PHONY: scripts torch-tests long long-lots lanes lane piece test-machines cluster
