"""Ranks that do not answer in the second half of a turn, with members of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver import config  # noqa: E402
from memsaver.ray import Group, Ready  # noqa: E402
from memsaver.turns import plan as plan_module  # noqa: E402
from tests.support import run_clean, until  # noqa: E402

PHASES = {"on": {"engine": ["a"]}, "off": {}}


class Member:
    """``held``: by method, what each call waits for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: dict[str, threading.Event] = {}

    def _note(self, call: str) -> None:
        if call in self.held:
            assert self.held[call].wait(60)
        self.calls.append(call)

    def pause(self, tags: list[str], **_: Any) -> None:
        self._note("pause")

    def resume(self, tags: list[str], **_: Any) -> None:
        self._note("resume")

    def colocated_prepare(self, tags: list[str], coming: list[str], **_: Any) -> Ready:
        return Ready(halves=True, moves=True, pooled=False)

    def colocated_commit(self) -> None:
        self._note("commit")

    def colocated_abort(self) -> None:
        self._note("abort")


@pytest.fixture(autouse=True)
def report_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "reports"))


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made = [Member(), Member()]
    yield made
    for each in made:
        for event in each.held.values():
            event.set()


@pytest.fixture
def group(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 0.0)
    return Group(engine=members, phases=PHASES)


@pytest.mark.parametrize("call, phase", [("commit", "off"), ("resume", "on")])
def test_a_member_that_hangs_after_the_commit_ends_the_turn_and_refuses_the_next_one(
    group: Group, members: list[Member], call: str, phase: str
) -> None:
    group.enter("on")
    members[1].held[call] = threading.Event()
    with pytest.raises(memsaver.Error, match="engine 1 could not .*it has not answered .stage 'answer'") as raised:
        group.enter(phase, timeout=2.0)
    assert isinstance(raised.value.__cause__, memsaver.WaitTimeoutError)
    assert group.entered is None
    for name in PHASES:
        with pytest.raises(memsaver.Error) as raised:
            group.enter(name)
        text = f"phase {name!r} could not be entered: engine 1 has not answered a call of an earlier turn"
        error: Any = raised.value
        assert (str(error), error.phase, error.role, error.rank) == (text, name, "engine", 1)
    members[1].held[call].set()
    until(lambda: call in members[1].calls[-1:])
    until(lambda: _enters(group, phase))


def _enters(group: Group, name: str) -> bool:
    """The answer may arrive after the end of the method."""
    try:
        return group.enter(name).phase == name
    except memsaver.Error as error:
        assert "has not answered a call of an earlier turn" in str(error)
        return False


def test_contents_of_a_late_resume_count_as_not_written(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 0.0)
    group = Group(engine=members[0], phases=PHASES)
    group.enter("off")
    members[0].held["resume"] = threading.Event()
    with pytest.raises(memsaver.Error, match="engine 0 could not resume"):
        group.enter("on", timeout=2.0, restore=False)
    members[0].held.pop("resume").set()
    until(lambda: _enters(group, "off"))
    with pytest.raises(memsaver.Error, match="the phase that was to write them failed"):
        group.enter("on")
    group.enter("on", restore=False)


def test_members_pause_again_with_the_time_of_the_whole_turn(members: list[Member]) -> None:
    """A resume that has used all of it leaves nothing to the pauses that take the others back."""
    given: list[float] = []

    def resume(tags: list[str], timeout: float) -> None:
        threading.Event().wait(timeout)
        raise OSError("not now")

    def pause(tags: list[str], timeout: float) -> None:
        given.append(timeout)

    group = Group(engine=members, phases=PHASES)
    group.enter("off")
    members[0].pause, members[1].resume = pause, resume  # type: ignore[method-assign, assignment]
    with pytest.raises(memsaver.Error, match="engine 1 could not resume 'a': OSError: not now"):
        group.enter("on", timeout=1.0)
    assert len(given) == 1 and given[0] > 0


def test_another_member_takes_the_place_of_one_that_hangs() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_COMPLETE_S", 0.0)
        hanging = Member()
        group = Group(engine=hanging, phases=PHASES)
        hanging.held["resume"] = threading.Event()
        with pytest.raises(memsaver.Error, match="engine 0 could not resume"):
            group.enter("on", timeout=1.0)
        group.replace("engine", 0, Member())
        assert group.enter("on").phase == "on"
        hanging.held["resume"].set()


def test_the_process_ends_while_a_member_hangs() -> None:
    out = run_clean("""
        import time, memsaver
        from memsaver.turns.plan import Plan
        from memsaver.turns.ranks import LocalRank
        from memsaver.turns.turn import Turns

        class Hanging:
            def pause(self, tags, **options):
                time.sleep(1e6)

            def resume(self, tags, **options):
                pass

        plan = Plan({"on": {"engine": ["a"]}, "off": {}}, ["engine"])
        turns = Turns(plan, [LocalRank("engine", 0, Hanging())])
        try:
            turns.enter("off", plan.options("off", timeout=0.1))
        except memsaver.Error as error:
            print("has not answered" in str(error))
    """)
    assert out == "True\n"
