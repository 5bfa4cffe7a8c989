"""Turns of a group: all or nothing while ranks prepare, actors that die or are async, and members of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver import config  # noqa: E402
from memsaver.ray import AsyncColocated, Colocated, Group, Ready  # noqa: E402
from tests import ray_support  # noqa: E402
from tests.ray_support import Buffer  # noqa: E402
from tests.support import MIB, until  # noqa: E402

PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}, "none": {}}
ROOM = 8 * MIB
START_S = 1.0


class Rank(Colocated):
    def __init__(self, tag: str, makes: bool = True) -> None:
        self.calls: list[str] = []
        self.dies = ""
        self.tag = tag
        if makes:
            self.make()

    def make(self) -> None:
        self.buffer = Buffer(self.tag, ROOM)
        self.buffer.fill(1)

    def state(self) -> str:
        return self.buffer.region.state

    def intact(self) -> bool:
        return self.buffer.holds(1)

    def limit(self, nbytes: int | None) -> None:
        memsaver.release_host_memory()
        memsaver.configure(host_limit=nbytes)

    def die_in(self, step: str) -> None:
        self.dies = step

    def seen(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls

    def pid(self) -> int:
        return os.getpid()

    def _note(self, step: str) -> None:
        self.calls.append(step)
        if step == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def colocated_drain(self, tags: Any) -> None:
        self._note(f"drain {','.join(tags)}")

    def colocated_commit(self) -> Any:
        self._note("commit")
        return super().colocated_commit()

    def colocated_abort(self) -> None:
        self._note("abort")
        super().colocated_abort()

    def colocated_failed(self, role: str, rank: int, error: Exception) -> None:
        self.calls.append(f"failed {role} {rank}")


class Stuck(Rank):
    """Drains for as long as a file is there."""

    def __init__(self, tag: str, path: str) -> None:
        super().__init__(tag)
        self.path = path

    def colocated_drain(self, tags: Any) -> None:
        super().colocated_drain(tags)
        while os.path.exists(self.path):
            time.sleep(0.01)


class OldStyle(Rank):
    """Overrides pause(), as engines without prepare and commit do."""

    breaks = False

    def break_pause(self) -> None:
        self.breaks = True

    def pause(self, tags: Any = None, backup: str | None = None) -> Any:  # type: ignore[override]
        self.calls.append("pause")
        if self.breaks:
            self.breaks = False
            raise RuntimeError("not now")
        return super().pause(tags, backup=backup)


class Outdated(Rank):
    """Extends a method of the group as it was before turns had a backup."""

    def colocated_prepare(self, tags: Any, coming: Any = ()) -> Any:  # type: ignore[override]
        return super().colocated_prepare(tags, coming)


class SlowToStart(Rank):
    def __init__(self, tag: str) -> None:
        time.sleep(START_S)
        super().__init__(tag)


class AsyncRank(AsyncColocated):
    def __init__(self, tag: str) -> None:
        self.buffer = Buffer(tag, ROOM)
        self.buffer.fill(1)
        self.drained = 0

    async def state(self) -> str:
        return self.buffer.region.state

    async def intact(self) -> bool:
        return self.buffer.holds(1)

    async def hold(self) -> None:
        """As a launch does that uses the region: a pause waits for its end."""
        assert memsaver._core.acquire([self.buffer.region._core]) is None

    async def let_go(self) -> None:
        memsaver._core.release([self.buffer.region._core])

    async def colocated_drain(self, tags: Any) -> None:
        await asyncio.sleep(0)
        self.drained += 1

    async def drains(self) -> int:
        return self.drained


class Local:
    """An object of this process. Its methods are coroutines, or return awaitables."""

    def __init__(self, together: threading.Barrier | None = None) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.together = together or threading.Barrier(1)
        self.error: BaseException | None = None

    async def pause(self, tags: list[str]) -> str:
        self.together.wait(60)  # all ranks are in here at once
        await asyncio.sleep(0)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.calls.append(("pause", tags))
        return "paused"

    def resume(self, tags: list[str], restore: bool = True, memory_timeout: float = 0.0) -> Any:
        self.calls.append(("resume", tags))
        return memsaver.start(resume=[])


class Told:
    """An object of this process that records its calls. Its prepare() ends when ``let_go`` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.let_go = threading.Event()
        self.let_go.set()

    def pause(self, tags: list[str], **bounds: Any) -> None:
        self.calls.append(("pause", bounds))

    def resume(self, tags: list[str], **options: Any) -> None:
        self.calls.append(("resume", options))

    def seen(self) -> list[tuple[str, dict[str, Any]]]:
        calls, self.calls = self.calls, []
        return calls


class Halved(Told):
    def colocated_prepare(self, tags: list[str], coming: list[str], **bounds: Any) -> Ready:
        self.let_go.wait(60)
        self.calls.append(("prepare", bounds))
        return Ready(halves=True, moves=True, pooled=False)

    def colocated_commit(self) -> None:
        self.calls.append(("commit", {}))

    def colocated_abort(self) -> None:
        self.calls.append(("abort", {}))


class Draining(AsyncColocated):
    """An async actor, used without Ray, whose drain ends when ``let_go`` is set."""

    def __init__(self) -> None:
        self.drains, self.let_go = asyncio.Event(), asyncio.Event()

    async def colocated_drain(self, tags: Any) -> None:
        self.drains.set()
        await self.let_go.wait()


class Interrupted(Local):
    """Ctrl-C comes while it prepares."""

    def colocated_prepare(self, tags: list[str], coming: list[str]) -> None:
        raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_support.cluster_with_a_device(sys.modules[__name__]):
        yield


@pytest.fixture(autouse=True)
def report_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "reports"))


Spawn = Callable[..., Any]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    actors = []

    def make(kind: type, *args: object, **options: object) -> Any:
        actors.append(ray.remote(kind).options(num_cpus=0, **options).remote(*args))
        return actors[-1]

    yield make
    for actor in actors:
        ray.kill(actor)


def ask(actors: list[Any], method: str, *args: object) -> list[Any]:
    return ray.get([getattr(actor, method).remote(*args) for actor in actors])


def fails(group: Group, name: str, text: str, **options: Any) -> Any:
    with pytest.raises(memsaver.Error, match=text) as raised, group.enter(name, **options):
        pytest.fail("entered")
    assert group.entered is None
    error: Any = raised.value
    assert error.phase == name
    return error


def test_ranks_that_cannot_prepare_leave_all_as_they_were(spawn: Spawn) -> None:
    engines, trainer = [spawn(Rank, "weights"), spawn(Rank, "weights")], spawn(Rank, "params")
    group = Group(engine=engines, trainer=trainer, phases=PHASES)
    with group.enter("rollout"):
        assert ask([trainer], "seen") == [["drain params", "commit"]]
    ask([engines[1]], "limit", 0)
    error = fails(group, "train", "engine 1 could not prepare to pause 'weights': BackupError")
    assert (error.role, error.rank) == ("engine", 1)
    assert isinstance(error.__cause__, memsaver.BackupError)
    assert ask([*engines, trainer], "state") == ["active", "active", "paused"]
    assert ask(engines, "intact") == [True, True]
    assert ask(engines, "seen") == [["drain weights", "abort", "failed engine 1"], ["drain weights", "abort"]]
    assert ask([trainer], "seen") == [["failed engine 1"]]

    with group.enter("rollout") as turn:  # another phase, or the same
        assert [each.resumed for each in turn.resumed["engine"]] == [(), ()]
    ask([engines[1]], "limit", None)
    with group.enter("train") as turn:
        assert [each.paused for each in turn.paused["engine"]] == [("weights",)] * 2
        assert not turn.side_by_side
        assert turn.seconds >= turn.pause_seconds + turn.resume_seconds > 0
    assert ask([*engines, trainer], "state") == ["paused", "paused", "active"]

    # A group that ended between the halves leaves its ranks to the next one.
    assert ray.get(trainer.colocated_prepare.remote(["params"])).moves
    assert ask([trainer], "state") == ["pausing"]
    with Group(engine=engines, trainer=trainer, phases=PHASES).enter("train"):
        assert ask([trainer], "state") == ["active"]
    with group.enter("rollout"):
        assert ask(engines, "intact") == [True, True]

    interrupted = Group(engine=[*engines, Interrupted()], trainer=trainer, phases=PHASES)
    with pytest.raises(KeyboardInterrupt), interrupted.enter("train"):
        pytest.fail("entered")
    assert ask(engines, "state") == ["active", "active"]


@pytest.mark.parametrize("step", ["drain weights", "commit"])
def test_an_actor_that_dies_in_a_turn_restarts_and_joins_again(spawn: Spawn, step: str) -> None:
    engines, trainer = [spawn(Rank, "weights", max_restarts=1) for _ in range(2)], spawn(Rank, "params")
    group = Group(engine=engines, trainer=trainer, phases=PHASES)
    with group.enter("rollout"):
        ask([engines[0]], "die_in", step)
    error = fails(group, "train", "engine 0 could not .*'weights': Actor")
    assert isinstance(error.__cause__, ray.exceptions.RayActorError)
    assert (error.role, error.rank) == ("engine", 0)
    assert ask([engines[1], trainer], "state") == ["active" if step == "drain weights" else "paused", "paused"]
    assert "failed engine 0" in ray.get(trainer.seen.remote())

    # The restarted actor's region is active: it leaves.
    for name, states in (("train", ["paused", "paused", "active"]), ("rollout", ["active", "active", "paused"])):
        with group.enter(name):
            assert ask([*engines, trainer], "state") == states
    assert ask(engines, "intact") == [True, True]


def test_members_without_prepare_pause_after_all_others_are_prepared(spawn: Spawn) -> None:
    engines, trainer = [spawn(Rank, "weights"), spawn(OldStyle, "weights")], spawn(Rank, "params")
    group = Group(engine=engines, trainer=trainer, phases=PHASES)
    with group.enter("rollout"):
        ask([engines[1]], "break_pause")
    fails(group, "train", "engine 1 could not pause 'weights': RuntimeError: not now")
    assert ask([*engines, trainer], "state") == ["active", "active", "paused"]
    assert ask(engines, "seen") == [["drain weights", "abort", "failed engine 1"], ["pause", "abort"]]

    with group.enter("train") as turn:
        assert [each.paused for each in turn.paused["engine"]] == [("weights",)] * 2
    assert ask(engines, "seen") == [["drain weights", "commit"], ["pause", "drain weights"]]

    local = Local()
    mixed = Group(engine=[engines[0], local], trainer=trainer, phases=PHASES)
    with mixed.enter("rollout"):
        local.error = ValueError("not now")
    fails(mixed, "train", "engine 1 could not pause 'weights': ValueError: not now")
    assert ask([engines[0]], "state") == ["active"]
    with mixed.enter("train") as turn:
        assert turn.paused["engine"][1] == "paused"
        assert local.calls == [("resume", ["weights"]), ("pause", ["weights"])]


def test_actors_get_the_policies_of_a_turn(spawn: Spawn) -> None:
    engines, trainer = [spawn(Rank, "weights"), spawn(Rank, "weights")], spawn(Rank, "params")
    group = Group(engine=engines, trainer=trainer, phases=PHASES, backup={"train": {"engine": {"weights": "none"}}})
    with group.enter("rollout"):
        pass
    with group.enter("train") as turn:
        assert [(each.paused, each.copied_bytes) for each in turn.paused["engine"]] == [(("weights",), 0)] * 2
    error = fails(
        group, "rollout", "engine 0 could not prepare to resume 'weights': BackupError: .*; engine 1: BackupErr"
    )
    assert isinstance(error.__cause__, memsaver.BackupError)
    assert ask([*engines, trainer], "state") == ["paused", "paused", "active"]
    with group.enter("rollout", restore={"engine": {"weights": False}}) as turn:
        assert [each.copied_bytes for each in turn.resumed["engine"]] == [0, 0]

    outdated = spawn(Outdated, "weights")
    group.replace("engine", 1, outdated)
    ask([engines[0]], "seen")
    error = fails(group, "train", "engine 1 could not prepare to pause 'weights': TypeError: .*'backup'")
    assert (error.role, error.rank) == ("engine", 1)
    assert ask([engines[0], outdated, trainer], "state") == ["active", "active", "paused"]


def test_a_turn_does_not_count_the_time_in_which_an_actor_starts(spawn: Spawn) -> None:
    begin = time.perf_counter()
    group = Group(engine=spawn(SlowToStart, "weights"), phases={"on": {"engine": ["weights"]}, "off": {}})
    for _ in range(2):
        with group.enter("off") as turn:
            assert turn.seconds < time.perf_counter() - begin - START_S
            assert turn.paused["engine"][0].paused == ("weights",)
        begin = time.perf_counter()
        group.replace("engine", 0, spawn(SlowToStart, "weights"))


def test_members_get_the_bounds_of_the_caller() -> None:
    halved, whole = Halved(), Told()
    group = Group(engine=[halved, whole], phases={"on": {"engine": ["a"]}, "off": {}})
    for name in ("on", "off"):
        with group.enter(name):
            pass
    assert halved.seen() == [("prepare", {}), ("resume", {}), ("prepare", {}), ("commit", {})]
    assert whole.seen() == [("resume", {}), ("pause", {})]

    bounds: dict[str, Any] = {"timeout": 50.0, "memory_timeout": 5.0, "reader_timeout": 2.0}
    for name in ("on", "off"):
        with group.enter(name, **bounds, restore=False):
            pass
    for told in (halved, whole):
        for call, options in told.seen():
            if call == "commit":  # nothing interrupts it
                continue
            assert 0 < options.pop("timeout") <= 50.0
            resumed = {"memory_timeout": 5.0, "restore": False}
            assert options == (resumed if call == "resume" else {"reader_timeout": 2.0})


def test_a_member_that_does_not_answer_ends_the_turn_at_its_bound() -> None:
    engines, whole = [Halved(), Halved()], Told()
    group = Group(engine=engines, trainer=whole, phases=PHASES)
    engines[1].let_go.clear()
    error = fails(group, "train", "engine 1 could not prepare .* has not answered .stage 'answer'", timeout=0.05)
    cause = error.__cause__
    assert (error.role, error.rank) == ("engine", 1)
    assert isinstance(cause, memsaver.WaitTimeoutError)
    assert (cause.stage, cause.waited_s >= 0.05) == ("answer", True)
    assert [call for call, _ in engines[0].seen()] == ["prepare", "abort"]
    assert engines[1].seen() == whole.seen() == []

    engines[1].let_go.set()  # and aborts its prepared half
    until(lambda: len(engines[1].calls) == 2)
    assert [call for call, _ in engines[1].seen()] == ["prepare", "abort"]
    with group.enter("train", timeout=60.0):
        assert [[call for call, _ in each.seen()] for each in engines] == [["prepare", "commit"]] * 2


def test_an_actor_that_does_not_answer_aborts_its_half_later(spawn: Spawn, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    engines, trainer = [spawn(Rank, "weights"), spawn(Stuck, "weights", str(busy))], spawn(Rank, "params")
    group = Group(engine=engines, trainer=trainer, phases=PHASES)
    with group.enter("rollout"):
        busy.touch()
    error = fails(group, "train", "engine 1 could not prepare to pause 'weights': WaitTimeoutError", timeout=5.0)
    assert isinstance(error.__cause__, memsaver.WaitTimeoutError)
    assert ask([engines[0], trainer], "state") == ["active", "paused"]
    busy.unlink()
    assert ask([engines[1]], "seen") == [["drain weights", "abort"]]
    assert ask(engines, "state") == ["active", "active"]
    with group.enter("train", timeout=60.0):
        assert ask([*engines, trainer], "state") == ["paused", "paused", "active"]


def test_an_actor_that_drains_while_its_turn_is_taken_back_stays_as_it_was(make: Callable[..., Any]) -> None:
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


def test_an_async_actor_goes_on_serving(spawn: Spawn) -> None:
    engine, trainer = spawn(AsyncRank, "weights"), spawn(Rank, "params")
    group = Group(engine=engine, trainer=trainer, phases=PHASES)
    with group.enter("rollout"):
        ray.get(engine.hold.remote())
    with ThreadPoolExecutor(1) as caller:

        def train() -> list[tuple[str, ...]]:
            with group.enter("train") as turn:
                return [each.paused for each in turn.transitions if each.paused]

        entering = caller.submit(train)
        until(lambda: ray.get(engine.drains.remote()) == 1)
        for _ in range(20):  # the pause waits, and other methods answer
            assert ray.get(engine.state.remote()) in ("active", "pausing")
        assert not entering.done()
        ray.get(engine.let_go.remote())
        assert entering.result(60) == [("weights",)]
    assert ask([engine, trainer], "state") == ["paused", "active"]

    moved = ray.get(engine.resume.remote(["weights"]))
    assert moved.resumed == ("weights",)
    assert ray.get(engine.intact.remote())
    ray.get(engine.hold.remote())
    pausing = engine.pause.remote(["weights"])
    until(lambda: ray.get(engine.state.remote()) == "pausing")
    ray.get(engine.let_go.remote())
    assert ray.get(pausing).paused == ("weights",)

    with group.enter("rollout"):
        ask([trainer], "seen")
    os.kill(ray.get(trainer.pid.remote()), signal.SIGKILL)
    fails(group, "train", "trainer 0 could not prepare to resume 'params'")
    assert ask([engine], "state") == ["active"]
    assert ray.get(engine.intact.remote())
