"""Late and lingering regions of a phase: they move while its work goes on, and the first use of a late one waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import memsaver
from memsaver.turns.members import AsyncColocated, Colocated
from tests import controls
from tests.group_support import Halved
from tests.support import MIB, Block, Fill, Make, Visitor, check, host_held_bytes, host_used_bytes, until


class Sides:
    """Three regions. In the phase "train" the parameters are resident, the optimizer is late, and the cache lingers."""

    def __init__(self, make: Make) -> None:
        self.params, self.optimizer, self.cache = make("host"), make("host"), make("host")
        self.regions = [self.params, self.optimizer, self.cache]
        self.blocks = [Block(each, 3 * MIB, seed=number) for number, each in enumerate(self.regions)]
        memsaver.define_phase("rollout", self.cache)
        memsaver.define_phase("train", self.params, late=self.optimizer, lingering=self.cache)
        with memsaver.phase("rollout"):
            pass

    @property
    def states(self) -> list[str]:
        return [each.state for each in self.regions]


@pytest.fixture
def sides(make: Make) -> Sides:
    return Sides(make)


def test_the_phase_begins_without_late_and_lingering_regions(sides: Sides) -> None:
    before = sides.states
    with sides.cache, pytest.raises(memsaver.Error, match="is inside it"):
        memsaver.phase("train").__enter__()
    assert sides.states == before == ["paused", "paused", "active"]
    with controls.held("cuMemUnmap"):  # the lingering region cannot leave
        with memsaver.phase("train") as moved:
            assert (moved.paused, moved.resumed) == ((), (sides.params.tag,))
            assert sides.params.state == "active" and sides.optimizer.state != "active"
            sides.blocks[0].check()
    sides.optimizer.wait()
    sides.blocks[1].check()
    sides.cache.resume()  # after its pause
    sides.blocks[2].check()
    kinds = [(each.pause, each.resume) for each in memsaver.history()[-3:]]
    later = (sides.cache.tag,), (sides.optimizer.tag,)
    assert kinds == [((), (sides.params.tag,)), later, ((), (sides.cache.tag,))]
    with memsaver.phase("rollout"):
        pass
    options: dict[str, Any] = {"backup": {sides.cache.tag: "none"}, "restore": {sides.optimizer.tag: False}}
    with memsaver.phase("train", **options):
        sides.optimizer.wait()
    done = memsaver.history()[-1]
    assert (done.pause, done.resume, done.copied_bytes) == ((sides.cache.tag,), (sides.optimizer.tag,), 0)
    with pytest.raises(ValueError, match="backup names the tag 'nothing'"):
        memsaver.phase("rollout", backup={"nothing": "none"}).__enter__()


@pytest.mark.parametrize("use", ["enter", "empty", "wait", "step"])
def test_the_first_use_waits(sides: Sides, use: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    memsaver.wait_before_step(optimizer, iter([sides.optimizer.tag]))
    states: list[str] = []

    def first() -> None:
        if use == "enter":
            with sides.optimizer:
                states.append(sides.optimizer.state)
            return
        if use == "empty":
            sides.optimizer.empty(3)
        elif use == "wait":
            sides.optimizer.wait()
        else:
            optimizer.step()
        states.append(sides.optimizer.state)

    with controls.held("cuMemUnmap"):
        with memsaver.phase("train"):
            thread = threading.Thread(target=first)
            thread.start()
            with pytest.raises(memsaver.WaitTimeoutError, match="comes late in phase 'train'") as raised:
                sides.optimizer.wait(timeout=0.05)
            assert raised.value.stage == "late" and not states
    thread.join()
    assert states == ["active"]
    sides.blocks[1].check()


def busy(call: str) -> None:
    if call == "leave":
        raise LookupError("busy")


@contextmanager
def failing(stage: str, sides: Sides) -> Iterator[type[Exception]]:
    """Lets the transition of late and lingering regions fail in this stage. Gives the class of its error."""
    if stage == "memory":
        memsaver.define_phase("train", sides.params, late=sides.optimizer)
        with memsaver.phase("train"):  # the parameters take their memory before the device is full
            sides.optimizer.wait()
        sides.optimizer.pause()
        with Fill():
            yield memsaver.OutOfMemoryError
    elif stage == "backup":
        idle = host_held_bytes() - host_used_bytes()  # in slabs with backups of earlier tests
        sides.blocks.append(Block(sides.cache, idle // MIB * MIB + 2 * MIB))
        memsaver.configure(host_limit=1)
        yield memsaver.BackupError
        memsaver.configure(host_limit=None)
    elif stage == "guests":
        guest = Visitor("late test", sides.cache.tag, busy)
        memsaver.register(guest)
        yield memsaver.GuestError
        memsaver.unregister(guest)
    else:
        controls.fail("cuMemSetAccess", 999, 1 << 40, after=1)  # the parameters have their access by then
        yield memsaver.DriverError
        controls.disarm()


@pytest.mark.parametrize("stage", ["memory", "backup", "guests", "move"])
def test_an_error_of_a_late_region_is_raised_at_its_first_use(sides: Sides, stage: str) -> None:
    """The next phase forgets it."""
    with failing(stage, sides) as kind:
        with memsaver.phase("train"):
            for _ in range(2):
                with pytest.raises(kind, match="^phase 'train', late regions: ") as raised:
                    sides.optimizer.wait()
                assert isinstance(raised.value, memsaver.Error) and raised.value.phase == "train"
                assert str(raised.value).endswith("The region is paused: resume it, or enter the phase again")
            with pytest.raises(kind), sides.optimizer:
                pass
        assert sides.optimizer.state == "paused"
    if stage == "memory":
        sides.optimizer.resume()
        sides.optimizer.wait()  # its error was of an earlier residence
        sides.optimizer.pause()
    with memsaver.phase("rollout"), pytest.raises(memsaver.RegionPausedError, match="is paused: it cannot be used"):
        sides.optimizer.wait()
    sides.blocks[2].check()
    with memsaver.phase("train"):
        sides.optimizer.wait()
    sides.blocks[1].check()


# Groups


class Side(Colocated):
    """A member that notes the order of its calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def colocated_drain(self, tags: Any) -> None:
        self.events.append(f"drain {len(tags)}")

    def resume(self, tags: Any = None, **options: Any) -> Any:
        done = super().resume(tags, **options)
        self.events.append(f"resumed {len(done.resumed)}")
        return done


def group_of(sides: Sides, *members: Any) -> Any:
    ray = pytest.importorskip("memsaver.ray", reason="needs ray")
    params, optimizer, cache = (each.tag for each in sides.regions)
    phases = {
        "rollout": {"engine": [cache], "trainer": []},
        "train": {
            "engine": {"lingering": [cache]},
            "trainer": {"resident": [params], "late": [optimizer]},
        },
    }
    return ray.Group(engine=members[0], trainer=members[1], phases=phases)


def test_a_turn_ends_before_late_and_lingering_tags_have_moved_and_the_next_one_waits_for_them(sides: Sides) -> None:
    engine, trainer = Side(), Side()
    group = group_of(sides, engine, trainer)
    for _ in range(3):
        group.enter("rollout")
        engine.events.clear()
        trainer.events.clear()
        with controls.held("cuMemUnmap"):
            turn = group.enter("train")
            assert turn.resumed["trainer"][0].resumed == (sides.params.tag,) and turn.paused == {}
            assert sides.params.state == "active" and sides.cache.state != "paused"
        group.enter("rollout", timeout=60)  # it waits
        assert sides.states == ["paused", "paused", "active"]
        assert engine.events == ["drain 1", "resumed 1"]
        assert trainer.events == ["resumed 1", "resumed 1", "drain 2"]
        sides.blocks[2].check()


def test_a_turn_in_which_all_tags_of_a_rank_linger_waits_for_the_last_one_too(make: Make) -> None:
    """The turn also takes back a preparation that its member has not committed: the pause of the tag waits for it."""
    ray = pytest.importorskip("memsaver.ray", reason="needs ray")

    class Failing(ray.Colocated):  # type: ignore[misc,name-defined]
        fails = False

        def colocated_commit(self) -> Any:
            if self.fails:
                raise OSError("not now")
            return super().colocated_commit()

    cache, member = make("host"), Failing()
    held = Block(cache, 4 * MIB)
    phases = {"away": {}, "train": {"engine": {"late": [cache.tag]}}, "rest": {"engine": {"lingering": [cache.tag]}}}
    group = ray.Group(engine=member, phases=phases)
    group.enter("away")
    with Fill():
        group.enter("train", memory_timeout=60)
        with pytest.raises(
            memsaver.Error, match="engine 0 could not prepare .* tags of the last turn are still moving"
        ):
            group.enter("rest", timeout=0.1)
    cache.wait(timeout=20)
    held.check()
    member.fails = True
    with pytest.raises(memsaver.Error, match="engine 0 could not pause .*: OSError: not now"):
        group.enter("away")
    assert cache.state == "pausing"
    group.enter("rest")
    until(lambda: cache.state == "paused")


def test_late_tags_of_a_turn_come_one_after_the_other(make: Make) -> None:
    ray = pytest.importorskip("memsaver.ray", reason="needs ray")
    first, second = make("host"), make("host")
    blocks = [Block(each, 4 * MIB, seed) for seed, each in enumerate((first, second))]
    phases = {"away": {}, "train": {"trainer": {"late": [second.tag, first.tag]}}}
    group = ray.Group(trainer=ray.Colocated(), phases=phases, restore={"train": {"trainer": {first.tag: True}}})
    group.enter("away")
    with Fill(leave=4 * MIB) as rest:
        group.enter("train", memory_timeout=60)
        second.wait(timeout=20)
        assert first.state != "active"
        rest.close()
        first.wait(timeout=20)
    check(blocks)
    group.enter("away")
    with Fill():
        group.enter("train", memory_timeout=0)
        for each in (second, first):
            with pytest.raises(memsaver.OutOfMemoryError, match="^phase 'train', late regions: "):
                each.wait(timeout=20)
    assert [each.state for each in (first, second)] == ["paused", "paused"]
    group.enter("away")
    group.enter("train")
    first.wait(timeout=20)
    check(blocks)


def test_a_turn_that_is_taken_back_keeps_the_error_of_a_late_region(make: Make) -> None:
    ray = pytest.importorskip("memsaver.ray", reason="needs ray")
    region, other = make("host"), Halved()
    held = Block(region, 4 * MIB)
    phases = {"away": {}, "train": {"trainer": {"late": [region.tag]}, "other": ["other"]}}
    group = ray.Group(trainer=ray.Colocated(), other=other, phases=phases)
    group.enter("away")
    with Fill():
        group.enter("train", memory_timeout=0)
        with pytest.raises(memsaver.OutOfMemoryError):
            region.wait(timeout=20)
    other.errors["prepare"] = LookupError("busy")
    with pytest.raises(memsaver.Error, match="busy"):
        group.enter("away")
    with pytest.raises(memsaver.OutOfMemoryError, match="^phase 'train', late regions: "):
        region.wait(timeout=20)
    group.enter("away")
    with pytest.raises(memsaver.RegionPausedError):
        region.wait(timeout=20)
    group.enter("train")
    region.wait(timeout=20)
    held.check()


def test_guests_and_rebuilds_of_a_late_region_do_not_wait_for_it(sides: Sides, tag: str) -> None:
    def enter(call: str) -> None:
        if call == "come back":
            with sides.optimizer:
                entered.append(sides.optimizer.state)

    def rebuild() -> None:
        with pytest.raises(memsaver.RegionPausedError, match="is resuming"), sides.optimizer:
            pass
        entered.append("rebuilt")

    entered: list[str] = []
    derived = memsaver.region(tag, "cpu", memsaver.Derived(rebuild, after=[sides.optimizer.tag]))
    memsaver.register(Visitor("late test", sides.optimizer.tag, enter))
    try:
        memsaver.pause([derived, sides.optimizer])
        memsaver.define_phase("train", sides.params, late=[sides.optimizer, derived])
        with memsaver.phase("train"):
            derived.wait(timeout=20)
            until(lambda: len(entered) == 2)
        assert entered == ["rebuilt", "active"]
    finally:
        derived.backup = "none"


def test_a_phase_that_cannot_be_entered_forgets_no_late_region(sides: Sides) -> None:
    with controls.held("cuMemUnmap"):
        with memsaver.phase("train"):
            with pytest.raises(memsaver.WaitTimeoutError):
                memsaver.phase("rollout", timeout=0.05).__enter__()
            with pytest.raises(memsaver.WaitTimeoutError, match="comes late"):
                sides.optimizer.wait(timeout=0.05)
    sides.optimizer.wait()


@pytest.mark.parametrize("overrides", [False, True])
def test_late_tags_of_async_members_without_a_lasting_loop_come(sides: Sides, overrides: bool) -> None:
    class Member(AsyncColocated):
        async def resume(self, tags: Any = None, **options: Any) -> Any:
            await asyncio.sleep(0.01)
            return await super().resume(tags, **options)

    kind = Member if overrides else AsyncColocated
    group = group_of(sides, kind(), kind())
    for _ in range(5):
        group.enter("rollout", timeout=60)
        group.enter("train", timeout=60)
        sides.optimizer.wait(timeout=20)


def test_a_turn_whose_late_part_cannot_begin_pauses_what_had_resumed(sides: Sides) -> None:
    class Member(Colocated):
        def colocated_background(self, *arguments: Any, **options: Any) -> None:
            raise LookupError("no thread")

    group = group_of(sides, Side(), Member())
    with pytest.raises(memsaver.Error, match=f"trainer 0 could not begin to resume .*{sides.optimizer.tag}"):
        group.enter("train")
    assert sides.states[:2] == ["paused", "paused"]
    group.enter("rollout")
