"""The progress of calls: copied bytes while they are copied, and the bar or the lines of the log over them."""

from __future__ import annotations

import io
import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import memsaver
from memsaver import _core, _results
from tests import controls
from tests.support import MIB, Block, Make, check, sparse_blocks, until

BATCH, ALL = 64 * MIB, 130 * MIB  # of copies, and of a region: three batches


class Terminal(io.StringIO):
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the place of sys.stderr, which pytest sets at the begin of the test."""
    made = Terminal()
    monkeypatch.setattr(_results, "sys", SimpleNamespace(stderr=made))
    return made


def under_way() -> Any:
    """The transition of the core that began last."""
    return _results._recorders[-1].core


def is_shown() -> bool:
    return any(each.name == "memsaver progress" for each in threading.enumerate())


# The bytes of the core


def test_copied_bytes_advance_with_each_batch_in_both_directions(make: Make) -> None:
    region = make("host")
    block = Block(region, ALL)
    controls.virtual_clock(True)  # copies are late until somebody waits for them
    controls.copies_delay(1.0)
    moves: list[dict[str, Any]] = [{"pause": region}, {"resume": region}]
    for move in moves:
        controls.hold("cuEventSynchronize")
        moving = memsaver.start(**move)
        until(lambda: controls.stopped("cuEventSynchronize"))
        core = under_way()
        assert core.progress == (0, ALL)
        for copied in (BATCH, 2 * BATCH):
            controls.hold("cuEventSynchronize", after=1)
            until(lambda: core.progress == (copied, ALL))  # noqa: B023
        controls.go_on("cuEventSynchronize")
        assert moving.result(60).copied_bytes == ALL
        assert core.progress == (ALL, ALL)
    block.check()


@pytest.mark.parametrize("lazy", [False, True], ids=["whole", "in pieces"])
def test_copies_count_while_later_memory_is_mapped(make: Make, lazy: bool) -> None:
    region = make("host")
    block = Block(region, ALL)
    region.pause(lazy=lazy)
    region.pause(lazy=False)  # chunks that are offered are copied, in pieces
    controls.hold("cuMemSetAccess", after=1)
    moving = memsaver.start(resume=region)
    until(lambda: controls.stopped("cuMemSetAccess"))  # that of the second batch
    _core.open_driver("cpu").synchronize()
    controls.hold("cuMemMap")  # of the third batch
    controls.go_on("cuMemSetAccess")
    until(lambda: controls.stopped("cuMemMap"))
    copied, planned = under_way().progress
    assert BATCH <= copied <= 2 * BATCH and planned == ALL
    controls.go_on("cuMemMap")
    moving.result(60)
    block.check()


def test_a_second_attempt_of_a_resume_counts_from_the_beginning(make: Make) -> None:
    region = make("host")
    block = Block(region, ALL)
    region.pause()
    controls.fail("cuMemCreate", 2, controls.FOREVER, after=4)  # two batches are mapped
    controls.hold("cuMemSetAccess", after=1)
    controls.hold("cuMemUnmap")
    moving = memsaver.start(resume=region)
    until(lambda: controls.stopped("cuMemSetAccess"))
    _core.open_driver("cpu").synchronize()  # the first batch counts behind the second one
    controls.go_on("cuMemSetAccess")
    until(lambda: controls.stopped("cuMemUnmap"))
    core = under_way()
    assert core.progress == (0, 0)
    controls.fail("cuMemCreate", 2, 0)
    controls.go_on("cuMemUnmap")
    moving.result(60)
    assert core.progress == (ALL, ALL)
    block.check()


# Their display


def test_a_bar_shows_the_copied_bytes_and_the_stage(
    make: Make, stderr: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_results, "_DRAW_S", 0.001)
    region = make("host")
    held = sparse_blocks(region, 4)
    threads = threading.active_count()

    def watch() -> None:
        until(lambda: controls.stopped("cuEventSynchronize"))
        until(lambda: "50%" in stderr.getvalue())
        controls.go_on("cuEventSynchronize")

    controls.hold("cuEventSynchronize", after=1)
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert region.pause(progress=True).copied_bytes == 4 * MIB
    watcher.join()
    text = stderr.getvalue()
    assert f"pause {region.tag}:  50%" in text and "| 2.00M/4.00M [" in text and ", move]" in text
    assert region.resume(progress=True).copied_bytes == 4 * MIB
    text = stderr.getvalue()
    assert f"resume {region.tag}: 100%" in text.splitlines()[-1] and text.endswith("\n")
    assert threading.active_count() == threads
    check(held)


def test_a_log_line_takes_the_place_of_a_bar_without_a_terminal(
    make: Make, stderr: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stderr.is_terminal = False
    monkeypatch.setitem(sys.modules, "tqdm", None)  # it is not needed
    region = make("host")
    held = sparse_blocks(region, 4)
    caplog.set_level(logging.INFO, "memsaver")
    monkeypatch.setattr(_results, "_LOG_S", 3600.0)  # the calls are shorter
    region.pause(lazy=True, progress=True)
    region.resume(progress=True)
    assert caplog.messages == []
    monkeypatch.setattr(_results, "_LOG_S", 0.001)
    controls.hold("cuEventSynchronize", after=1)
    line = f"pause {region.tag}: 2.0 MiB of 4.0 MiB copied, in stage 'move'"
    moving = memsaver.start(pause=region, progress=True)
    until(lambda: line in caplog.messages)
    controls.go_on("cuEventSynchronize")
    moving.result(60)
    assert not is_shown()
    assert stderr.getvalue() == ""
    region.resume()
    check(held)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_interrupt_while_the_display_begins_ends_it(
    make: Make, stderr: Terminal, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """A terminal without tqdm is an error. Both come before anything moves."""
    region = make("host")
    stderr.is_terminal = is_terminal
    if is_terminal:
        before = memsaver.history()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "tqdm", None)
            with pytest.raises(ModuleNotFoundError, match=r"from pip install 'memsaver\[progress\]'") as missing:
                region.pause(progress=True)
        assert missing.value.name == "tqdm" and memsaver.history() == before
    monkeypatch.setattr(_results, "_LOG_S", 0.001)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        region.pause(progress=True)
    assert region.state == "active"
    until(lambda: not is_shown(), within_s=20)
    del caught  # until here it keeps the transition
