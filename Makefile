# make demo      the quick start, then the colocated RL loop, which learns to add.
#                ARGS="--steps 10": for the loop.  TRACE=run.json: writes its timeline, and a picture of its memory, run.svg
# make test      all tests, in several processes; those for a GPU are skipped, with the reason, where there is none.
#                ARGS="-k name": for pytest.  JOBS=0: in one process, as on a machine with a GPU
# make test-fast an answer within 3 minutes on two cores: most files of tests/unit
# make test-torch  the tests of tests/torch_cuda, which run torch's CUDA wheels without a GPU; it downloads them once, 1 to
#                2 GB each. VERSIONS="2.11.0 2.13.0" chooses them
# make cpptest   the C++ tests of the library without Python; ARGS="-tc=layout*": for doctest
# make sanitize  the same under the address, undefined-behaviour and thread sanitizers; the compiler's warnings are errors
# make mutants   makes small wrong changes of the core and of Python, and checks that tests find each.  ARGS=name: one of
#                them; ARGS=python or ARGS=core: all of them
# make stubs     memsaver/_core.pyi, the types of the compiled core, which the build makes; `make lint` makes it first
# make lint      style, types, layers and format of Python and C++
# make wheel     builds the wheels of this architecture in dist/ with g++. Runs the quick start from each without a
#                compiler, and tests of tests/torch_cuda with the versions of WHEEL_VERSIONS.
#                WHEEL_PYTHONS="python3.11 python3.12 python3.13": the interpreters; 3.12 builds for all that are newer
# make docs      the documentation site in build/site; every warning is an error
# make clean     removes everything that these made
#
# Each sets up what it needs, once, in .venv. PYTHON=python3.12 chooses the interpreter for it, TORCH="torch==2.9.1" the
# torch in it. SYSTEM=1 uses PYTHON as it is, with the torch that it has, and without a network: memsaver alone is
# installed into it.

PYTHON ?= python3
ARGS ?=
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Without a GPU one version, of which package mirrors for such machines carry a build without CUDA.
TORCH ?= $(if $(GPU),torch>=2.8,torch==2.13.0)
# The quick start of a wheel runs on the host driver.
WHEEL_PYTHONS ?= python3.11 python3.12
WHEEL_TORCH ?= torch==2.13.0
# torch's CUDA wheels for tests/torch_cuda.
VERSIONS ?= 2.11.0 2.13.0
WHEEL_VERSIONS ?= 2.13.0

# Tests wait for other processes half of the time, hence more workers than cores. A GPU serves one process.
JOBS ?= $(if $(GPU),0,$(shell cores=$$(nproc); echo $$((cores < 8 ? cores + (cores + 1) / 2 : 12))))
# A file's tests share a device of the file's own size, hence loadfile. In the order of the folders, the long files come
# first. With SYSTEM=1 the interpreter may lack xdist.
WORKERS = $(shell $(RUN) -c "import xdist" 2>/dev/null && printf -- '-n %s --dist loadfile --no-loadscope-reorder' $(JOBS))
# Not in test-fast: they start many processes, compile, or run thousands of random steps.
LONG := builtin_guests daemon_threads default_pool docstrings driver faults gpus guests_in_groups interrupts machines \
  monitor packaging pool_machine

CORE := pyproject.toml CMakeLists.txt $(wildcard csrc/*/*)

# The C++ tests need cmake and doctest (Debian and Ubuntu: doctest-dev), no Python.
CMAKE ?= $(or $(shell command -v cmake),.venv/bin/cmake)
CPP_OPTIONS := -DMEMSAVER_PYTHON=OFF -DMEMSAVER_TESTS=ON -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -g1"
CPP_JOBS := $(shell nproc)
# Address space layouts of newer kernels are too random for some thread sanitizers.
UNSHUFFLED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

ifdef SYSTEM
RUN := $(PYTHON)
# One stamp for each interpreter that was asked for.
READY := build/.ready-$(shell $(PYTHON) -c "import sys; print(sys.prefix.strip('/').replace('/', '-'))")
LINTERS := $(READY)
CLANG_FORMAT := clang-format
LINT_IMPORTS := lint-imports
else
RUN := .venv/bin/python
READY := .venv/.ready
LINTERS := .venv/.linters
CLANG_FORMAT := .venv/bin/clang-format
LINT_IMPORTS := .venv/bin/lint-imports
endif

# Hundreds of test processes import torch: they find its modules compiled, which takes 2 seconds in the place of 5.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-torch cpptest sanitize mutants stubs lint wheel docs clean

demo: $(READY)
	$(RUN) -m examples.quickstart
	$(if $(TRACE),rm -f $(TRACE); MEMSAVER_TRACE=$(abspath $(TRACE))) $(RUN) -m examples.colocate $(ARGS)
	$(if $(TRACE),$(RUN) -m memsaver trace plot $(TRACE) -o $(basename $(TRACE)).svg)

test: $(READY)
	$(RUN) -m pytest $(WORKERS) $(ARGS)

test-fast: $(READY)
	$(RUN) -m pytest -q $(WORKERS) tests/unit $(LONG:%=--ignore=tests/unit/test_%.py) $(ARGS)

test-torch: $(READY)
	$(RUN) tools/torch_wheels.py $(VERSIONS)
	MEMSAVER_TEST_TORCH='$(VERSIONS)' $(RUN) -m pytest tests/torch_cuda $(ARGS)

cpptest: build/cpp/plain
	$</memsaver_tests $(ARGS)

sanitize: build/cpp/address build/cpp/thread
	build/cpp/address/memsaver_tests $(ARGS)
	$(UNSHUFFLED) build/cpp/thread/memsaver_tests $(ARGS)

.PHONY: build/cpp/plain build/cpp/address build/cpp/thread
build/cpp/address: CPP_SANITIZE := -DMEMSAVER_SANITIZE=address,undefined -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
build/cpp/thread: CPP_SANITIZE := -DMEMSAVER_SANITIZE=thread
build/cpp/plain build/cpp/address build/cpp/thread:
	$(CMAKE) -S . -B $@ $(CPP_OPTIONS) $(CPP_SANITIZE) --log-level=NOTICE
	MAKEFLAGS=--no-print-directory $(CMAKE) --build $@ --parallel $(CPP_JOBS) --target memsaver_tests

mutants: $(READY)
	CMAKE=$(CMAKE) $(RUN) -m tests.mutants $(ARGS)

lint: $(LINTERS) stubs
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(LINT_IMPORTS) --no-cache --no-logo
	$(CLANG_FORMAT) --dry-run -Werror csrc/*/*.[ch] csrc/*/*.cpp tests/cpp/* tests/device/*

wheel:
	tools/wheel.sh '$(WHEEL_TORCH)' '$(WHEEL_VERSIONS)' $(WHEEL_PYTHONS)

# The build has made it. mypy reads it beside the sources.
stubs: $(READY)
	cp "$$($(RUN) -c 'from pathlib import Path; from memsaver import _core; print(Path(_core.__file__).with_name("_core.pyi"))')" memsaver

# An environment of its own: it reads the sources, and needs neither torch nor a compiler.
docs: build/docs/.ready
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict

build/docs/.ready: pyproject.toml
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --quiet \
	  $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

# Modules are compiled when they are imported: torch has thousands that no test imports.
.venv/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; see PYTHON=")'
	@echo "1 of 3: an environment in .venv with $(TORCH) (about a minute, most of it download)"
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --no-compile '$(TORCH)'
	touch $@

# The core is rebuilt when it changes; Python is used from where it lies.
.venv/.ready: .venv/.torch $(CORE)
	@echo "2 of 3: the build tools"
	$(RUN) -m pip install --quiet --no-compile 'scikit-build-core>=0.10' 'nanobind>=2.4' cmake ninja
	@echo "3 of 3: Ray, the packages of the tests, and the core, which is compiled (1 to 3 minutes on two cores)"
	$(RUN) -m pip install --quiet --no-compile --no-build-isolation --editable '.[examples,test]'
	touch $@

.venv/.linters: .venv/.ready
	$(RUN) -m pip install --quiet --no-compile $$($(RUN) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["lint"])')
	touch $@

# Programs started elsewhere find the copy, hence Python counts here too.
build/.ready-%: $(CORE) $(wildcard memsaver/*.py memsaver/*/*.py)
	PIP_BREAK_SYSTEM_PACKAGES=1 $(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index .
	mkdir -p build
	touch $@
