"""Groups over torch.distributed's store: the ranks are threads with members that record their calls."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as distributed

import memsaver
from memsaver import config
from memsaver.distributed import AsyncColocated, Colocated, Group, LostRankError, Ready, Turn, liveness, processes
from memsaver.distributed.liveness import Watch
from memsaver.distributed.messages import dumps, loads
from memsaver.guests import store as store_module
from memsaver.guests.store import StoreLink
from memsaver.transitions import Transition
from memsaver.turns import plan as plan_module
from memsaver.turns import reports
from tests.group_support import Halved
from tests.ranks_support import store_server
from tests.support import run_clean, until

PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}, "sync": {"engine": ["weights"]}}
WAIT_S = 30


class Job:
    """Ranks as threads, two engines and a trainer, over one store. ``roles``: by rank, the numbers of its members."""

    def __init__(
        self,
        store: distributed.Store,
        roles: Sequence[Mapping[str, int]] = ({"engine": 0}, {"engine": 1}, {"trainer": 2}),
        phases: Mapping[str, Mapping[str, Sequence[str]]] = PHASES,
        **options: Any,
    ) -> None:
        self.store = store
        self.members = [Halved(), Halved(), Halved()]
        found = [{role: self.members[number] for role, number in each.items()} for each in roles]
        self.groups = [
            Group(phases=phases, store=store, rank=rank, world_size=len(roles), **{**role, **options})
            for rank, role in enumerate(found)
        ]
        self._turns = [threading.Lock() for _ in roles]  # a rank makes one call at a time

    def call(self, rank: int, name: str, fails: bool = False, **options: Any) -> Future[Turn]:
        """``fails``: the body of the with statement raises OSError."""

        def called() -> None:
            with self._turns[rank]:
                try:
                    with self.groups[rank].enter(name, **options) as turn:
                        if fails:
                            raise OSError("not written")
                    future.set_result(turn)
                except BaseException as error:
                    future.set_exception(error)

        future: Future[Any] = Future()
        # A turn that hangs fails its test, and does not keep the process from its end.
        threading.Thread(target=called, name=f"caller {rank}", daemon=True).start()
        return future

    def calls(self, name: str, **options: Any) -> list[Future[Turn]]:
        return [self.call(rank, name, **options) for rank in range(len(self.groups))]

    def enter(self, name: str, **options: Any) -> list[Turn]:
        return [call.result(WAIT_S) for call in self.calls(name, **options)]

    def fails(self, name: str, **options: Any) -> list[Any]:
        return [call.exception(WAIT_S) for call in self.calls(name, **options)]

    def seen(self) -> list[list[str]]:
        return [member.seen() for member in self.members]

    def close(self) -> None:
        for member in self.members:
            member.let_go()
        for group in self.groups:
            group.close()


@pytest.fixture(autouse=True)
def report_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "reports"))
    monkeypatch.setattr(reports, "_PARTS_S", WAIT_S / 2)  # all processes run, so their parts come
    monkeypatch.setattr(liveness, "_BEAT_S", 0.05)  # they look for requests after each heartbeat
    monkeypatch.setattr(plan_module, "_ANSWER_S", 0.1)
    return tmp_path / "reports"


@pytest.fixture
def store() -> distributed.Store:
    return distributed.HashStore()


@pytest.fixture(params=["tcp", "hash", "file"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> distributed.Store:
    if request.param == "tcp":
        return distributed.TCPStore("127.0.0.1", 0, None, True)
    return distributed.HashStore() if request.param == "hash" else distributed.FileStore(str(tmp_path / "store"), -1)


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*arguments: Any, **options: Any) -> Job:
        made.append(Job(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def job(store: distributed.Store, make_job: Callable[..., Job]) -> Job:
    return make_job(store)


def test_all_ranks_enter_a_phase_and_get_the_same_turn(
    any_store: distributed.Store, make_job: Callable[..., Job]
) -> None:
    job = make_job(any_store)
    for turn in job.enter("train"):
        assert turn.paused == {"engine": [Transition(paused=("paused",))] * 2}
        assert turn.resumed == {"trainer": [Transition(resumed=("params",))]}
        assert turn.seconds >= turn.pause_seconds > 0
    assert [group.entered for group in job.groups] == ["train"] * 3
    # The current device and the like belong to the thread that called enter().
    assert [member.threads for member in job.members] == [{f"caller {rank}"} for rank in range(3)]
    assert job.seen() == [["prepare", "commit"], ["prepare", "commit"], ["prepare", "resume"]]


def test_after_random_failures_all_ranks_have_paused_or_none(
    any_store: distributed.Store, make_job: Callable[..., Job]
) -> None:
    """Errors and interrupts of members, and interrupts of ranks that wait. The store does not grow meanwhile."""
    phases = {"rollout": {"engine": ["weights"], "judge": ["head"]}, "train": {"trainer": ["params"]}}
    job = make_job(any_store, [{"engine": 0, "judge": 1}, {"trainer": 2}, {}], phases)
    chance, sizes = random.Random(1), []
    for number in range(30 if isinstance(any_store, distributed.HashStore) else 10):
        name = ("train", "rollout")[number % 2]
        rank, how = chance.randrange(3), chance.choice(["error", "interrupt", "wait", "done", "none"])
        agreement: Any = job.groups[rank]._processes._agreement
        if how in ("error", "interrupt"):
            raised = OSError("not now") if how == "error" else KeyboardInterrupt()
            job.members[rank].errors[chance.choice(["prepare", "commit", "resume"])] = raised
        if how in ("wait", "done"):
            agreement.wait = _interrupted(agreement, chance.randrange(4), how == "done")
        errors = job.fails(name)
        agreement.__dict__.pop("wait", None)
        job.members[rank].errors.clear()
        failed = [each for each in errors if each is not None]
        assert len(failed) in (0, 3) or [type(each) for each in failed] == [KeyboardInterrupt], errors
        ends = {call for calls in job.seen() for call in calls} & {"commit", "abort"}
        assert len(ends) <= 1, (errors, ends)
        job.enter(name)
        job.seen()
        if not isinstance(any_store, distributed.FileStore):
            keys = any_store.list_keys()  # type: ignore[attr-defined]
            sizes.append(sum(len(any_store.get(key)) for key in keys))
            assert len(keys) <= 1 + 7 * 3  # of each rank: two of its start, a heartbeat, an answer, three outcomes
    assert max(sizes, default=0) < 20_000


def _interrupted(agreement: Any, at: int, decided: bool) -> Callable[..., Any]:
    """A rank's wait for a decision, with an interrupt in that of a number: before or after the decision."""
    original, waits = agreement.wait, []

    def wait(*arguments: Any) -> Any:
        waits.append(arguments)
        if len(waits) != at + 1:
            return original(*arguments)
        if decided:
            original(*arguments)
        raise KeyboardInterrupt

    return wait


def test_an_interrupted_rank_is_named_and_the_others_abort(job: Job) -> None:
    job.members[1].errors["prepare"] = KeyboardInterrupt()
    errors = job.fails("train")
    assert isinstance(errors[1], KeyboardInterrupt)
    for error in (errors[0], errors[2]):
        assert "engine 1 (rank 1) could not prepare to pause 'weights'" in str(error)
        assert "rank 1 left the turn: KeyboardInterrupt" in str(error)
    assert job.seen()[0][-1] == "abort"
    job.enter("train")
    job.seen()
    job.members[1].errors["prepare"] = KeyboardInterrupt()
    job.fails("rollout")
    assert job.members[1].seen() == ["prepare"]  # the pause of the turn before is not taken back


@pytest.mark.parametrize("decided", [False, True])
def test_a_rank_that_is_interrupted_while_it_waits_follows_the_decision(job: Job, decided: bool) -> None:
    job.enter("rollout")
    job.seen()
    agreement: Any = job.groups[1]._processes._agreement
    agreement.wait = _interrupted(agreement, 1, decided)  # the second one: that of the preparations
    if not decided:
        job.members[2].hold("prepare")
    calls = job.calls("train")
    assert isinstance(calls[1].exception(WAIT_S), KeyboardInterrupt)
    assert job.members[1].seen() == ["prepare", "commit" if decided else "abort"]
    job.members[2].let_go()
    for rank in (0, 2):
        assert "rank 1 left the turn: KeyboardInterrupt" in str(calls[rank].exception(WAIT_S))
    assert job.members[0].seen()[:2] == ["prepare", "commit" if decided else "abort"]
    job.enter("train")


def test_an_interrupt_while_preparations_are_taken_back_leaves_none_and_is_told_to_the_others(
    store: distributed.Store, make_job: Callable[..., Job]
) -> None:
    """As of a user who presses Ctrl-C twice."""
    phases = {"on": {"engine": ["a"], "trainer": ["b"], "judge": ["c"]}, "off": {}}
    job = make_job(store, [{"engine": 0, "trainer": 1, "judge": 2}, {}], phases)
    job.enter("on")
    job.members[2].errors["prepare"] = KeyboardInterrupt()
    job.members[0].errors["abort"] = KeyboardInterrupt()  # the first to be taken back
    errors = job.fails("off")
    assert isinstance(errors[0], KeyboardInterrupt)
    assert "rank 0 left the turn: KeyboardInterrupt" in str(errors[1])
    assert [calls[-1] for calls in job.seen()] == ["abort"] * 3
    job.enter("off")


def test_ranks_that_enter_different_phases_are_both_named(job: Job) -> None:
    for call in [job.call(0, "train"), job.call(1, "train"), job.call(2, "rollout")]:
        error: Any = call.exception(WAIT_S)
        assert "rank 0 has the phase 'train', rank 2 has 'rollout'; expected the same on all ranks" in str(error)
        assert (error.role, error.rank) == (None, 2)
    for call in [job.call(0, "train"), job.call(1, "train", timeout=30), job.call(2, "train")]:
        assert "rank 0 has the options {'timeout': None, " in str(call.exception(WAIT_S))
    assert job.seen() == [[], [], []]
    job.enter("train")


def test_phases_may_name_tags_by_sets_whose_order_differs_by_process() -> None:
    class Backward(frozenset[str]):
        def __iter__(self) -> Iterator[str]:
            return iter(sorted(super().__iter__(), reverse=True))

    tags = ["graphs", "kv", "weights"]
    first, second = (plan_module.Plan({"on": {"engine": kind(tags)}}, None) for kind in (frozenset, Backward))
    assert dumps(first.phases) == dumps(second.phases)  # which the ranks compare


def test_groups_that_do_not_fit_are_refused(store: distributed.Store, make_job: Callable[..., Job]) -> None:
    job = make_job(store, [{"engine": 0}, {}], PHASES)
    for error in job.fails("train"):
        assert "no rank has a member of the role 'trainer', which a phase names; there are 'engine'" in str(error)
    job.groups[1] = Group(phases={**PHASES, "none": {}}, store=store, rank=1, world_size=2, trainer=Halved())
    job.groups[0] = Group(phases=PHASES, store=store, rank=0, world_size=2, engine=Halved())
    for error in job.fails("train"):
        assert "rank 0 has the phases {" in str(error)


@pytest.mark.parametrize("step", ["commit", "resume"])
def test_a_rank_that_hangs_in_the_second_half_is_named_until_it_has_answered(
    job: Job, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 0.0)
    job.enter("train")
    victim, verb, tag = (2, "pause", "params") if step == "commit" else (1, "resume", "weights")
    job.members[victim].hold(step)
    calls = [job.call(rank, "rollout", timeout=1.0, restore=False) for rank in range(3)]
    others = [rank for rank in range(3) if rank != victim]
    for rank in others:
        error: Any = calls[rank].exception(WAIT_S)
        assert f"(rank {victim}) could not {verb} '{tag}': WaitTimeoutError: it has not answered" in str(error)
    again = [job.call(rank, "rollout", timeout=0.1, restore=False) for rank in others]
    for call in again:
        error = call.exception(WAIT_S)
        method = "colocated_commit" if step == "commit" else "resume"
        assert f"rank {victim} did not answer: it has not called enter() (stage 'answer', after" in str(error)
        assert f"; rank {victim} is in {method}() of its " in str(error)
        assert error.rank == victim
    job.members[victim].let_go()
    assert isinstance(calls[victim].exception(WAIT_S), memsaver.Error)
    assert isinstance(job.call(victim, "rollout", timeout=0.1, restore=False).exception(WAIT_S), memsaver.Error)
    if step == "resume":  # its contents are undefined: the body that was to write them never ran
        for error in job.fails("rollout"):
            assert "the phase that was to write them failed" in str(error)
    assert job.enter("rollout", restore=False)[0].phase == "rollout"


def test_another_rank_writes_the_report_if_the_first_one_hangs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_REPORT_S", 0.3)
    end, collect = threading.Event(), reports.collect

    def collect_or_hang(mail: Any, title: str, author: str, names: Any) -> Any:
        return collect(mail, title, author, names) if author != "rank 0" else (end.wait(WAIT_S), {})

    monkeypatch.setattr(reports, "collect", collect_or_hang)
    job.members[1].hold("prepare")
    calls = [job.call(rank, "train", timeout=0.2) for rank in range(3)]
    error: Any = calls[2].exception(WAIT_S)
    assert "could not prepare to pause 'weights': WaitTimeoutError" in str(error)
    assert "by rank 2\n" in Path(error.report).read_text()
    end.set()
    assert calls[0].exception(WAIT_S).report == error.report  # type: ignore[union-attr]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_does_not_call_enter_is_named(job: Job, report_dir: Path, late: int) -> None:
    present = [rank for rank in range(3) if rank != late]
    calls = [job.call(rank, "train", timeout=0.2) for rank in present]
    for call in calls:
        error: Any = call.exception(WAIT_S)
        assert (error.role, error.rank) == (None, late)
        assert f"rank {late}" in str(error) and "has not called enter()" in str(error)
        assert isinstance(error.__cause__, memsaver.WaitTimeoutError)
        assert f"; rank {late} is outside of enter(); report: {error.report}" in str(error)
        assert Path(error.report).parent == report_dir
    assert isinstance(job.call(late, "train", timeout=0.2).exception(WAIT_S), memsaver.Error)  # its part of this turn
    assert job.seen() == [[], [], []]
    job.enter("train")


def test_contents_that_a_failed_body_has_not_written_are_refused_on_all_ranks(job: Job) -> None:
    """Also after a turn that began without the rank whose body has failed."""
    for misses in (False, True):
        job.enter("train")
        bodies = [job.call(rank, "sync", rank == 2, restore={"engine": False}) for rank in range(3)]
        assert [type(body.exception(WAIT_S)) for body in bodies] == [type(None), type(None), OSError]
        assert bodies[0].result().unrestored == {"engine": ["weights"]}
        if misses:
            for call in [job.call(rank, "rollout", timeout=0.1) for rank in (0, 1)]:
                assert "has not called enter()" in str(call.exception(WAIT_S))
            # Its part of this turn.
            assert isinstance(job.call(2, "rollout", timeout=0.1).exception(WAIT_S), memsaver.Error)
        for error in job.fails("rollout"):
            assert "the phase that was to write them failed" in str(error)
            assert isinstance(error.__cause__, memsaver.BackupError)
        job.enter("sync", restore=False)
        job.enter("rollout")


def test_a_rank_of_another_host_is_lost_when_its_heartbeats_end(
    store: distributed.Store, make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_host", lambda: str(random.random()))
    job = make_job(store, heartbeat_timeout=1.0)
    job.enter("rollout")
    job.members[1].hold("prepare")
    calls = [job.call(rank, "train") for rank in range(3)]
    until(lambda: len(job.members[1].calls) == 3)
    job.groups[1].close()  # ends its heartbeats
    for rank in (0, 2):
        error: Any = calls[rank].exception(WAIT_S)
        assert "rank 1 has sent no heartbeat for" in str(error)
        assert isinstance(error.__cause__, LostRankError) and error.__cause__.process == 1
    # It was alive: its preparation is taken back when it reads the end of the turn.
    job.members[1].let_go()
    assert isinstance(calls[1].exception(WAIT_S), memsaver.Error)
    assert job.members[1].seen()[-1] == "abort"


def test_silence_between_turns_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase may hold the GIL for long, and then its rank sends nothing."""
    now = 1000.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now))
    link = StoreLink(distributed.HashStore(), "group", direct=True)
    link.set("beat/1", "1")
    link.set("hello/1", json.dumps({**json.loads(liveness.hello()), "host": "another"}))
    watch = Watch(link, 8.0)
    watch.check(1)
    now += 9.0
    watch.forget_silence()
    watch.check(1)
    now += 9.0
    with pytest.raises(LostRankError, match="rank 1 has sent no heartbeat for 9.0 s"):
        watch.check(1)


def test_another_process_with_the_pid_of_a_rank_is_not_the_rank(store: distributed.Store) -> None:
    own, link = json.loads(liveness.hello()), StoreLink(store, "group")
    link.set("hello/1", liveness.hello())
    link.set("hello/2", json.dumps({**own, "start": own["start"] - 1}))
    watch = Watch(link, 8.0)
    watch.check(1)
    with pytest.raises(LostRankError, match=f"rank 2 has ended .pid {os.getpid()}."):
        watch.check(2)


def test_wrong_arguments_raise_before_anything_is_sent(store: distributed.Store) -> None:
    given: dict[str, Any] = {"phases": PHASES, "store": store, "rank": 0, "world_size": 1}
    roles: dict[str, Any] = {"engine": Halved(), "trainer": Halved()}
    for wrong, kind, text in (
        ({"phases": {}}, ValueError, "phases is empty"),  # and others, as of a group of Ray's actors
        ({"store": 3}, TypeError, "store is 3, expected a torch.distributed.Store"),
        ({"store": None}, ValueError, "store is None, expected one, or a call of .*init_process_group"),
        ({"rank": None}, TypeError, "rank is None, expected a number"),
        ({"rank": 1}, ValueError, "rank is 1, expected one of 0 to 0, since world_size is 1"),
        ({"heartbeat_timeout": -1}, ValueError, "heartbeat_timeout is -1"),
        ({"engine": Halved}, TypeError, "is a class, expected an object that derives from"),
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
            if len(drained) == 1:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(0)

    drained: list[Any] = []
    weights, params = make("host"), make("host")
    phases = {"rollout": {"engine": [weights.tag]}, "train": {"trainer": [params.tag]}}
    group = Group(phases=phases, store=store, rank=0, world_size=1, engine=[Engine()], trainer=Colocated())
    with pytest.raises(memsaver.Error, match="engine 0 .*could not prepare .* was cancelled"):
        group.enter("train")
    group.enter("train")
    assert (weights.state, params.state, drained) == ("paused", "active", [[weights.tag]] * 2)
    assert group.enter("rollout").resumed["engine"][0].resumed == (weights.tag,)
    assert (weights.state, params.state) == ("active", "paused")
    group.close()


def test_values_arrive_as_they_were_sent() -> None:
    for value in (
        None, True, 3, 0.5, "text", [1, [2, "x"]], {"a": {"b": [1]}},
        Transition(paused=("a",), copied_bytes=3), Ready(False, True, ("kv",), (), ("kv",)),
    ):  # fmt: skip
        assert loads(dumps(value)) == value

    class Extended(Transition):
        """A member's own resume() may return a derived class."""

    assert loads(dumps(Extended(paused=("a",)))) == Transition(paused=("a",))
    error = loads(dumps(memsaver.AttachedError("attached", tag="kv", holders=[(3, "python")])))
    assert (type(error), str(error)) == (memsaver.AttachedError, "attached")
    assert (error.tag, error.holders) == ("kv", [[3, "python"]])
    assert loads(dumps(memsaver.Error("text", resumed=("kv",)))).resumed == ("kv",)
    assert type(loads(dumps(OSError("no")))) is OSError
    unknown = loads(dumps(subprocess.SubprocessError("text")))
    assert (type(unknown), str(unknown)) == (memsaver.Error, "SubprocessError: text")
    assert loads(dumps([{1, 2}])) == ["{1, 2}"]
    assert loads(dumps({(1, 2): 3})) == "{(1, 2): 3}"


# The end of a store, and of the process


def test_a_store_that_hangs_ends_the_call_at_its_bound(
    make: Callable[..., memsaver.Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ANSWER_S", 0.5)
    region = make("host")
    with store_server() as (server, port):
        store = distributed.TCPStore("127.0.0.1", port, None, False)
        phases: dict[str, dict[str, list[str]]] = {"on": {"engine": [region.tag]}, "off": {}}
        group = Group(phases=phases, engine=Colocated(), store=store, rank=0, world_size=1)
        group.enter("on", timeout=60)
        server.stop()
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


def test_threads_that_call_the_store_end_before_the_interpreter() -> None:
    """A thread that returns from a call of torch in the interpreter's end aborts the process."""
    out = run_clean("""
        import atexit, gc, threading
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
        turn = group("collected").enter("off")  # the turn does not keep the group
        gc.collect()
        for each in threading.enumerate():
            if each.name == "memsaver heart":
                each.join(10)
                print(each.is_alive())
        made = group("open")
        made.enter("off")
    """)
    assert out in ("[]\n['MainThread']\n", "[]\nFalse\n['MainThread']\n")
