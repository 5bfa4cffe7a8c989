#!/usr/bin/env bash
# Fetches the tests that vLLM has for its sleep mode, and runs them unchanged with memsaver's drop-in, on a GPU.
#
#   tools/vllm_tests.sh DIR [pytest arguments]
#
# DIR: a checkout of vLLM's tests is made there, of the tag of the installed vLLM. It is used again if it exists.
# PYTHON=python3.12 chooses the interpreter. VLLM_REPOSITORY: another source than GitHub. FETCH_ONLY=1 runs no test.
#
# Left out are tests that download a model, and the one that calls vLLM's own C library. vLLM's conftest.py is not loaded:
# it needs packages that these tests do not need. The plugin is loaded first, as each process of vLLM loads it.
set -euo pipefail
directory=${1:?expected a directory for the tests of vLLM}
shift
python=${PYTHON:-python3}
repository=${VLLM_REPOSITORY:-https://github.com/vllm-project/vllm}
version=${VLLM_VERSION:-$("$python" -c 'from importlib import metadata; print(metadata.version("vllm").partition("+")[0])')}

if [ ! -e "$directory/tests" ]; then
  git -c advice.detachedHead=false clone -q --depth 1 --filter=blob:none --sparse --branch "v$version" "$repository" "$directory"
  git -C "$directory" sparse-checkout set tests
fi
cd "$directory"
mapfile -t files < <(find tests -name test_cumem.py -o -name test_sleep_mode_backend.py | sort)
[ "${#files[@]}" -gt 0 ] || { echo "no test_cumem.py in $directory/tests" >&2; exit 1; }
printf '%s\n' "vLLM $version:" "${files[@]}"
[ -z "${FETCH_ONLY:-}" ] || exit 0
left_out="end_to_end or deep_sleep or release_kv_cache or only_weights_asleep or allocation_after_driver_error"
MEMSAVER_DROP_IN=vllm PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$python" -c '
import sys
import pytest
from vllm.plugins import load_general_plugins
load_general_plugins()
import memsaver.drop_in
assert "vllm" in memsaver.drop_in.status(), "the drop-in is not installed"
sys.exit(pytest.main(sys.argv[1:]))
' --noconftest -q -k "not ($left_out)" "$@" "${files[@]}"
