"""Answers of a group's ranks: errors, hangs, bounds and interrupts, with members of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray")

from ray.exceptions import ActorUnavailableError, RayActorError  # noqa: E402

import memsaver  # noqa: E402
from memsaver import config  # noqa: E402
from memsaver.ray import AsyncColocated, Colocated, Group  # noqa: E402
from memsaver.ray import ranks as ranks_module  # noqa: E402
from memsaver.ray.ranks import Caller, MemberRank  # noqa: E402
from memsaver.turns import plan as plan_module  # noqa: E402
from memsaver.turns.group import BaseGroup  # noqa: E402
from memsaver.turns.plan import Plan  # noqa: E402
from memsaver.turns.ranks import Call  # noqa: E402
from tests.group_support import Halved  # noqa: E402
from tests.support import run_clean, until  # noqa: E402

PHASES = {"on": {"engine": ["a"]}, "off": {}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "reports"))
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 0.0)
    monkeypatch.setattr(plan_module, "_ANSWER_S", 0.0)
    monkeypatch.setattr(ranks_module, "_LATE_S", 0.0)


@pytest.fixture
def members() -> Iterator[list[Any]]:
    made = [Halved(), Halved()]
    yield made
    for each in made:
        each.let_go()


@pytest.fixture
def group(members: list[Any]) -> Group:
    return Group(engine=members, phases=PHASES)


def fails(group: BaseGroup, name: str, text: str, **options: Any) -> Any:
    with pytest.raises(memsaver.Error, match=text) as raised:
        group.enter(name, **options)
    assert group.entered is None
    return raised.value


def enters(group: Group, name: str) -> bool:
    """The answer of a call may arrive after the end of the method."""
    try:
        return group.enter(name).phase == name
    except memsaver.Error as error:
        assert "has not answered a call of an earlier turn" in str(error)
        return False


def test_members_get_the_bounds_of_the_caller(group: Group, members: list[Any]) -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, (None, None, 60.0)),
        ({"timeout": 50.0, "memory_timeout": 5.0, "reader_timeout": 2.0}, (50.0, 5.0, 2.0)),
    ]
    for given, passed in cases:
        for name in ("on", "off"):
            group.enter(name, **given)
        timeout, memory_timeout, reader_timeout = passed
        pause = {"backup": None, "reader_timeout": reader_timeout}
        resume = {"restore": {"a": True}, "memory_timeout": memory_timeout}
        for each in members:
            for (method, _, options), expected in zip(each.calls, (pause, resume, pause, {})):
                found = options.pop("timeout", None)
                assert found is timeout or method == "commit" or 0 < found <= timeout
                assert options == expected
            each.seen()


def test_a_member_that_does_not_answer_ends_the_turn_at_its_bound(group: Group, members: list[Any]) -> None:
    members[1].hold("prepare")
    error = fails(group, "off", "engine 1 could not prepare .* has not answered .stage 'answer'", timeout=0.05)
    cause = error.__cause__
    assert (error.role, error.rank) == ("engine", 1)
    assert isinstance(cause, memsaver.WaitTimeoutError) and cause.stage == "answer"
    assert [each.seen() for each in members] == [["prepare", "abort"], ["prepare"]]
    members[1].let_go()  # and takes its preparation back
    until(lambda: members[1].calls)
    assert members[1].seen() == ["abort"]
    until(lambda: enters(group, "off"))
    assert [each.seen() for each in members] == [["prepare", "commit"]] * 2


def test_a_member_whose_task_was_cancelled_is_named(group: Group, members: list[Any]) -> None:
    """CancelledError is no Exception: in a coroutine that awaits the turn it would be a cancellation of its own."""
    members[1].errors["prepare"] = asyncio.CancelledError()
    fails(group, "off", "engine 1 could not prepare .*: Error: colocated_prepare.. was cancelled")
    assert [each.seen() for each in members] == [["prepare", "abort"]] * 2


@pytest.mark.parametrize("method, phase", [("commit", "off"), ("resume", "on")])
def test_a_member_that_hangs_after_the_commit_ends_the_turn_and_refuses_the_next_one(
    group: Group, members: list[Any], method: str, phase: str
) -> None:
    group.enter("on")
    members[1].hold(method)
    error = fails(group, phase, "engine 1 could not .*it has not answered .stage 'answer'", timeout=0.5)
    assert isinstance(error.__cause__, memsaver.WaitTimeoutError)
    for name in PHASES:
        error = fails(group, name, "engine 1")
        text = f"phase {name!r} could not be entered: engine 1 has not answered a call of an earlier turn"
        assert (str(error), error.phase, error.role, error.rank) == (text, name, "engine", 1)
    members[1].let_go()
    until(lambda: enters(group, phase))


def test_contents_of_a_late_resume_count_as_not_written(group: Group, members: list[Any]) -> None:
    """Another member can take the place of one that hangs."""
    group.enter("off")
    members[0].hold("resume")
    fails(group, "on", "engine 0 could not resume", timeout=0.5, restore=False)
    members[0].let_go()
    until(lambda: enters(group, "off"))
    fails(group, "on", "the phase that was to write them failed")
    members[0].hold("resume")
    fails(group, "on", "engine 0 could not resume", timeout=0.5, restore=False)
    with pytest.raises(ValueError, match="there is no 'engine' 3; there are 'engine 0', 'engine 1'"):
        group.replace("engine", 3, Halved())
    group.replace("engine", 0, Halved())
    assert group.enter("on", restore=False).phase == "on"


def test_contents_of_a_rank_that_seemed_to_die_count_as_not_written(members: list[Any]) -> None:
    """Perhaps only the answer of the rank was lost. An actor that restarts refuses its first call."""

    class Actor(MemberRank):
        starts = False

        def submit(self, call: Call) -> Future[Any]:
            if call.method != "__ray_ready__":
                return self._lane.submit(lambda: getattr(self.member, call.method)(*call.args, **call.options))
            self.starts = not self.starts
            if self.starts:
                raise ActorUnavailableError("it restarts", None)
            return self._lane.submit(lambda: None)

    rank = Actor("engine", 0, members[0])
    rank.is_actor = True
    group = BaseGroup(Plan(PHASES, ["engine"]), Caller([rank]))
    members[0].errors["resume"] = ActorUnavailableError("no answer", None)
    fails(group, "on", "engine 0 could not resume 'a': ActorUnavailableError: .*; unless Ray", restore=False)
    fails(group, "on", "the phase that was to write them failed")
    members[0].seen()
    members[0].errors["prepare"] = ActorUnavailableError("no answer", None)
    fails(group, "off", "engine 0 could not prepare to pause 'a': ActorUnavailableError")
    until(lambda: members[0].calls[-1][0] == "abort")
    members[0].errors["commit"] = RayActorError()
    fails(group, "off", "engine 0 could not pause 'a': RayActorError")
    with pytest.raises(OSError, match="not written"), group.enter("on", restore=False):
        raise OSError("not written")
    fails(group, "on", "the phase that was to write them failed")
    group.enter("on", restore=False)
    group.enter("on")


def test_members_pause_again_with_the_time_of_the_whole_turn(
    group: Group, members: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume that has used all of it leaves nothing to the pauses that take the others back."""
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 30.0)

    def resume(tags: list[str], timeout: float, **options: Any) -> None:
        threading.Event().wait(timeout)
        raise OSError("not now")

    group.enter("off")
    members[1].resume = resume
    members[0].seen()
    fails(group, "on", "engine 1 could not resume 'a': OSError: not now", timeout=0.5)
    (again,) = [options for method, _, options in members[0].calls if method == "pause"]
    assert again["timeout"] > 0


def test_late_tags_have_the_time_of_the_whole_turn(members: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The resume of other tags takes the whole timeout. The late tags have the whole timeout all the same."""
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 30.0)
    member, resume = members[0], members[0].resume

    def take_all(tags: list[str], timeout: float, **options: Any) -> Any:
        threading.Event().wait(timeout)
        return resume(tags, timeout=timeout, **options)

    member.resume = take_all
    group = Group(engine=member, phases={"on": {"engine": {"resident": ["a"], "late": ["b"]}}})
    group.enter("on", timeout=0.2)
    (later,) = [options for method, _, options in member.calls if method == "background"]
    assert later["timeout"] > 0


def test_a_prepared_pause_is_left_to_the_next_group_or_aborted(make: Callable[..., Any]) -> None:
    region = make("host")
    engine = Colocated()
    assert engine.colocated_prepare([region.tag]).moves
    assert region.state == "pausing"
    phases: dict[str, Any] = {"on": {"engine": [region.tag]}, "off": {}}
    Group(engine=engine, phases=phases).enter("on")
    assert region.state == "active"
    engine.colocated_abort()
    with pytest.raises(memsaver.Error, match="nothing is prepared here"):
        engine.colocated_commit()
    # Tags without regions are left out of a pause, and are an error of a resume before any region pauses.
    group = Group(engine=engine, phases={"other": {"engine": ["nobody"]}, **phases})
    group.enter("off")
    group.enter("on")
    fails(group, "other", "engine 0 could not prepare to pause .*no region 'nobody'")
    assert region.state == "active"


def test_an_actor_that_drains_while_its_turn_is_taken_back_stays_as_it_was(make: Callable[..., Any]) -> None:
    class Draining(AsyncColocated):
        def __init__(self) -> None:
            self.drains, self.let_go = asyncio.Event(), asyncio.Event()

        async def colocated_drain(self, tags: Any) -> None:
            self.drains.set()
            await self.let_go.wait()

    region = make()

    async def turn() -> None:
        actor = Draining()
        preparing = asyncio.create_task(actor.colocated_prepare([region.tag]))
        await actor.drains.wait()
        await actor.colocated_abort()
        actor.let_go.set()
        with pytest.raises(memsaver.Error, match="taken back while the actor drained"):
            await preparing
        assert region.state == "active"
        assert (await actor.colocated_prepare([region.tag])).moves
        assert region.state == "pausing"
        await actor.colocated_abort()

    asyncio.run(turn())
    assert region.state == "active"


def test_the_process_ends_while_a_member_hangs() -> None:
    out = run_clean("""
        import time, memsaver, memsaver.turns.members
        from memsaver.ray.ranks import Caller, MemberRank
        from memsaver.turns.group import BaseGroup
        from memsaver.turns.plan import Plan

        class Hanging(memsaver.turns.members.Colocated):
            def colocated_drain(self, tags):
                time.sleep(1e6)

        memsaver.region("a", device="cpu")

        plan = Plan({"on": {"engine": ["a"]}, "off": {}}, ["engine"])
        group = BaseGroup(plan, Caller([MemberRank("engine", 0, Hanging())]))
        try:
            group.enter("off", timeout=0.1)
        except memsaver.Error as error:
            print("has not answered" in str(error))
    """)
    assert out == "True\n"
