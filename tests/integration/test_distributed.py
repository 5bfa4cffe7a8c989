"""Groups over torch.distributed's store: the ranks are threads with members that record their calls."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as distributed

import memsaver
from memsaver import config
from memsaver.distributed import AsyncColocated, Colocated, Group, LostRankError, Ready, Turn, liveness
from memsaver.distributed import reports as distributed_reports
from memsaver.distributed.link import Link
from memsaver.distributed.liveness import Watch
from memsaver.distributed.messages import dumps, loads
from memsaver.transitions import Transition
from memsaver.turns import plan as plan_module
from tests.support import run_clean, until

PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}, "sync": {"engine": ["weights"]}}
WAIT_S = 30


class Member:
    """Records its calls. ``errors``: by method, what the next call raises. ``gate``: a prepare waits for it.

    ``held``: by method, what the next call waits for.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.held: dict[str, threading.Event] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[str] = set()
        self.discarded: tuple[str, ...] = ()

    def _note(self, name: str, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)
        if name in self.held:
            self.held.pop(name).wait(WAIT_S)
        if name in self.errors:
            raise self.errors.pop(name)

    def pause(self, tags: list[str], **options: Any) -> None:
        self._note("pause", f"pause {','.join(tags)}")

    def resume(self, tags: list[str], **options: Any) -> Transition:
        self._note("resume", f"resume {','.join(tags)}")
        return Transition(resumed=tuple(tags))

    def colocated_prepare(self, tags: list[str], coming: list[str], **options: Any) -> Ready:
        self.calls.append(f"prepare {','.join(tags)}")
        self.gate.wait(WAIT_S)
        self._note("prepare", "prepared")
        return Ready(halves=True, moves=True, pooled=False, discarded=self.discarded)

    def colocated_commit(self) -> Transition:
        self._note("commit", "commit")
        return Transition(paused=("paused",))

    def colocated_abort(self) -> None:
        self._note("abort", "abort")

    def colocated_failed(self, role: str, rank: int, error: Exception) -> None:
        self._note("failed", f"failed {role} {rank}: {type(error).__name__}")

    def seen(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class World:
    """Ranks as threads, two engines and a trainer, over one store. ``roles``: by rank, the numbers of its members."""

    def __init__(
        self,
        store: distributed.Store,
        roles: Sequence[Mapping[str, int]] = ({"engine": 0}, {"engine": 1}, {"trainer": 2}),
        phases: Mapping[str, Mapping[str, Sequence[str]]] = PHASES,
        **options: Any,
    ) -> None:
        self.members = [Member(), Member(), Member()]
        found = [{role: self.members[number] for role, number in each.items()} for each in roles]
        self.groups = [
            Group(phases=phases, store=store, rank=rank, world_size=len(roles), **{**role, **options})
            for rank, role in enumerate(found)
        ]
        self._turns = [threading.Lock() for _ in roles]  # a rank makes one call at a time

    def call(self, rank: int, name: str, **options: Any) -> Future[Turn]:
        return self.run(rank, lambda: self.groups[rank].enter(name, **options))

    def run(self, rank: int, function: Callable[[], Any]) -> Future[Any]:
        def called() -> None:
            with self._turns[rank]:
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        future: Future[Any] = Future()
        # A turn that hangs fails its test, and does not keep the process from its end.
        threading.Thread(target=called, name=f"caller {rank}", daemon=True).start()
        return future

    def enter(self, name: str, **options: Any) -> list[Turn]:
        return [call.result(WAIT_S) for call in [self.call(rank, name, **options) for rank in range(len(self.groups))]]

    def fails(self, name: str, **options: Any) -> list[Any]:
        return [
            each.exception(WAIT_S) for each in [self.call(rank, name, **options) for rank in range(len(self.groups))]
        ]

    def seen(self) -> list[list[str]]:
        return [member.seen() for member in self.members]

    def close(self) -> None:
        for member in self.members:
            member.gate.set()
        for group in self.groups:
            group.close()


@pytest.fixture(autouse=True)
def report_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "reports"))
    monkeypatch.setattr(distributed_reports, "_PARTS_S", WAIT_S / 2)  # all processes run, so their parts come
    return tmp_path / "reports"


@pytest.fixture(params=["tcp", "hash", "file"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> distributed.Store:
    if request.param == "tcp":
        return tcp_store()
    return distributed.HashStore() if request.param == "hash" else distributed.FileStore(str(tmp_path / "store"), -1)


def tcp_store() -> distributed.Store:
    timeout = timedelta(seconds=WAIT_S)
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)


@pytest.fixture
def store() -> distributed.Store:
    return tcp_store()


Worlds = Callable[..., World]


@pytest.fixture
def world() -> Iterator[Worlds]:
    made: list[World] = []

    def make(store: distributed.Store, *args: Any, **options: Any) -> World:
        made.append(World(store, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_all_ranks_enter_a_phase_and_get_the_same_turn(any_store: distributed.Store, world: Worlds) -> None:
    job = world(any_store)
    turns = job.enter("train")
    assert turns[0] == turns[1] == turns[2]
    assert turns[0].paused == {"engine": [Transition(paused=("paused",))] * 2}
    assert turns[0].resumed == {"trainer": [Transition(resumed=("params",))]}
    assert turns[0].seconds >= turns[0].pause_seconds > 0
    assert [group.entered for group in job.groups] == ["train"] * 3
    pausing = ["prepare weights", "prepared", "commit"]
    assert job.seen() == [pausing, pausing, ["prepare ", "prepared", "resume params"]]
    # The current device and the like belong to the thread that called enter().
    assert [member.threads for member in job.members] == [{f"caller {rank}"} for rank in range(3)]


def test_a_rank_that_cannot_prepare_leaves_all_as_they_were(store: distributed.Store, world: Worlds) -> None:
    job = world(store)
    job.members[1].errors["prepare"] = memsaver.BackupError(
        "no room", needed_bytes=3, held_bytes=2, available_bytes=1, regions=("weights",)
    )
    for error in job.fails("train"):
        assert str(error) == (
            "phase 'train' could not be entered: engine 1 (rank 1) could not prepare to pause 'weights': BackupError: "
            "no room"
        )
        assert (error.phase, error.role, error.rank) == ("train", "engine", 1)
        assert isinstance(error.__cause__, memsaver.BackupError)
        assert (error.__cause__.needed_bytes, error.__cause__.regions) == (3, ("weights",))
    assert [group.entered for group in job.groups] == [None] * 3
    calls = job.seen()
    assert calls[0] == ["prepare weights", "prepared", "abort", "failed engine 1: BackupError"]
    assert calls[1] == ["prepare weights", "prepared", "abort"]
    assert calls[2] == ["prepare ", "prepared", "failed engine 1: BackupError"]
    job.enter("train")  # the next turn succeeds


def test_a_rank_that_fails_in_the_second_half_is_named_everywhere(store: distributed.Store, world: Worlds) -> None:
    job = world(store)
    job.members[2].errors["resume"] = OSError("not now")
    for error in job.fails("train"):
        assert "trainer 0 (rank 2) could not resume 'params': OSError: not now" in str(error)
        assert isinstance(error.__cause__, OSError)
    assert [calls[2] for calls in job.seen()[:2]] == ["commit", "commit"]
    assert job.enter("train")[1].phase == "train"


def test_an_interrupted_rank_is_named_and_the_others_abort(store: distributed.Store, world: Worlds) -> None:
    job = world(store)
    job.members[1].errors["prepare"] = KeyboardInterrupt()
    errors = job.fails("train")
    assert isinstance(errors[1], KeyboardInterrupt)
    for error in (errors[0], errors[2]):
        assert "engine 1 (rank 1) could not prepare to pause 'weights': Error: KeyboardInterrupt" in str(error)
    assert job.seen()[0][-2:] == ["abort", "failed engine 1: Error"]
    job.enter("train")


def test_an_interrupt_while_preparations_are_taken_back_leaves_none_and_is_told_to_the_others(
    store: distributed.Store, world: Worlds
) -> None:
    """As of a user who presses Ctrl-C twice."""
    phases = {"on": {"engine": ["a"], "trainer": ["b"], "judge": ["c"]}, "off": {}}
    job = world(store, [{"engine": 0, "trainer": 1, "judge": 2}, {}], phases)
    job.enter("on")
    job.seen()
    job.members[2].errors["prepare"] = KeyboardInterrupt()
    job.members[1].errors["abort"] = KeyboardInterrupt()  # the first to be taken back
    errors = job.fails("off")
    assert isinstance(errors[0], KeyboardInterrupt)
    assert "judge 0 (rank 0) could not prepare to pause 'c': Error: KeyboardInterrupt" in str(errors[1])
    assert [calls[-1] for calls in job.seen()] == ["abort", "abort", "prepared"]
    job.enter("off")


def test_a_turn_that_rank_0_has_left_bounds_its_next_one(store: distributed.Store, world: Worlds) -> None:
    job = world(store)
    job.members[1].gate.clear()
    job.members[0].errors["prepare"] = KeyboardInterrupt()
    calls = [job.call(rank, "train") for rank in range(3)]
    assert isinstance(calls[0].exception(WAIT_S), KeyboardInterrupt)
    error: Any = job.call(0, "train", timeout=0.05).exception(WAIT_S)
    assert "the last turn has not ended, since rank 1 has not answered" in str(error)
    assert (error.phase, error.role, error.rank) == ("train", None, 1)
    job.members[1].gate.set()
    for rank in (1, 2):
        assert isinstance(calls[rank].exception(WAIT_S), memsaver.Error)
    others = [job.call(rank, "train") for rank in (1, 2)]  # without a bound, in the turn that rank 0 has refused
    turn = job.call(0, "train")
    for each in others:
        assert "the last turn has not ended, since rank 1 has not answered" in str(each.exception(WAIT_S))
    again = [job.call(rank, "train") for rank in (1, 2)]
    assert [each.result(WAIT_S).phase for each in (turn, *again)] == ["train"] * 3


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_makes_its_group_is_named(store: distributed.Store, missing: int) -> None:
    groups = {
        rank: Group(
            phases=PHASES, store=store, rank=rank, world_size=3, start_timeout=0.2, engine=Member(), trainer=Member()
        )
        for rank in range(3)
        if rank != missing
    }
    with ThreadPoolExecutor(2) as threads:
        calls = {rank: threads.submit(group.enter, "train") for rank, group in groups.items()}
        for call in calls.values():
            error: Any = call.exception(WAIT_S)
            assert f"rank {missing} has not made its group within start_timeout, 0.2 s" in str(error)
            assert (error.phase, error.role, error.rank) == ("train", None, missing)
            assert isinstance(error.__cause__, LostRankError) and error.__cause__.process == missing
    with ThreadPoolExecutor(3) as threads:  # it was late: its first call is its part of the turn that failed
        late = Group(phases=PHASES, store=store, rank=missing, world_size=3, engine=Member(), trainer=Member())
        groups[missing] = late
        assert isinstance(threads.submit(late.enter, "train", timeout=0.2).exception(WAIT_S), memsaver.Error)
        for call in [threads.submit(group.enter, "train") for group in groups.values()]:
            assert call.result(WAIT_S).phase == "train"
    for group in groups.values():
        group.close()


def test_ranks_that_enter_different_phases_are_both_named(store: distributed.Store, world: Worlds) -> None:
    job = world(store)
    calls = [job.call(0, "train"), job.call(1, "train"), job.call(2, "rollout")]
    for call in calls:
        error: Any = call.exception(WAIT_S)
        assert "rank 0 enters 'train', rank 2 enters 'rollout'; expected the same on all ranks" in str(error)
        assert (error.role, error.rank) == (None, 2)
    calls = [job.call(0, "train"), job.call(1, "train", timeout=30), job.call(2, "train")]
    for call in calls:
        assert "rank 0 enters 'train' with {" in str(call.exception(WAIT_S))
    assert job.seen() == [[], [], []]
    job.enter("train")


def test_groups_with_different_phases_are_refused(store: distributed.Store) -> None:
    other = {**PHASES, "none": {}}
    groups = [
        Group(phases=phases, store=store, rank=rank, world_size=2, engine=Member(), trainer=Member())
        for rank, phases in enumerate((PHASES, other))
    ]
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(group.enter, "train") for group in groups]
        for call in calls:
            assert "rank 1 made its group with" in str(call.exception(WAIT_S))
    for group in groups:
        group.close()


def test_a_role_without_a_member_is_named(store: distributed.Store) -> None:
    group = Group(phases=PHASES, store=store, rank=0, world_size=1, engine=Member())
    with pytest.raises(memsaver.Error, match="role 'trainer', which a phase names; there are 'engine'"):
        group.enter("train")
    group.close()


def test_a_rank_that_hangs_past_the_deadline_is_named_and_joins_again(store: distributed.Store, world: Worlds) -> None:
    job = world(store)
    job.members[1].gate.clear()
    calls = [job.call(rank, "train", timeout=0.2) for rank in range(3)]
    for rank in (0, 2):
        error: Any = calls[rank].exception(WAIT_S)
        assert (error.role, error.rank) == ("engine", 1)
        assert "engine 1 (rank 1) could not prepare to pause 'weights': WaitTimeoutError" in str(error)
        assert error.__cause__.stage == "answer"
    assert not calls[1].done()
    again = [job.call(rank, "train") for rank in (0, 2)]  # they wait for the rank that hangs
    job.members[1].gate.set()
    assert isinstance(calls[1].exception(WAIT_S), memsaver.Error)
    assert job.members[1].calls == ["prepare weights", "prepared", "abort"]
    assert job.call(1, "train").result(WAIT_S).phase == "train"
    assert [each.result(WAIT_S).phase for each in again] == ["train", "train"]


@pytest.mark.parametrize("step", ["commit", "resume"])
def test_a_rank_that_hangs_in_the_second_half_is_named_until_it_has_answered(
    store: distributed.Store, world: Worlds, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 0.0)
    job = world(store)
    job.enter("train")
    victim, verb, tag = (2, "pause", "params") if step == "commit" else (1, "resume", "weights")
    job.members[victim].held[step] = held = threading.Event()
    calls = [job.call(rank, "rollout", timeout=3.0, restore=False) for rank in range(3)]
    others = [rank for rank in range(3) if rank != victim]
    for rank in others:
        error: Any = calls[rank].exception(WAIT_S)
        assert f"(rank {victim}) could not {verb} '{tag}': WaitTimeoutError: it has not answered" in str(error)
    again = [job.call(rank, "rollout", timeout=1.0, restore=False) for rank in others]
    for call in again:
        error = call.exception(WAIT_S)
        method = "colocated_commit" if step == "commit" else "resume"
        text = f"rank {victim} did not answer: it has not answered {method}() of an earlier turn (stage 'answer', after"
        assert text in str(error)
        assert error.rank == victim
    held.set()
    assert isinstance(calls[victim].exception(WAIT_S), memsaver.Error)
    assert isinstance(job.call(victim, "rollout", timeout=1.0, restore=False).exception(WAIT_S), memsaver.Error)
    if step == "resume":  # its contents are undefined: the body that was to write them never ran
        for error in job.fails("rollout"):
            assert "the phase that was to write them failed" in str(error)
    assert job.enter("rollout", restore=False)[0].phase == "rollout"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_does_not_call_enter_is_named(
    store: distributed.Store, world: Worlds, report_dir: Path, late: int
) -> None:
    job = world(store)
    present = [rank for rank in range(3) if rank != late]
    calls = [job.call(rank, "train", timeout=0.2) for rank in present]
    for call in calls:
        error: Any = call.exception(WAIT_S)
        assert (error.role, error.rank) == (None, late)
        assert f"rank {late}" in str(error) and "has not called enter()" in str(error)
        assert isinstance(error.__cause__, memsaver.WaitTimeoutError)
        if late:  # without rank 0 nobody collects the parts
            assert f"; rank {late} is outside of enter() since" in str(error)
            assert str(error).endswith(f"; report: {error.report}")
            assert Path(error.report).parent == report_dir
    assert isinstance(job.call(late, "train", timeout=0.2).exception(WAIT_S), memsaver.Error)  # its part of this turn
    assert job.seen() == [[], [], []]
    job.enter("train")


def test_200_turns_do_not_grow_the_store(store: distributed.Store, world: Worlds) -> None:
    job = world(store)
    phases = ["train", "rollout"]
    job.enter("train")

    def content() -> tuple[int, int]:
        keys = store.list_keys()  # type: ignore[attr-defined]
        return len(keys), sum(len(store.get(key)) for key in keys)

    job.enter("rollout")
    count, nbytes = content()
    for turn in range(200):
        if turn % 10 == 0:  # failures as well
            job.members[turn // 10 % 3].errors["prepare"] = OSError("not now")
            assert all(isinstance(error, memsaver.Error) for error in job.fails(phases[turn % 2]))
        job.enter(phases[turn % 2])
    now = content()
    assert now[0] == count
    assert now[1] < 2 * nbytes  # numbers have more digits, and times too


def test_contents_that_a_failed_body_has_not_written_are_refused_on_all_ranks(
    store: distributed.Store, world: Worlds
) -> None:
    job = world(store)
    job.enter("train")

    def overwrite(rank: int) -> None:
        with job.groups[rank].enter("sync", restore={"engine": False}) as turn:
            assert turn.unrestored == {"engine": ["weights"]}
            if rank == 2:
                raise OSError("not written")

    bodies = [job.run(rank, partial(overwrite, rank)) for rank in range(3)]
    assert [type(body.exception(WAIT_S)) for body in bodies] == [type(None), type(None), OSError]
    for error in job.fails("rollout"):
        assert "the phase that was to write them failed" in str(error)
        assert isinstance(error.__cause__, memsaver.BackupError)
    job.enter("sync", restore=False)
    job.enter("rollout")


def test_a_failed_body_is_not_forgotten_by_a_turn_that_began_without_its_rank(
    store: distributed.Store, world: Worlds
) -> None:
    job = world(store)
    job.enter("train")

    def overwrite(rank: int) -> None:
        with job.groups[rank].enter("sync", restore={"engine": False}):
            if rank == 2:
                raise OSError("not written")

    bodies = [job.run(rank, partial(overwrite, rank)) for rank in range(3)]
    assert [type(body.exception(WAIT_S)) for body in bodies] == [type(None), type(None), OSError]
    for call in [job.call(rank, "rollout", timeout=0.2) for rank in (0, 1)]:
        assert "has not called enter()" in str(call.exception(WAIT_S))
    assert isinstance(job.call(2, "rollout", timeout=0.2).exception(WAIT_S), memsaver.Error)  # its part of this turn
    for error in job.fails("rollout"):
        assert "the phase that was to write them failed" in str(error)
    job.enter("sync", restore=False)
    job.enter("rollout")


def test_a_rank_of_another_host_is_lost_when_its_heartbeats_end(
    store: distributed.Store, world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_host", lambda: str(random.random()))
    monkeypatch.setattr(liveness, "_BEAT_S", 0.05)
    monkeypatch.setattr(liveness, "_LOOK_S", 0.05)
    job = world(store, heartbeat_timeout=2.0)
    job.enter("train")
    job.members[1].gate.clear()
    calls = [job.call(rank, "rollout") for rank in range(3)]
    until(lambda: bool(job.members[1].calls[3:]))
    job.groups[1].close()  # ends its heartbeats
    for rank in (0, 2):
        error: Any = calls[rank].exception(WAIT_S)
        assert "rank 1 has sent no heartbeat for" in str(error)
        assert isinstance(error.__cause__, LostRankError) and error.__cause__.process == 1
    # It was alive: its preparation is taken back when it reads the end of the turn.
    job.members[1].gate.set()
    assert isinstance(calls[1].exception(WAIT_S), memsaver.Error)


def test_silence_between_turns_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase may hold the GIL for long, and then its rank sends nothing."""
    now = 1000.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    link = Link(distributed.HashStore(), "group", direct=True)
    link.set("beat/1", "1")
    watch, elsewhere = Watch(link, 8.0, 600.0), {**liveness.identity(), "host": "another"}
    watch.check(1, elsewhere)
    now += 9.0
    watch.forget_silence()
    watch.check(1, elsewhere)
    now += 9.0
    with pytest.raises(LostRankError, match="rank 1 has sent no heartbeat for 9.0 s"):
        watch.check(1, elsewhere)


def test_another_process_with_the_pid_of_a_rank_is_not_the_rank(store: distributed.Store) -> None:
    watch, own = Watch(Link(store, "group"), 8.0, 600.0), liveness.identity()
    watch.check(1, own)
    with pytest.raises(LostRankError, match=f"rank 2 has ended .pid {os.getpid()}."):
        watch.check(2, {**own, "start": own["start"] - 1})


@pytest.mark.parametrize("decided", [False, True])
def test_a_rank_whose_leader_is_lost_follows_the_decision(
    store: distributed.Store, world: Worlds, monkeypatch: pytest.MonkeyPatch, decided: bool
) -> None:
    monkeypatch.setattr(liveness, "_LOOK_S", 0.05)
    job = world(store)
    job.enter("rollout")
    job.seen()
    leader: Any = job.groups[0]._leader
    stuck = threading.Event()

    def decide(number: int) -> None:
        if decided:
            original(number)
        stuck.wait(WAIT_S)
        original(number)

    original = leader._decide
    monkeypatch.setattr(leader, "_decide", decide)
    calls = [job.call(rank, "train") for rank in range(3)]
    for member in job.members:
        until(lambda member=member: "prepared" in member.calls)  # type: ignore[misc]
    time.sleep(0.1)  # the leader reads the last answer, and is stuck in its decision
    part: Any = job.groups[1]._part

    def lost(process: int, hello: Any) -> None:
        raise LostRankError(f"rank {process} has ended (pid 0)", process=process)

    monkeypatch.setattr(part._watch, "check", lost)
    error: Any = calls[1].exception(WAIT_S)
    assert "rank 0 has ended" in str(error) and error.rank == 0
    assert isinstance(error.__cause__, LostRankError)
    assert job.members[1].calls[-1] == ("commit" if decided else "abort")
    with pytest.raises(memsaver.Error, match="can enter no phase any more: rank 0 has ended"):
        job.groups[1].enter("train")
    stuck.set()
    for rank in (0, 2):  # the leader lives: it learns of the decision, or that the rank has left
        assert isinstance(calls[rank].exception(WAIT_S), memsaver.Error)
    if decided:
        assert job.members[0].calls[2] == "commit"


def test_wrong_arguments_raise_before_anything_is_sent(store: distributed.Store) -> None:
    given: dict[str, Any] = {"phases": PHASES, "store": store, "rank": 0, "world_size": 1}
    roles: dict[str, Any] = {"engine": Member(), "trainer": Member()}
    for wrong, kind, text in (
        ({"phases": {}}, ValueError, "phases is empty"),
        ({"phases": 3}, TypeError, "phases is 3, expected a dict"),
        ({"store": 3}, TypeError, "store is 3, expected a torch.distributed.Store"),
        ({"store": None}, ValueError, "store is None, expected one, or a call of .*init_process_group"),
        ({"rank": None}, TypeError, "rank is None, expected a number"),
        ({"rank": 1}, ValueError, "rank is 1, expected one of 0 to 0, since world_size is 1"),
        ({"heartbeat_timeout": -1}, ValueError, "heartbeat_timeout is -1"),
        ({"start_timeout": -1}, ValueError, "start_timeout is -1"),
        ({"backup": {"nowhere": "none"}}, ValueError, "backup names the phase 'nowhere'"),
        ({"engine": 3}, TypeError, "3 of the role 'engine' has no pause"),
        ({"engine": Member}, TypeError, "is a class, expected an instance"),
    ):
        with pytest.raises(kind, match=text):
            Group(**{**given, **roles, **wrong})
    assert store.num_keys() == 0
    group = Group(**given, **roles)
    count = store.num_keys()
    with pytest.raises(ValueError, match="there is no phase 'nowhere'; there are 'rollout', 'train', 'sync'"):
        group.enter("nowhere")
    with pytest.raises(ValueError, match="backup is 'some', expected one of"):
        group.enter("train", backup="some")
    assert store.num_keys() <= count + 1  # the first heartbeat may come now
    group.close()
    with pytest.raises(memsaver.Error, match="this group is closed"):
        group.enter("train")


def test_several_members_of_one_process_and_coroutines(store: distributed.Store, make: Any) -> None:
    class Engine(AsyncColocated):
        async def colocated_drain(self, tags: Any) -> None:
            drained.append(tags)

    drained: list[Any] = []
    weights, params = make("host"), make("host")
    phases = {"rollout": {"engine": [weights.tag]}, "train": {"trainer": [params.tag]}}
    group = Group(phases=phases, store=store, rank=0, world_size=1, engine=[Engine()], trainer=Colocated())
    group.enter("train")
    assert (weights.state, params.state, drained) == ("paused", "active", [[weights.tag]])
    assert group.enter("rollout").resumed["engine"][0].resumed == (weights.tag,)
    assert (weights.state, params.state) == ("active", "paused")
    group.close()


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.5, "text", [1, (2, "x")], {"a": {"b": (1,)}}, {1: "one"},
        Transition(paused=("a",), copied_bytes=3), Ready(True, False, True, ("kv",)),
    ],
)  # fmt: skip
def test_messages_arrive_as_they_were_sent(value: Any) -> None:
    assert loads(dumps(value)) == value


def test_errors_arrive_with_their_class_and_attributes() -> None:
    error = loads(dumps(memsaver.AttachedError("attached", tag="kv", holders=[(3, "python")])))
    assert (type(error), str(error)) == (memsaver.AttachedError, "attached")
    assert (error.tag, error.holders) == ("kv", [(3, "python")])
    assert type(loads(dumps(OSError("no")))) is OSError

    class Unknown(Exception):
        pass

    unknown = loads(dumps(Unknown("text")))
    assert (type(unknown), str(unknown)) == (memsaver.Error, "Unknown: text")
    assert loads(dumps({1, 2})) == "{1, 2}"


# The end of a store, and of the process


SERVER = """
import sys, torch.distributed as distributed
store = distributed.TCPStore("127.0.0.1", 0, None, True)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_that_hangs_ends_the_call_at_its_bound(make: Callable[..., memsaver.Region]) -> None:
    region = make("host")
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            store = distributed.TCPStore("127.0.0.1", int(server.stdout.readline()), None, False)
            phases: dict[str, dict[str, list[str]]] = {"on": {"engine": [region.tag]}, "off": {}}
            group = Group(phases=phases, engine=Colocated(), store=store, rank=0, world_size=1)
            group.enter("on", timeout=60)
            os.kill(server.pid, signal.SIGSTOP)
            errors: list[BaseException] = []

            def enter() -> None:
                try:
                    group.enter("off", timeout=0.1)
                except BaseException as error:
                    errors.append(error)

            entering = threading.Thread(target=enter, daemon=True)
            entering.start()
            entering.join(60)
            assert not entering.is_alive()  # torch's own bound is 300 s
            assert isinstance(errors[0], memsaver.Error)
            assert "torch.distributed's store has not answered within" in str(errors[0])
            assert region.state == "active"
        finally:
            os.kill(server.pid, signal.SIGCONT)
            server.kill()


def test_threads_that_call_the_store_end_before_the_interpreter() -> None:
    """A thread that returns from a call of torch in the interpreter's end aborts the process."""
    out = run_clean("""
        import atexit, threading
        atexit.register(lambda: print([each.name for each in threading.enumerate()]))  # runs after those of memsaver
        import torch.distributed as distributed
        import memsaver.distributed
        region = memsaver.region("weights", device="cpu")
        phases = {"on": {"engine": ["weights"]}, "off": {"engine": []}}

        def group(name):
            store = distributed.TCPStore("127.0.0.1", 0, 1, True)
            member = memsaver.distributed.Colocated()
            return memsaver.distributed.Group(
                phases=phases, engine=member, store=store, rank=0, world_size=1, name=name
            )

        closed = group("closed")
        closed.close()
        print([each.name for each in threading.enumerate() if each.name == "memsaver heart"])
        made = group("open")
        made.enter("off")
    """)
    assert out == "[]\n['MainThread']\n"
