"""The last transitions of a process, with their stages."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import memsaver
from memsaver import _core, _results
from tests.support import MIB, Block, Make, Visitor, until


def names(record: memsaver.figures.TransitionRecord) -> list[str]:
    return [each.name for each in record.stages]


def test_transitions_are_in_the_history_with_their_stages_and_bytes(make: Make) -> None:
    region = make("host")
    block = Block(region, 3 * MIB)
    done = region.pause()
    back = region.resume()
    pause, resume = memsaver.history()[-2:]
    assert (pause.pause, pause.resume, pause.outcome, pause.error) == ((region.tag,), (), "done", None)
    assert (resume.pause, resume.resume, resume.outcome) == ((), (region.tag,), "done")
    assert names(pause) == ["queue", "readers", "launches", "device", "backup", "move"]
    assert names(resume) == ["queue", "readers", "launches", "memory", "move"]
    assert pause.stages[0].began_s >= 0 and all(each.seconds >= 0 for each in pause.stages)
    ends = [each.began_s + each.seconds for each in pause.stages]
    assert ends == pytest.approx([*(each.began_s for each in pause.stages[1:]), pause.seconds])
    assert (pause.released_bytes, pause.copied_bytes) == (done.released_bytes, done.copied_bytes) != (0, 0)
    assert (resume.restored_bytes, resume.copied_bytes) == (back.restored_bytes, back.copied_bytes) != (0, 0)
    assert pause.number + 1 == resume.number and pause.began <= resume.began
    assert pause.thread == threading.current_thread().name
    block.check()


def test_the_history_keeps_the_last_thousand(make: Make) -> None:
    region = make()
    region.pause()
    first = memsaver.history()[-1].number
    for _ in range(1000):
        region.pause()
    found = memsaver.history()
    assert [each.number for each in found] == list(range(first + 1, first + 1001))
    assert len(_results._recorders) == 1000


def test_the_transition_under_way_is_in_the_history_with_its_stage(make: Make) -> None:
    region = make("host")
    core = region._core
    assert _core.acquire([core]) is None  # as a guarded launch
    moving = memsaver.start(pause=region)
    until(lambda: names(memsaver.history()[-1])[-1:] == ["launches"])
    behind = memsaver.start(resume=region)
    until(lambda: names(memsaver.history()[-1]) == ["queue"])
    running = memsaver.history()[-2:]
    assert [each.outcome for each in running] == ["running", "running"]
    assert running[0].thread == "MainThread"  # that of the call
    _core.release([core])
    moving.result(60)
    behind.result(60)
    assert [each.outcome for each in memsaver.history()[-2:]] == ["done", "done"]


def test_a_look_at_the_history_while_a_transition_is_made_does_not_end_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, made = make(), _core.Transition

    def look(*arguments: Any) -> Any:
        assert not [each for each in memsaver.history() if region.tag in each.pause]
        return made(*arguments)

    monkeypatch.setattr(_core, "Transition", look)
    region.pause()
    [record] = [each for each in memsaver.history() if region.tag in each.pause]
    assert record.outcome == "done"


def test_stages_of_guests_have_their_names(tag: str) -> None:
    leaves, let_go = threading.Event(), threading.Event()

    def act(call: str) -> None:
        if call == "leave":
            leaves.set()
            assert let_go.wait(60)
        elif call == "come back":
            raise OSError("no network")

    memsaver.register(Visitor("slow", tag, act))
    moving = memsaver.start(pause=tag)
    assert leaves.wait(60)
    last = memsaver.history()[-1].stages[-1]
    assert (last.name, last.guest) == ("guests leave", "slow")
    let_go.set()
    moving.result(60)
    with pytest.raises(memsaver.GuestError):
        memsaver.resume(tag)
    record = memsaver.history()[-1]
    assert (record.outcome, record.resume) == ("failed", (tag,))
    assert record.error == "GuestError: guest 'slow' could not come back: OSError: no network"
    assert names(record)[-2:] == ["guests", "guests come back"]
