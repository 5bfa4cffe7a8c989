"""``memsaver run``: programs whose memory is managed whole."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memsaver import cli
from memsaver.drop_in.tms.launch import LIBRARY, environment
from memsaver.errors import ConfigError

NAMES = (
    "LD_PRELOAD",
    "MEMSAVER_DROP_IN",
    "TMS_INIT_ENABLE",
    "TMS_INIT_ENABLE_CPU_BACKUP",
    "TMS_INIT_ENABLE_DISK_BACKUP",
)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    command = [sys.executable, "-m", "memsaver", "run", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("backup", "switches"), [("host", "10"), ("disk", "01"), ("none", "00")])
def test_program_has_the_variables_of_its_policy(backup: str, switches: str) -> None:
    program = f"import os; print(*(os.environ[name] for name in {NAMES!r}))"
    done = run("--backup", backup, "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(LIBRARY), "tms", "1", *switches]


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_machine_without_a_gpu_is_named_in_one_line(
    gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(cli._core, "cuda_device_count", lambda: gpus)
    monkeypatch.setattr(os, "execvpe", lambda *program: started.append(program[0]))
    assert cli.main(["run", "--", "python", "train.py"]) == 0
    assert started == ["python"]
    assert capsys.readouterr().err == ("" if gpus else "memsaver: CUDA finds no GPU: no memory of python is managed\n")


def test_other_libraries_and_drop_ins_stay() -> None:
    found = environment("host", {"LD_PRELOAD": "/lib/other.so", "MEMSAVER_DROP_IN": "vllm", "KEPT": "1"})
    assert found["LD_PRELOAD"] == f"{LIBRARY}:/lib/other.so"
    assert found["MEMSAVER_DROP_IN"] == "vllm,tms"
    assert found["KEPT"] == "1"
    assert environment("host", found) == found  # of a program that starts another


def test_another_library_of_torch_memory_saver_goes() -> None:
    former = "/site/torch_memory_saver_hook_mode_preload_cu13.abi3.so:/lib/other.so"
    assert environment("host", {"LD_PRELOAD": former})["LD_PRELOAD"] == f"{LIBRARY}:/lib/other.so"


def test_mode_of_the_drop_in_stays() -> None:
    assert environment("host", {"MEMSAVER_DROP_IN": "tms:warn"})["MEMSAVER_DROP_IN"] == "tms:warn"


def test_wrong_drop_in_is_named() -> None:
    with pytest.raises(ConfigError, match="drop_in is 'everything'"):
        environment("host", {"MEMSAVER_DROP_IN": "everything"})


def test_exit_status_is_that_of_the_program() -> None:
    assert run("--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_program_that_cannot_be_started_is_named() -> None:
    done = run("--", "/nowhere/program")
    assert done.returncode == 1
    assert done.stderr.endswith("memsaver: /nowhere/program cannot be started: No such file or directory\n")


def test_missing_program_is_wrong_usage() -> None:
    done = run("--")
    assert done.returncode == 2
    assert "PROGRAM is missing, expected a command such as: memsaver run -- python train.py" in done.stderr


def test_hooks_name_the_libraries() -> None:
    program = """
from torch_memory_saver.hooks.base import HookUtilBase
for mode in ("preload", "torch"):
    hook = HookUtilBase.create(mode)
    print(hook.get_path_binary(), hook.get_allocator())
"""
    done = run("--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(LIBRARY), "None", str(LIBRARY.with_name("torch_memory_saver_hook_mode_torch_cu13.abi3.so")), "None",
    ]  # fmt: skip
