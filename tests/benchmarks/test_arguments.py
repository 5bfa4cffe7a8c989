"""The benchmarks refuse wrong arguments before they measure, and results name date, device and commit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
NUMBERED = ("disk", "driver_calls", "engine", "pause_resume", "scale", "send_tensor", "soak", "stalls")
HOST_ALONE = {"turn_nodes"}  # benchmarks that need no GPU

# Calls one benchmark after the other with arguments: importing torch takes seconds, which all share.
CALLS = """
import contextlib, importlib, io, json, sys
for line in sys.stdin:
    name, *sys.argv[1:] = json.loads(line)
    sys.argv[0] = name
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(name).main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Calls:
    def __init__(self, folder: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "MEMSAVER_TEST_COMMIT": "abc1234"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", CALLS], env=environ, cwd=folder, **pipes)

    def __call__(self, *arguments: str) -> tuple[Any, str, str]:
        """Status or last word, stdout and stderr."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        code, out, err = json.loads(self.process.stdout.readline())
        return code, out, err


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    calls = Calls(tmp_path_factory.mktemp("elsewhere"))
    yield calls
    calls.process.communicate()


def test_every_benchmark_is_listed() -> None:
    assert set(NUMBERED) | {
        "default_pool",
        "handover",
        "hung_exit",
        "attention_kernels",
        "loop_ledger",
        "reclaim",
        "sglang_faults",
        "sglang_memory",
        "tensor_parallel",
        "tms_trainer",
        "together",
        "turn_nodes",
        "turn_ranks",
        "turns",
        "vllm_faults",
        "vllm_receiver",
        "vllm_rounds",
        "vllm_sleep",
        "vllm_trainer",
        "whole_process",
    } == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_help_is_printed_and_unknown_options_are_refused(call: Calls, name: str) -> None:
    code, out, _ = call(name, "--help")
    assert code == 0 and out.startswith(f"usage: {name}")
    code, _, err = call(name, "--nonsense")
    assert code == 2 and "unrecognized arguments: --nonsense" in err


@pytest.mark.parametrize(
    "line",
    [
        *(f"{name} --device {device}" for name in NUMBERED for device in ("cuda:x", "gpu", "")),
        *(f"{name} --device cuda:0" for name in ("handover", "tensor_parallel", "together", "turn_ranks", "turns")),
        "whole_process --device cuda:0",
        "default_pool --cap-gib 0", "default_pool --steps 3", "default_pool --rounds 0", "default_pool --batch x",
        "disk --gib 0", "disk --gib inf", "disk --rounds 0", "disk --disk-dir /nowhere",
        "driver_calls --gib 1.5", "driver_calls --cycles 0", "driver_calls --rest -1",
        "engine --only 10", "handover --cycles 0", "handover --rounds x", "handover --scale nan", "handover --only all",
        "loop_ledger --steps 0", "loop_ledger --device gpu", "loop_ledger --apart 0",
        "hung_exit --kernel 0", "hung_exit --only all",
        "pause_resume --rounds 0", "pause_resume --cycles -1", "pause_resume --scale 0", "pause_resume --only all",
        "reclaim --gib 0", "reclaim --work 0", "reclaim --rounds x", "reclaim --limit 0",
        "scale --cycles 0", "scale --only all", "scale --regions 0",
        "send_tensor --gib 0", "send_tensor --rounds 0", "send_tensor --only all",
        "soak --turns 0", "soak --seconds 0", "soak --every -1", "stalls --part 0", "stalls --rounds x",
        "sglang_faults --only all", "sglang_faults --ways vllm", "sglang_faults --kv-gib -1",
        "sglang_memory --rounds 0", "sglang_memory --models none", "sglang_memory --settings all",
        "sglang_memory --kv-gib 0", "sglang_memory --ways vllm",
        "tensor_parallel --model none", "tensor_parallel --batch 0", "tensor_parallel --pauses 0",
        "together --processes 0", "together --gib -1", "together --cycles 0",
        "turn_nodes --ranks 7", "turn_nodes --turns 0", "turn_nodes --raylets x",
        "turn_ranks --ranks 0", "turn_ranks --turns x", "turn_ranks --mib 0",
        "turns --cycles 0", "turns --ranks 0", "turns --only all",
        "vllm_receiver --rounds 0", "vllm_receiver --model moe",
        "vllm_faults --share 0",
        "whole_process --layers 0", "whole_process --steps x",
        "vllm_sleep --rounds 0", "vllm_sleep --models none", "vllm_sleep --share -1",
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call: Calls, line: str) -> None:
    name, option, value = line.split(" ")
    code, out, err = call(name, option, value)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert re.match(rf"{name}: error: argument {option}: .*{re.escape(value)}.*(expected|choose from)", last), last


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HOST_ALONE])
def test_a_missing_gpu_is_reported_in_one_line(call: Calls, name: str) -> None:
    code, out, err = call(name)
    assert (out, err) == ("", "")
    assert code == "this benchmark needs a CUDA device, and torch sees none"


def test_a_result_has_date_device_and_commit(call: Calls) -> None:
    code, out, _ = call("driver_calls", "--device", "cpu", "--cycles", "1")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["commit"] == "abc1234"
    assert result["device"] == f"host, {os.cpu_count()} cores"
    assert result["bytes"] == 1 << 30  # small, unless told otherwise
