"""The plugin that vLLM finds, in processes of its own."""

from __future__ import annotations

import os
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from memsaver import cli
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


def test_commands_write_and_remove_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``site`` runs the file as it does in site-packages."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    program = f"""
import os, site, sys
site.addsitedir({str(tmp_path)!r})
print(os.environ.get("MEMSAVER_DROP_IN"), type(sys.meta_path[0]).__module__, "torch" in sys.modules)
"""
    assert cli.main(["drop-in", "install", "tms", "vllm:warn"]) == 0
    assert run_python(program).stdout.split() == ["tms,vllm:warn", "memsaver_drop_in", "False"]
    assert run_python(program, MEMSAVER_DROP_IN="vllm").stdout.split()[0] == "vllm"
    assert cli.main(["drop-in", "install", "sglang"]) == 1
    assert cli.main(["drop-in", "remove"]) == cli.main(["drop-in", "remove"]) == 0
    assert not list(tmp_path.iterdir())
    output = capsys.readouterr()
    assert "drop_in is 'sglang', expected names of" in output.err
    assert f"there is no {tmp_path / 'memsaver_drop_in.pth'}" in output.out


def test_folder_keeps_the_sitecustomize_of_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.joinpath("sitecustomize.py").write_text("import builtins; builtins.theirs = 1")
    assert cli.main(["drop-in", "path"]) == 0
    path = os.pathsep.join([capsys.readouterr().out.strip(), fake_vllm.before(tmp_path)])
    program = "import sys; print(theirs, 'memsaver_drop_in' in sys.modules)"
    assert run_python(program, PYTHONPATH=path, MEMSAVER_DROP_IN="tms").stdout.split() == ["1", "True"]
    assert run_python(program, PYTHONPATH=path).stdout.split() == ["1", "False"]
