#!/usr/bin/env bash
# Fetches the tests of torch_memory_saver, and runs them unchanged with memsaver's drop-in.
#
#   tools/tms_tests.sh DIR [pytest arguments]
#
# DIR: a checkout of torch_memory_saver is made there, of the commit below. It is used again if it exists. PYTHON=python3.12
# chooses the interpreter. TMS_REPOSITORY: another source than GitHub. test_examples.py needs a GPU: without one only the
# other two files run. Tests for Intel's and AMD's GPUs are left out.
set -euo pipefail
directory=${1:?expected a directory for the tests of torch_memory_saver}
shift
python=${PYTHON:-python3}
repository=${TMS_REPOSITORY:-https://github.com/fzyzcjy/torch_memory_saver}
commit=4a43c97 # 2026-08-20: the Python code of 0.0.10

if [ ! -e "$directory/test" ]; then
  git -c advice.detachedHead=false clone -q "$repository" "$directory"
  git -C "$directory" checkout -q "$commit"
fi
# -c: the settings of a project around the directory do not apply.
files=(test/test_utils.py test/test_configure_subprocess.py)
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then files+=(test/test_examples.py); fi
cd "$directory"
PYTHONPATH=$("$python" -m memsaver drop-in path) MEMSAVER_DROP_IN=tms "$python" -c '
import sys
import pytest
import torch_memory_saver
import memsaver.drop_in
assert memsaver.drop_in.status()["tms"].state == "active", "the drop-in is not installed"
sys.exit(pytest.main(sys.argv[1:]))
' -c /dev/null -q -k "not xpu and not rocm" "$@" "${files[@]}"
