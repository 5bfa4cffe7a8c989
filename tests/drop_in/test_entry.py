"""The plugin that vLLM finds, in processes of its own."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.drop_in import fake_vllm
from tests.support import run_clean, run_python

LOAD = """
from importlib.metadata import entry_points
import sys
(plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "memsaver"]
plugin.load()()
"""


def test_plugin_is_registered() -> None:
    (plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "memsaver"]
    assert plugin.value == "memsaver_drop_in:vllm"


@pytest.mark.parametrize("variables", [{}, {"MEMSAVER_DROP_IN": ""}])
def test_plugin_without_the_variable_imports_nothing(variables: dict[str, str]) -> None:
    done = run_python(
        LOAD + "print([name for name in sys.modules if name.split('.')[0] in ('memsaver', 'torch')])", **variables
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_status_needs_no_import_of_its_own() -> None:
    assert run_clean("import memsaver; print(memsaver.drop_in.status())") == "{}\n"


@pytest.mark.parametrize("value", ["vlm", "vllm:off", "vllm,sms"])
def test_value_without_meaning_is_named(value: str) -> None:
    done = run_python(LOAD, MEMSAVER_DROP_IN=value)
    assert done.returncode != 0
    assert f"drop_in is {value!r}, expected names of 'vllm', 'tms'" in done.stderr


def test_plugin_refuses_a_vllm_that_differs(tmp_path: Path) -> None:
    fake_vllm.write(tmp_path)
    (tmp_path / fake_vllm.CUMEM).write_text("")
    done = run_python(LOAD, MEMSAVER_DROP_IN="vllm", PYTHONPATH=fake_vllm.before(tmp_path))
    assert done.returncode != 0
    assert "vLLM 9.9.9 differs from the versions that memsaver knows" in done.stderr
    assert "or MEMSAVER_DROP_IN=vllm:warn to go on without memsaver" in done.stderr


def test_plugin_does_not_import_the_allocator_of_vllm(tmp_path: Path) -> None:
    """Its import loads CUDA, which a process that forks its workers must not do."""
    fake_vllm.write(tmp_path)
    program = f"""
{LOAD}
print([name for name in sys.modules if name.startswith("vllm") or name == "torch"])
from memsaver import drop_in
print(drop_in.status()["vllm"].state)
"""
    done = run_python(program, MEMSAVER_DROP_IN="vllm", PYTHONPATH=fake_vllm.before(tmp_path))
    assert done.stdout.split("\n")[:2] == ["[]", "waiting"], done.stderr
