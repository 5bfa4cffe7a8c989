# make demo    the quick start, then the colocated RL loop
# make test    all tests; those for a GPU are skipped, with the reason, where there is none.  ARGS="-k name": for pytest
# make lint    style, types and format of Python and C++
# make clean   removes everything that these made
#
# Each sets up what it needs, once, in .venv. PYTHON=python3.12 chooses the interpreter for it, TORCH="torch==2.9.1" the
# torch in it. SYSTEM=1 uses PYTHON as it is, with the torch that it has, and without a network: memsaver alone is
# installed into it.

PYTHON ?= python3
ARGS ?=
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Without a GPU one version, of which package mirrors for such machines carry a build without CUDA.
TORCH ?= $(if $(GPU),torch>=2.8,torch==2.13.0)

CORE := pyproject.toml CMakeLists.txt $(wildcard csrc/*)

ifdef SYSTEM
RUN := $(PYTHON)
# One stamp for each interpreter that was asked for.
READY := build/.ready-$(shell $(PYTHON) -c "import sys; print(sys.prefix.strip('/').replace('/', '-'))")
LINTERS := $(READY)
CLANG_FORMAT := clang-format
else
RUN := .venv/bin/python
READY := .venv/.ready
LINTERS := .venv/.linters
CLANG_FORMAT := .venv/bin/clang-format
endif

.DELETE_ON_ERROR:
.PHONY: demo test lint clean

demo: $(READY)
	$(RUN) -m examples.quickstart
	$(RUN) -m examples.colocate.loop $(ARGS)

test: $(READY)
	$(RUN) -m pytest $(ARGS)

lint: $(LINTERS)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror csrc/*.h csrc/*.cpp

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

.venv/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; see PYTHON=")'
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet '$(TORCH)'
	touch $@

# The core is rebuilt when it changes; Python is used from where it lies.
.venv/.ready: .venv/.torch $(CORE)
	$(RUN) -m pip install --quiet 'scikit-build-core>=0.10' 'nanobind>=2.4' cmake ninja
	$(RUN) -m pip install --quiet --no-build-isolation --editable '.[examples,test]'
	touch $@

.venv/.linters: .venv/.ready
	$(RUN) -m pip install --quiet --no-build-isolation --editable '.[lint]'
	touch $@

# Programs started elsewhere find the copy, hence Python counts here too.
build/.ready-%: $(CORE) $(wildcard memsaver/*.py)
	PIP_BREAK_SYSTEM_PACKAGES=1 $(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index .
	mkdir -p build
	touch $@
