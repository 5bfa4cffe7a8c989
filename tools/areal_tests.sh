#!/usr/bin/env bash
# Fetches AReaL, and runs its own test of offload unchanged, with memsaver's drop-in or with torch_memory_saver, on a GPU.
#
#   tools/areal_tests.sh DIR [pytest arguments]
#
# DIR: a checkout of AReaL is made in DIR/AReaL, of the commit below. Beside it lie the random model in place of the
# downloaded one (DIR/huggingface) and three small packages (DIR/packages). What exists is used again: with all three no
# network is needed. AREAL_REPOSITORY: another source than GitHub. FETCH_ONLY=1 runs no test. PYTHON=python3.12 chooses the
# interpreter; it has torch, transformers, peft, aiohttp, nvidia-ml-py, werkzeug and pytest.
#
# WAY=memsaver, the default, or WAY=tms: the original, version 0.0.10, which ORIGINAL=FOLDER names (pip install --target).
#
# tools/areal has stand-ins for packages that the test imports and does not use. The test of the Megatron engine is left
# out: megatron-core and mbridge are among them.
set -euo pipefail
directory=$(realpath -m "${1:?expected a directory for AReaL}")
shift
way=${WAY:-memsaver}
python=${PYTHON:-python3}
repository=${AREAL_REPOSITORY:-https://github.com/areal-project/AReaL}
commit=cbff54d645d2cd8ee1f1c358a82f3f473588433d # 2026-08-22
tools=$(realpath "$(dirname "$0")")/areal

mkdir -p "$directory"
if [ ! -e "$directory/AReaL/tests/test_offload.py" ]; then
  git -c advice.detachedHead=false clone -q --filter=blob:none --no-checkout "$repository" "$directory/AReaL"
  git -C "$directory/AReaL" -c advice.detachedHead=false checkout -q "$commit"
fi
if [ ! -e "$directory/packages" ]; then
  "$python" -m pip install -q --no-deps --target "$directory/packages" colorlog==6.12.0 lark==1.3.1 tenacity==9.2.1
fi
"$python" "$tools/model.py" "$directory/AReaL" "$directory/huggingface"
[ -z "${FETCH_ONLY:-}" ] || exit 0

case $way in
  memsaver)
    export MEMSAVER_DROP_IN=tms
    PYTHONPATH=$("$python" -m memsaver drop-in path)${PYTHONPATH:+:$PYTHONPATH}
    ;;
  tms)
    original=$(realpath "${ORIGINAL:?expected a folder with torch_memory_saver 0.0.10}")
    [ -e "$original/torch_memory_saver-0.0.10.dist-info" ] || {
      echo "ORIGINAL=$original: expected a folder with torch_memory_saver 0.0.10" >&2
      exit 2
    }
    # AReaL preloads the file without a suffix, which is the build for CUDA 12. With another CUDA it gets the build for that
    # one under this name, in a copy.
    major=$("$python" -c 'import torch; print((torch.version.cuda or "12").partition(".")[0])')
    copy=$directory/original-of-this-cuda
    [ "$original" != "$(realpath -m "$copy")" ] || {
      echo "ORIGINAL=$original: expected another folder, since this one is made anew" >&2
      exit 2
    }
    rm -rf "$copy"
    cp -r "$original" "$copy"
    cp "$original/torch_memory_saver_hook_mode_preload_cu$major.abi3.so" \
      "$copy/torch_memory_saver_hook_mode_preload.abi3.so"
    unset MEMSAVER_DROP_IN
    PYTHONPATH=$copy${PYTHONPATH:+:$PYTHONPATH}
    ;;
  *)
    echo "WAY=$way: expected memsaver or tms" >&2
    exit 2
    ;;
esac
# The test starts a child, which gets all of this from the environment.
export PYTHONPATH=$tools:$directory/AReaL:$directory/packages${PYTHONPATH:+:$PYTHONPATH}
export HF_HOME=$directory/huggingface HF_HUB_OFFLINE=1
unset HF_HUB_CACHE HUGGINGFACE_HUB_CACHE
echo "left out: test_engine_offload_and_onload[Megatron], which needs megatron-core and mbridge"
cd "$directory/AReaL"
"$python" -c '
import sys
from importlib import metadata
import pytest
import torch_memory_saver
way, original = sys.argv[1:3]
if way == "memsaver":
    import memsaver.drop_in
    assert memsaver.drop_in.status()["tms"].state == "active", "the drop-in is not installed"
else:
    assert torch_memory_saver.__file__.startswith(original), f"not the original: {torch_memory_saver.__file__}"
    assert metadata.version("torch_memory_saver") == "0.0.10", metadata.version("torch_memory_saver")
print("torch_memory_saver:", torch_memory_saver.__file__, flush=True)
sys.exit(pytest.main(sys.argv[3:]))
' "$way" "$directory/original/" -q -p no:cacheprovider \
  --deselect "tests/test_offload.py::test_engine_offload_and_onload[Megatron]" "$@" tests/test_offload.py
