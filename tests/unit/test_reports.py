"""Reports of a process: its transitions, its threads, and the files."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

import memsaver
from memsaver import _core, config
from memsaver.turns import reports
from tests.support import Make, until


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "above" / "reports"))
    return tmp_path / "above" / "reports"


def test_part_has_the_transition_under_way_with_its_stage_and_the_stacks(make: Make) -> None:
    region = make()
    assert reports.described(None) == "answers: no transition is under way"
    assert _core.acquire([region._core]) is None  # as a guarded launch, for which the pause waits
    moving = memsaver.start(pause=region)
    try:
        until(lambda: "'launches'" in reports.described(None))
        stage = f"is in enter(); the pause of {region.tag!r} has been in the stage 'launches' for "
        assert reports.described("is in enter()").startswith(stage)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(reports.part()))
        thread.start()
        thread.join(60)
        under_way, rest = found[0].split("threads:")
        assert under_way.startswith(f"pid {os.getpid()} on ")
        assert f"pause {region.tag!r}: running at " in under_way
        assert "in thread 'MainThread'; stages: queue 0.0" in under_way
        assert "  thread 'MainThread':" in rest and "  thread 'memsaver transition':" in rest
        assert "in test_part_has_the_transition_under_way_with_its_stage_and_the_stacks" in rest
        assert f"thread {thread.name!r}" not in rest  # the one that writes the part
    finally:
        _core.release([region._core])
        moving.result(60)


def test_reports_are_files_of_the_user_alone_and_the_oldest_are_removed(folder: Path, tmp_path: Path) -> None:
    paths = [reports.write(f"report {number}") for number in range(3)]
    assert len(set(paths)) == 3
    assert all(path.parent == folder for path in paths)
    assert paths[2].read_text() == "report 2"
    assert (folder.stat().st_mode & 0o777, paths[0].stat().st_mode & 0o777) == (0o700, 0o600)
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (1000 - age, 1000 - age))
    for number in range(48):
        reports.write(str(number))
    assert len(list(folder.iterdir())) == 50
    assert not paths[0].exists() and paths[1].exists()
    for path in folder.iterdir():
        os.utime(path, (1 << 32, 1 << 32))  # the clock has been put back
    assert reports.write("now").exists() and len(list(folder.iterdir())) == 50
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))  # as on a full disk
    try:
        with pytest.raises(memsaver.Error, match=f"no report could be written to {folder}: File too large"):
            reports.write("a part")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(list(folder.iterdir())) == 50
    folder.chmod(0o777)
    refused = "is not a directory that this user alone can write to"
    with pytest.raises(memsaver.Error, match=refused):
        reports.write("secret")
    folder.rename(tmp_path / "other")
    folder.symlink_to(tmp_path)
    with pytest.raises(memsaver.Error, match=refused):
        reports.write("secret")
