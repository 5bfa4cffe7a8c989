"""The ways into drop-ins: the plugin for vLLM, files that Python runs, callbacks at imports, ``memsaver run``."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import memsaver_drop_in
import pytest
from memsaver_drop_in import when_imported

from memsaver import cli, drop_in
from memsaver.drop_in import DropInError, startup
from memsaver.drop_in.startup import FOLDER, PRELOAD, managed, python_path
from memsaver.errors import ConfigError
from tests.drop_in import fake_vllm
from tests.drop_in.fake_vllm import before
from tests.nursery import Fork
from tests.support import environment, run_program, run_python

NAME = "memsaver_test_imported"
PLUGIN = """
from importlib.metadata import entry_points
import sys
(plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "memsaver"]
plugin.load()()
print(*{"memsaver", "torch", "vllm"} & {name.partition(".")[0] for name in sys.modules})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules. The finders are put back, and the drop-ins that a test installs."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(drop_in, "_states", {})
    yield tmp_path
    sys.modules.pop(NAME, None)


class TestCallbacks:
    def test_callback_runs_once_after_the_module_was_executed(self, folder: Path) -> None:
        seen: list[tuple[str, int]] = []
        finders = list(sys.meta_path)
        when_imported(NAME, lambda module: seen.append((module.__name__, module.x)))
        with pytest.raises(ModuleNotFoundError):
            __import__(NAME)
        folder.joinpath(f"{NAME}.py").write_text("x = 1")
        __import__("importlib").invalidate_caches()
        module = __import__(NAME)
        __import__(NAME)
        assert seen == [(NAME, 1)]
        assert sys.meta_path == finders
        assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
        assert getattr(module.__loader__, "get_source")(NAME) == "x = 1"  # noqa: B009
        when_imported(NAME, lambda module: seen.append(("again", module.x)))
        assert seen[1:] == [("again", 1)]

    def test_failing_callback_fails_the_import_each_time(self, folder: Path) -> None:
        folder.joinpath(f"{NAME}.py").write_text("")

        def fail(module: ModuleType) -> None:
            raise RuntimeError("not this one")

        when_imported(NAME, fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="not this one"):
                __import__(NAME)
            assert NAME not in sys.modules


class TestPlugin:
    def test_plugin_without_the_variable_imports_nothing(self) -> None:
        assert run_python(PLUGIN).stdout == "\n"

    def test_plugin_does_not_import_the_allocator_of_vllm(self, tmp_path: Path) -> None:
        """Its import loads CUDA, which a process that forks its workers must not do."""
        fake_vllm.write(tmp_path)
        program = PLUGIN + "print(sys.modules['memsaver.drop_in'].status()['vllm'].state)"
        done = run_python(program, MEMSAVER_DROP_IN="vllm", PYTHONPATH=before(tmp_path))
        assert done.stdout.splitlines() == ["memsaver", "waiting"], done.stderr

    def test_value_without_meaning_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "memsaver"]
        for value in ("vlm", "vllm:warn", "vllm,sms"):
            monkeypatch.setenv("MEMSAVER_DROP_IN", value)
            with pytest.raises(ConfigError, match=f"drop_in is {value!r}, expected names of 'vllm', 'tms'"):
                plugin.load()()


class TestFiles:
    def test_commands_write_and_remove_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """``site`` runs the file as it does in site-packages."""
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        program = f"""
import os, site, sys
site.addsitedir({str(tmp_path)!r})
print(os.environ.get("MEMSAVER_DROP_IN"), type(sys.meta_path[0]).__module__, "torch" in sys.modules)
"""
        assert cli.main(["drop-in", "install", "tms", "vllm"]) == 0
        assert run_python(program).stdout.split() == ["tms,vllm", "memsaver_drop_in", "False"]
        assert run_python(program, MEMSAVER_DROP_IN="vllm").stdout.split()[0] == "vllm"
        bare = [sys.executable, "-S", "-c", program]  # no site-packages yet, as in a virtual environment over another
        assert run_program(bare, env=environment(PYTHONPATH="")).stdout.split() == [
            "tms,vllm",
            "memsaver_drop_in",
            "False",
        ]
        monkeypatch.setattr(startup, "FOLDER", tmp_path / "none")  # memsaver was uninstalled
        assert cli.main(["drop-in", "install", "tms", "vllm"]) == 0
        done = run_program(bare, env=environment(PYTHONPATH=""))
        assert (done.stdout.split()[0], "memsaver" in done.stdout, done.stderr) == ("tms,vllm", False, "")
        former = (tmp_path / "memsaver_drop_in.pth").read_text()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))  # as on a full disk
        try:
            assert cli.main(["drop-in", "install", "vllm"]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [each.read_text() for each in tmp_path.iterdir()] == [former]
        assert cli.main(["drop-in", "install", "sglang"]) == 1
        assert cli.main(["drop-in", "remove"]) == cli.main(["drop-in", "remove"]) == 0
        assert not list(tmp_path.iterdir())
        output = capsys.readouterr()
        assert "drop_in is 'sglang', expected names of" in output.err
        assert f"there is no {tmp_path / 'memsaver_drop_in.pth'}" in output.out

    def test_folder_keeps_the_sitecustomize_of_the_environment(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tmp_path.joinpath("sitecustomize.py").write_text("import builtins; builtins.theirs = 1")
        assert cli.main(["drop-in", "path"]) == 0
        path = os.pathsep.join([capsys.readouterr().out.strip(), before(tmp_path)])
        names = "[name for name in ('memsaver', 'torch', 'memsaver_drop_in') if name in sys.modules]"
        program = f"import sys; print(theirs, {names})"
        assert run_python(program, PYTHONPATH=path, MEMSAVER_DROP_IN="tms").stdout == "1 ['memsaver_drop_in']\n"
        assert run_python(program, PYTHONPATH=path).stdout == "1 []\n"


class TestSaver:
    """The import of torch_memory_saver, where the folder of ``memsaver drop-in path`` is in PYTHONPATH."""

    @pytest.fixture
    def original(self, folder: Path) -> str:
        """PYTHONPATH with a package that stands for the original."""
        package = folder / "torch_memory_saver"
        package.mkdir()
        package.joinpath("__init__.py").write_text("kind = 'original'\n")
        return python_path(before(folder))

    def test_variable_puts_the_package_in_place_of_the_original(self, original: str) -> None:
        program = """
import importlib.util
assert importlib.util.find_spec("torch_memory_saver") is not None  # a look-up before the import changes nothing
import torch_memory_saver, torch_memory_saver.utils
from torch_memory_saver import torch_memory_saver as saver, configure_subprocess
from memsaver import drop_in
with configure_subprocess(), torch_memory_saver.utils.change_env("ANY", "1"):
    pass
assert not hasattr(torch_memory_saver, "kind")
assert (type(saver).__module__, drop_in.status()["tms"].state) == ("memsaver.drop_in.tms.saver", "active")
"""
        with Fork({"MEMSAVER_DROP_IN": "tms"}) as process:  # which does as the start of Python
            process.run(f"sys.path[:0] = {original.split(os.pathsep)}; import memsaver_drop_in")
            process.run(f"memsaver_drop_in.start(); exec({program!r})")

    @pytest.mark.parametrize("value", ["", "vllm"])
    def test_without_the_variable_the_original_is_imported(self, original: str, value: str) -> None:
        program = "import sys, torch_memory_saver; print(torch_memory_saver.kind, 'memsaver' in sys.modules)"
        done = run_python(program, MEMSAVER_DROP_IN=value, PYTHONPATH=original)
        assert done.stdout.split() == ["original", "False"], done.stderr

    @pytest.mark.usefixtures("original")
    def test_wrong_variable_fails_the_import(self, monkeypatch: pytest.MonkeyPatch) -> None:
        value = "vllm,tsm"  # a misspelt "tms"
        monkeypatch.setenv("MEMSAVER_DROP_IN", value)
        memsaver_drop_in.start()
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"drop_in is '{value}', expected names of 'vllm', 'tms'"):
                __import__("torch_memory_saver")

    @pytest.mark.usefixtures("folder")
    def test_original_that_is_imported_already_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch_memory_saver", ModuleType("torch_memory_saver"))
        monkeypatch.setenv("MEMSAVER_DROP_IN", "tms")
        with pytest.raises(DropInError, match="is imported already: set MEMSAVER_DROP_IN before Python starts"):
            drop_in.install("tms")


class TestRun:
    """``memsaver run``: programs whose memory is managed whole."""

    @pytest.mark.parametrize(("backup", "switches"), [("host", "10"), ("disk", "01"), ("none", "00")])
    def test_variables_are_those_of_the_policy(self, backup: str, switches: str) -> None:
        base = {"LD_PRELOAD": "/lib/other.so", "PYTHONPATH": ":/lib", "MEMSAVER_DROP_IN": "vllm", "KEPT": "1"}
        found = managed(backup, base)
        assert found["LD_PRELOAD"] == f"{PRELOAD}:/lib/other.so"
        assert found["PYTHONPATH"] == f"{FOLDER}::/lib"  # the working directory, too
        assert found["MEMSAVER_DROP_IN"] == "vllm,tms"
        assert found["KEPT"] == found["TMS_INIT_ENABLE"] == "1"
        assert found["TMS_INIT_ENABLE_CPU_BACKUP"] + found["TMS_INIT_ENABLE_DISK_BACKUP"] == switches
        assert managed(backup, found) == found  # of a program that starts another

    def test_another_library_of_torch_memory_saver_goes(self) -> None:
        former = "/lib/first.so /site/torch_memory_saver_hook_mode_preload_cu13.abi3.so:/lib/other.so"
        found = managed("host", {"LD_PRELOAD": former, "MEMSAVER_DROP_IN": "vllm, tms"})
        assert found["LD_PRELOAD"] == f"{PRELOAD}:/lib/first.so:/lib/other.so"
        assert found["MEMSAVER_DROP_IN"] == "vllm, tms"
        with pytest.raises(ConfigError, match="drop_in is 'everything'"):
            managed("host", {"MEMSAVER_DROP_IN": "everything"})

    def test_the_program_takes_the_place_of_the_command(self) -> None:
        program = "import os; raise SystemExit(7 if os.environ['TMS_INIT_ENABLE_DISK_BACKUP'] == '1' else 8)"
        command = [sys.executable, "-m", "memsaver", "run", "--backup", "disk", "--", sys.executable, "-c", program]
        assert subprocess.run(command, timeout=60).returncode == 7

    def test_a_path_that_the_loader_would_split_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(startup, "PRELOAD", Path("/home/my environment/preload.so"))
        monkeypatch.setattr(os, "execvpe", lambda *program: None)
        assert cli.main(["run", "--", sys.executable, "-c", "0"]) == 1
        text = "the library to preload is '/home/my environment/preload.so', expected a path without spaces and colons"
        assert text in capsys.readouterr().err

    @pytest.mark.parametrize("gpus", [0, 2])
    def test_a_machine_without_a_gpu_is_named_in_one_line(
        self, gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        started = []
        monkeypatch.setattr(cli._core, "cuda_device_count", lambda: gpus)
        monkeypatch.setattr(os, "execvpe", lambda *program: started.append(program[0]))
        assert cli.main(["run", "--", "python", "train.py"]) == 0
        assert started == ["python"]
        expected = "" if gpus else "memsaver: CUDA finds no GPU: no memory of python is managed\n"
        assert capsys.readouterr().err == expected

    def test_program_that_cannot_be_started_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["run", "--", "/nowhere/program"]) == 1
        text = "memsaver: /nowhere/program cannot be started: No such file or directory\n"
        assert capsys.readouterr().err.endswith(text)
        assert cli.main(["run", "--"]) == 2
        assert "PROGRAM is missing, expected a command such as: memsaver run --" in capsys.readouterr().err
