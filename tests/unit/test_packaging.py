"""The requirements that the build files state, and an installation without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import memsaver
from tests.support import ROOT, environment, run_clean, run_program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_and_requirements_are_the_same_everywhere() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"] == "memsaver/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", memsaver.__version__)
    assert memsaver.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py311"
    assert set(re.findall(r"find_package\(Python (\S+)", (ROOT / "CMakeLists.txt").read_text())) == {"3.11"}
    assert "sys.version_info < (3, 11)" in (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        assert re.findall(r"Python (3\.\d+) or newer", (ROOT / page).read_text()) == ["3.11"]
    versions = [
        each for each in PROJECT["project"]["classifiers"] if each.startswith("Programming Language :: Python :: 3.")
    ]
    assert versions[0].endswith("3.11")
    assert not [each for each in PROJECT["project"]["dependencies"] if each.startswith("torch")]
    assert PROJECT["project"]["optional-dependencies"]["torch"] == ["torch>=2.8"]


def test_library_and_broker_run_without_torch() -> None:
    source = """
        import importlib.metadata, sys
        sys.modules["torch"] = sys.modules["ray"] = None  # any import of them raises ImportError
        importlib.metadata.version = None  # the files alone suffice, as in a source tree
        import memsaver
        from memsaver import cli
        region = memsaver.region("a", device="cpu", backup="host")
        memsaver.pause()
        memsaver.resume()
        for use in (lambda: region.empty(4), lambda: memsaver.graph, region.__enter__):
            try:
                use()
            except ModuleNotFoundError as error:
                assert "needs torch; expected it from pip install 'memsaver[torch]'" in str(error), error
            else:
                raise AssertionError(use)
        try:
            import memsaver.ray
        except ModuleNotFoundError as error:
            assert "memsaver.ray needs Ray" in str(error) and "pip install 'memsaver[ray]'" in str(error), error
        else:
            raise AssertionError
        print(region.state, cli.main(["config"]))
    """
    assert run_clean(source).splitlines()[-1] == "active 0"


def test_the_package_is_imported_in_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    remove = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    program = "import memsaver; print(memsaver.region('a', device='cpu').state)"  # -c: the directory is in sys.path
    done = run_program(["sh", "-c", remove, str(tmp_path / "gone"), sys.executable, "-c", program], env=environment())
    assert (done.stdout, done.stderr) == ("active\n", "")


def test_the_files_of_a_wheel_suffice(tmp_path: Path) -> None:
    """The core is that of this environment: its compilation takes a minute. -S: without the checkout."""
    settings = {"wheel.cmake": "false", "wheel.py-api": "py3"}
    build = f"import scikit_build_core.build as backend; backend.build_wheel({str(tmp_path)!r}, {settings})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    [wheel] = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    shutil.copy(memsaver._core.__file__, tmp_path / "site/memsaver")
    path = f"{tmp_path / 'site'}:{sysconfig.get_path('purelib')}"
    program = "from memsaver import cli, drop_in; cli.main(['drop-in', 'path']); print(drop_in.__file__)"
    variables = {**os.environ, "PYTHONPATH": path, "MEMSAVER_DROP_IN": ""}
    done = run_program([sys.executable, "-S", "-c", program], env=variables, cwd=tmp_path)
    assert done.stderr == ""
    start, module = map(Path, done.stdout.split())
    assert module.parent.parent == start.parent.parent == tmp_path / "site/memsaver"
    assert (start / "sitecustomize.py").exists()
    assert (tmp_path / "site/memsaver_drop_in/__init__.py").exists()
