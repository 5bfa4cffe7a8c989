"""A small wrong change of Python, and the tests that must find it: see tests/mutants.py, which runs them.

A change rewrites one place of a copy of the sources. The old text must be there exactly once, and the tests run in the
copy, with the core that is built.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memsaver import _core

ROOT = Path(__file__).resolve().parent.parent
_COPIED = ("csrc", "memsaver", "tests", "examples", "pyproject.toml")  # csrc: headers for tests/controls.py

# The packages of the copy come before those of the environment, however memsaver was installed; in subprocesses too.
_REDIRECT = """
import sys
from importlib.machinery import PathFinder


class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("memsaver", "tests", "examples"):
            return PathFinder.find_spec(name, path or [{folder!r}])
        return None


sys.meta_path.insert(0, Redirect)
"""


@dataclass(frozen=True)
class Rewrite:
    name: str
    change: str
    file: str
    old: str
    new: str
    tests: Sequence[str]  # at least one fails. Ids of pytest, below tests/

    def text(self) -> str:
        """The file with the change."""
        return self.rewrite((ROOT / self.file).read_text())

    def rewrite(self, text: str) -> str:
        """The text with the change. Raises ValueError unless the old text is there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the old text is {text.count(self.old)} times in {self.file}, expected once")
        return text.replace(self.old, self.new)

    @contextmanager
    def applied(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """The folder of a copy with the change, to run tests in, and the variables that make programs use it."""
        with tempfile.TemporaryDirectory(prefix="ms") as name:  # short: paths of sockets are below it
            folder = Path(name)
            for each in _COPIED:
                if (ROOT / each).is_dir():
                    shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
                else:
                    shutil.copy(ROOT / each, folder / each)
            built = Path(_core.__file__).parent
            for library in built.rglob("*.so"):
                (folder / "memsaver" / library.relative_to(built)).symlink_to(library)
            # The library of tests/device has a name by its sources: one compilation serves all copies.
            shared = ROOT / "build" / "device"
            shared.mkdir(parents=True, exist_ok=True)
            (folder / "build").mkdir()
            (folder / "build" / "device").symlink_to(shared)
            (folder / "sitecustomize.py").write_text(_REDIRECT.format(folder=name))
            if self.file:
                (folder / self.file).write_text(self.text())
            yield folder, {"PYTHONPATH": name}


UNCHANGED = Rewrite("none", "", "", "", "", ())
