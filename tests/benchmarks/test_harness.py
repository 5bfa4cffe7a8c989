"""The harness of the benchmarks: arguments, processes, contents, checks and verdicts."""

from __future__ import annotations

import ast
import ctypes
import importlib
import itertools
import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver
from benchmarks import __main__ as program
from benchmarks import driver_calls, soak, step
from benchmarks.harness import command, machine
from benchmarks.harness.processes import CONTEXT, Failed, Process, ask_all, processes
from benchmarks.harness.work import Contents, Work
from examples.colocate.options import parse
from examples.colocate.recipes import RECIPES
from tests import gpus


def status_of(*arguments: str) -> object:
    """The exit status, or the text of an exit without a status."""
    try:
        return program.main(list(arguments))
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("name", program.names())
def test_missing_gpus_are_reported_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    seen = getattr(module, "GPUS", 1) - 1
    monkeypatch.setattr(command, "visible_gpus", lambda: seen)
    needed = f"{seen + 1} CUDA devices" if seen else "a CUDA device"
    assert status_of(name) == f"this benchmark needs {needed}, and torch sees {seen or 'none'}"


@pytest.mark.parametrize("way", ["memsaver", "memsaver, lazy", "memsaver, late", "to-cpu", "resident"])
def test_a_step_of_the_example_is_asked_for_by_arguments_that_it_has(way: str) -> None:
    options = command.Options("step", step)
    step.options(options)
    given = options.read(["--device", "cpu", "--steps", "2", "--with", "--prompts 3"])
    found, recipe, _ = parse(step.arguments(given, way))
    assert (found.device, recipe.steps, recipe.prompts, recipe.kv_blocks) == ("cpu", 2, 3, RECIPES["tiny"].kv_blocks)
    assert (found.memory, found.late) == (way if "memsaver" not in way else "memsaver", "late" in way)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> command.Run:
    monkeypatch.setenv("MEMSAVER_TEST_COMMIT", "abc1234")
    options = command.Options("disk", importlib.import_module("benchmarks.disk"))
    return command.Run("disk", options.read(["--device", "cpu", "--save", str(tmp_path)]))


def test_a_run_keeps_its_tables_and_fails_by_its_checks(
    run: command.Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run.table("times", {"a": {"ms": 1.5}, "b": {"ms": None, "of": "3 %"}})
    run.check("fine", True)
    run.check("fast", False, 2.0, at_full_size=True)  # not decided on the CPU
    assert run.attempt("half", lambda: 7) == 7 and run.end(1.0) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1:5] == ["times", "      ms   of", "  a  1.5    -", "  b    -  3 %"]
    assert json.loads(out.splitlines()[-1])["failures"] == []
    run.check("equal", False, "tensor 3")
    assert run.attempt("part", lambda: [][0]) is None and run.end(1.0) == 1
    saved = tmp_path / f"{machine.environment('cpu')['date']}-host-disk.jsonl"
    found = json.loads(saved.read_text().splitlines()[1])
    assert found["failures"] == ["equal: tensor 3", "part: IndexError: list index out of range"]
    assert [each["holds"] for each in found["checks"]] == [True, None, False]
    assert found["commit"] == "abc1234" and found["tables"]["times"]["a"] == {"ms": 1.5}


def test_a_process_answers_and_says_how_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With things of the standard library, which a new process loads in no time."""
    CONTEXT.set_forkserver_preload(["tests.preloaded"])  # of this process's one server
    monkeypatch.setenv("MEMSAVER_TEST_A", "inherited")
    variables = {"MEMSAVER_TEST_A": "", "MEMSAVER_TEST_B": "set"}
    fresh = Process(importlib.import_module, variables=variables, name="os")
    counted = Process(itertools.repeat, object=7, times=2)
    with processes(fresh, counted, made := Process(threading.Event, timeout_s=1.0)):
        assert fresh.ask("getenv", key="MEMSAVER_TEST_A") is None and os.environ["MEMSAVER_TEST_A"] == "inherited"
        assert fresh.ask("getenv", key="MEMSAVER_TEST_B") == "set" and "MEMSAVER_TEST_B" not in os.environ
        assert [ask_all([counted]), ask_all([counted])] == [[7], [7]]
        with pytest.raises(Failed, match="^StopIteration$") as failed:
            counted.ask()
        assert "Traceback" in failed.value.details
        with pytest.raises(Failed, match="^the process ended with status -6$"):
            fresh.ask("abort")
        assert [made.ask(method) for method in ("is_set", "set", "is_set", "clear")] == [False, None, True, None]
        with pytest.raises(Failed, match="^no answer within 1 s$"):
            made.ask("wait")
    with processes(refuses := Process(threading.Semaphore, value=-1)):
        with pytest.raises(Failed, match="^ValueError: semaphore initial value must be >= 0$"):
            refuses.ask()


@pytest.mark.parametrize("spoil", ["bit", "places", "tensors", "address"])
def test_contents_are_compared_by_bits_places_and_addresses(spoil: str) -> None:
    tensors = Work(3, 1 << 16).allocate("cpu")
    contents = Contents(tensors)
    contents.change()
    contents.check()
    if spoil == "bit":
        tensors[1].view(torch.uint8)[77] ^= 4
    elif spoil == "places":
        tensors[2][[5, 900]] = tensors[2][[900, 5]]
    elif spoil == "tensors":
        tensors[0].copy_(tensors[1])
    else:
        contents.tensors[0] = tensors[0].clone()
    with pytest.raises(AssertionError, match="addresses" if spoil == "address" else "contents of tensor"):
        contents.check()


def footprints(number: int, seed: int, leak: float = 0) -> list[dict[str, dict[str, float]]]:
    noise = random.Random(seed)
    sizes = [180 * machine.MIB + noise.randrange(8 * machine.MIB) + leak * at for at in range(number)]
    return [{"client a": {"resident": size, "threads": 12}} for size in sizes]


def test_a_leak_is_found_and_noise_is_not() -> None:
    for seed in range(20):
        for leak, grows in ((0.0, False), (0.8 * machine.MIB, True)):
            rows = soak.growths(footprints(50, seed, leak))
            assert [row["grown"] > row["tolerance"] for row in rows.values()] == [grows, False]
    assert soak.growths(footprints(2, 0)) == {}
    assert set(soak.of_process(os.getpid())) <= set(soak.TOLERANCES)


def test_benchmarks_use_public_names_of_memsaver_alone() -> None:
    for path in program.FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "memsaver":
                assert {each.name for each in node.names} <= {*memsaver.__all__, "cli"}, path
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memsaver."):
                assert node.module in ("memsaver.distributed", "memsaver.guests", "memsaver.ray"), path
            if isinstance(node, ast.Attribute):
                assert node.attr != "_core", path


def test_the_calls_of_the_driver_are_those_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gpus.environment().items():
        monkeypatch.setenv(name, value)
    base, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
    names = ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
    driver: Any = SimpleNamespace(**{name: gpus.driver_call(name) for name in names})
    total = ctypes.c_size_t(8 << 20)
    assert driver.cuMemAddressReserve(ctypes.byref(base), total, ctypes.c_size_t(0), zero, zero) == 0
    for _ in range(2):
        steps = driver_calls.cycle(driver, 0, base.value, 8 << 20, 2 << 20)
        assert sorted(steps) == ["create", "map", "release", "set access", "unmap"]
