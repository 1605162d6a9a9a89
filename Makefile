# make demo, make test: everything else follows from these two.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# Builds of torch for CUDA bring the Triton they were made with; builds for the CPU bring none.
TRITON := triton==3.6.0
WORKERS ?= auto
# What is supported: `mkernel doctor` and docs/versions.md say so, too.
OLDEST_TORCH := torch==2.11.0
OLDEST_TRITON := triton==3.6.0
NEWEST_TORCH := torch==2.15.0
NEWEST_TRITON := triton==3.9.0
TORCHTITAN := torchtitan==0.3.0

.PHONY: setup demo test test-all test-versions test-oldest test-newest test-frameworks test-gpu test-rdma docs lint format types clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml requirements-dev.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "mkernel needs Python 3.10 or newer; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TRITON)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

demo: setup
	$(BIN)/mkernel demo

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not measures and not thorough and not versions" --ignore=tests/rdma tests

# what takes longer, and what is timed, so that nothing may run beside it
test-all: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not measures and (thorough or not versions)" --ignore=tests/rdma tests
	$(BIN)/python -m pytest -rs -m measures --ignore=tests/rdma --ignore=tests/gpu tests  # one at a time

# The simulator, and every kernel compiled for Hopper, with the oldest and the newest torch and Triton. With the Triton of
# the other tests they are compiled by make test-all: what a kernel becomes depends on Triton alone.
test-versions: test-oldest test-newest

test-oldest test-newest: test-%: build/versions/%/ready
	PYTHONPATH=src build/versions/$*/bin/python -m pytest -p no:cacheprovider tests/sim/test_language.py
	PYTHONPATH=src build/versions/$*/bin/python -m pytest -p no:cacheprovider \
		-m "versions$(if $(filter $(TRITON),$(PAIR)), and not thorough)" tests/ops/test_versions.py

test-oldest build/versions/oldest/ready: PAIR := $(OLDEST_TORCH) $(OLDEST_TRITON)
test-newest build/versions/newest/ready: PAIR := $(NEWEST_TORCH) $(NEWEST_TRITON)
build/versions/%/ready: requirements-dev.txt Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile $(PAIR)  # Python compiles what it imports
	$(@D)/bin/python -m pip install --quiet --no-compile -r requirements-dev.txt  # another setuptools than torch 2.11 asks for
	@touch $@

# mkernel behind the interfaces of other libraries, with these libraries and the newest PyTorch. Without them, make test
# skips some of these tests, and runs others with stand-ins.
test-frameworks: build/versions/newest/frameworks-ready
	build/versions/newest/bin/python -c "import transformers, torchtitan, torch.distributed._token_switch"
	PYTHONPATH=src build/versions/newest/bin/python -m pytest -p no:cacheprovider -rs -m "not thorough" tests/integrations

build/versions/newest/frameworks-ready: build/versions/newest/ready requirements-frameworks.txt
	build/versions/newest/bin/python -m pip install --quiet --no-compile -r requirements-frameworks.txt
	build/versions/newest/bin/python -m pip install --quiet --no-compile --no-deps $(TORCHTITAN)  # its layers need few
	@touch $@

# What needs a GPU, with the installed Python. GPU_WORKERS=12 runs the tests side by side, since they mostly compile; those
# that start processes come last, a few at a time, because a GPU has room for some 15 processes.
GPU_WORKERS ?=
GPU_TESTS = PYTHONPATH=src MKERNEL_TEST_LOCK=/tmp/mkernel-gpu-tests $(PYTHON) -m pytest --dist worksteal
test-gpu:
ifeq ($(GPU_WORKERS),)
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu
else
	status=0; $(GPU_TESTS) -n $(GPU_WORKERS) -m "not processes" tests/gpu || status=1; \
	$(GPU_TESTS) -n 3 -m processes tests/gpu && exit $$status
endif

# RDMA on soft-RoCE devices, in a machine that QEMU emulates; skipped, with the reason, where that can not be.
test-rdma: setup
	$(BIN)/python -m pytest -rs tests/rdma

docs: setup $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "the site is in build/site/index.html"

$(VENV)/docs-ready: $(VENV)/ready requirements-docs.txt
	$(BIN)/python -m pip install --quiet -r requirements-docs.txt
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
