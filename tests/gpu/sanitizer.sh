#!/usr/bin/env bash
# compute-sanitizer's memcheck over tests of transitions and graphs, on a GPU.
#
#   tests/gpu/sanitizer.sh quick    tests without a second process, and without kernels that must still run: about 100 s
#   tests/gpu/sanitizer.sh all      all tests of both files: about 10 minutes
#   tests/gpu/sanitizer.sh proof    a kernel writes to a paused region: memcheck must report it; about 30 s
#
# Further arguments go to pytest. PYTHON=python3.12 chooses the interpreter. The exit status is 0 where all tests passed
# and memcheck found nothing.
#
# memcheck sees an access outside of the memory that is mapped. It does not see one to a block that is free within a
# segment: those are torch's caching allocator's. PYTORCH_NO_CUDA_MEMORY_CACHING=1 would show them, but torch has no
# memory pools then, and a region would get nothing. --target-processes all, because the interpreter may be started by a
# wrapper, and tests start processes of their own. --report-api-errors no, because some tests make calls fail.
set -euo pipefail
cd "$(dirname "$0")/../.."
mode=${1:-quick}
shift || true
python=${PYTHON:-python3}
unset PYTORCH_NO_CUDA_MEMORY_CACHING
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

memcheck() {
  compute-sanitizer --tool memcheck --target-processes all --report-api-errors no --error-exitcode 99 --print-limit 20 "$@"
}

files=(tests/gpu/test_transitions.py tests/gpu/test_graphs.py)
case $mode in
  quick)
    chosen="in_flight or failed_capture or during_a_capture or did_not_begin"
    memcheck "$python" -m pytest -q -p no:cacheprovider "${files[@]}" tests/gpu/test_under_fire.py -k "$chosen" "$@"
    ;;
  all)
    memcheck "$python" -m pytest -q -p no:cacheprovider "${files[@]}" "$@"
    ;;
  proof)
    program='import torch, memsaver
tensor = memsaver.region("paused").empty((1 << 20,))
memsaver.pause()
tensor.fill_(1)
torch.cuda.synchronize()'
    said=$(memcheck "$python" -c "$program" 2>&1) && { echo "$said"; echo "memcheck found nothing"; exit 1; }
    grep -m 1 "Invalid __global__ write" <<<"$said" || { echo "$said"; echo "memcheck did not see the write"; exit 1; }
    ;;
  *)
    echo "$0: there is no mode '$mode'; there are quick, all and proof" >&2
    exit 2
    ;;
esac
