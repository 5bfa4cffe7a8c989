"""Callbacks at the first import of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from memsaver.drop_in.imports import when_imported

NAME = "memsaver_test_imported"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)


def test_callback_runs_once_after_the_module_was_executed(folder: Path) -> None:
    folder.joinpath(f"{NAME}.py").write_text("x = 1")
    seen: list[tuple[str, int]] = []
    before = list(sys.meta_path)
    when_imported(NAME, lambda module: seen.append((module.__name__, module.x)))
    assert not seen
    module = __import__(NAME)
    __import__(NAME)
    assert seen == [(NAME, 1)]
    assert sys.meta_path == before
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
    assert getattr(module.__loader__, "get_source")(NAME) == "x = 1"  # noqa: B009


def test_callback_runs_at_once_for_an_imported_module(folder: Path) -> None:
    folder.joinpath(f"{NAME}.py").write_text("")
    module = __import__(NAME)
    seen: list[ModuleType] = []
    when_imported(NAME, seen.append)
    assert seen == [module]


def test_failing_callback_fails_the_import_each_time(folder: Path) -> None:
    folder.joinpath(f"{NAME}.py").write_text("")

    def fail(module: ModuleType) -> None:
        raise RuntimeError("not this one")

    when_imported(NAME, fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not this one"):
            __import__(NAME)
        assert NAME not in sys.modules


def test_missing_module_can_be_imported_later(folder: Path) -> None:
    seen: list[ModuleType] = []
    when_imported(NAME, seen.append)
    with pytest.raises(ModuleNotFoundError):
        __import__(NAME)
    folder.joinpath(f"{NAME}.py").write_text("")
    __import__("importlib").invalidate_caches()
    __import__(NAME)
    assert len(seen) == 1
