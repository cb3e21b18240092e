# make demo    set up .venv, then attention in two real models, one that reads and one that writes, in under two minutes
# make test    set up .venv, then lint, types and the test suite
#
# Everything happens inside .venv and build/, where a C++ compiler makes the native core; a second run only does what
# changed. To choose another Python or torch:
#   make test PYTHON=python3.12
#   make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# The second form is for Linux machines whose pip is not set up to find a CPU build: plain torch from the public
# index brings gigabytes of CUDA libraries there.

PYTHON ?= python3
TORCH ?= torch==2.13.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One thread a process: on shared cores more threads wait for one another.
TESTS := OMP_NUM_THREADS=1 QKV_REQUIRE_NATIVE=1 $(BIN)/python -m pytest -n 2
HAS_TORCH := -c 'import torch; raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13))'
# Folders are in the list too, so that a deleted file counts as a change.
SOURCES := $(shell find src csrc tools -not -name '*.pyc' -not -name '*.so' -not -name __pycache__) \
	CMakeLists.txt pyproject.toml README.md LICENSE
# The native core is compiled in a folder that stays, so that a second run compiles what changed, and must succeed.
# The AMX kernels are built in software too, so that the tests reach them on every processor.
BUILD := QKV_REQUIRE_NATIVE=1 CMAKE_BUILD_PARALLEL_LEVEL=2 SKBUILD_CMAKE_DEFINE=QKV_SOFTWARE_TILES=ON

.PHONY: demo test test-long lint bench lock clean

demo: .venv/package.stamp
	$(BIN)/qkv demo

test: lint
	$(TESTS)

test-long: .venv/package.stamp
	$(TESTS) -m long --hypothesis-profile=long --timeout=1800

lint: .venv/package.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/package.stamp
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/run.py --suite cpu
	$(BIN)/python benchmarks/run.py --suite production
	$(BIN)/python benchmarks/run.py --suite linear
	$(BIN)/python benchmarks/run.py --suite models

# Write requirements.lock anew from pyproject.toml and requirements.in. Needs uv (pip install uv). The extra `dev`
# holds what the tests and the demo need; the peers of the extra `bench` are installed by hand.
lock:
	uv pip compile --universal --python-version 3.10 --generate-hashes --extra dev --upgrade \
		--overrides requirements.overrides --custom-compile-command "make lock" \
		pyproject.toml requirements.in --output-file requirements.lock

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment sees the packages of $(PYTHON) only where a torch is among them; it is then not installed again.
.venv/torch.stamp:
	if $(PYTHON) $(HAS_TORCH) 2>/dev/null; then $(PYTHON) -m venv --system-site-packages .venv; \
	else $(PYTHON) -m venv .venv; fi
	$(BIN)/python $(HAS_TORCH) 2>/dev/null || $(PIP) install $(TORCH)
	touch $@

.venv/lock.stamp: .venv/torch.stamp requirements.lock
	$(PIP) install --quiet --no-deps --require-hashes --requirement requirements.lock
	touch $@

# The locked back end builds the package, so nothing is fetched here.
.venv/package.stamp: .venv/lock.stamp $(SOURCES)
	$(BUILD) $(PIP) install --quiet --no-deps --no-build-isolation --force-reinstall \
		--config-settings=build-dir=build/native .
	touch $@
