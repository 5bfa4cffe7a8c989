"""Guests: they leave and come back with the regions of their tags."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import memsaver
from memsaver import _guests
from memsaver.guests import Workspaces
from memsaver.transitions import prepare_pause
from tests import controls
from tests.support import KIB, MIB, Block, Make, Visitor, host_held_bytes, host_used_bytes, until


class Noted(Visitor):
    """Writes its calls to a common list. ``failing``: by call, the error that it raises."""

    def __init__(self, name: str, tags: str | list[str], calls: list[str], *, order: int = 0) -> None:
        super().__init__(name, tags, self.note, order=order)
        self.calls = calls
        self.failing: dict[str, BaseException] = {}
        self.is_here = True
        self.then: Callable[[str], object] = lambda call: None

    def note(self, call: str) -> None:
        self.calls.append(f"{self.name} {call}")
        self.then(call)
        if call in self.failing:
            raise self.failing[call]
        self.is_here = self.is_here if call == "prepare" else call == "come back"


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def visit(calls: list[str]) -> Callable[..., Noted]:
    """Registers guests that write to one list."""

    def register(name: str, tags: str | list[str], *, order: int = 0) -> Noted:
        guest = Noted(name, tags, calls, order=order)
        memsaver.register(guest)
        return guest

    return register


Visit = Callable[..., Noted]


def states() -> dict[str, str]:
    return {each.name: each.state for each in memsaver.stats().guests}


def moves(calls: list[str]) -> list[str]:
    """The calls without those of prepare()."""
    return [each for each in calls if not each.endswith("prepare")]


def test_guests_leave_in_order_before_the_regions_and_come_back_in_reverse(
    make: Make, visit: Visit, calls: list[str]
) -> None:
    """In the second half of a pause, for which memory was reserved."""
    region = make("host")
    block = Block(region, host_held_bytes() - host_used_bytes() + 5 * MIB)  # more than the idle bytes
    late = visit("late", region.tag, order=1)
    visit("first", region.tag)
    visit("second", region.tag)
    rows = [(each.name, each.tags, each.order, each.state, each.nbytes) for each in memsaver.stats().guests]
    assert rows == [(name, (region.tag,), name == "late", "here", 0) for name in ("first", "second", "late")]
    assert memsaver.stats().asdict()["guests"][0]["name"] == "first"
    prepared = ["first prepare", "second prepare", "late prepare"]
    memsaver.configure(host_limit=0)
    with pytest.raises(memsaver.BackupError):
        region.pause()
    memsaver.configure(host_limit=None)
    prepare_pause(region.tag).abort()
    assert calls == prepared * 2
    mapped: list[int] = []
    late.then = lambda call: mapped.append(region.mapped_bytes)
    del calls[:]
    pause = prepare_pause(region.tag)
    assert calls == prepared
    assert pause.commit().paused == (region.tag,)
    assert calls[3:] == ["first leave", "second leave", "late leave"]
    assert mapped[-1] > 0  # the region was still there
    del calls[:]
    late.then = lambda call: block.check()  # the region is there again
    assert region.resume().resumed == (region.tag,)
    assert calls == ["late come back", "second come back", "first come back"]


class World:
    """Regions, a tag without one, and guests with two of the tags each. Calls fail at random, and are repeated.

    ``paused``: the tags that are paused.
    """

    def __init__(self, make: Make, visit: Visit, alone: str) -> None:
        regions = [make("host") for _ in range(3)]
        self.blocks = [Block(each, 5 * KIB, seed=number) for number, each in enumerate(regions)]
        self.regions = {each.tag: each for each in regions}
        self.tags = [alone, *self.regions]
        self.guests = [visit(f"{number}", self.tags[number : number + 2]) for number in range(4)]
        self.paused: set[str] = set()

    def step(self, chance: random.Random) -> None:
        tags = chance.sample(self.tags, chance.randint(1, 4))
        share = chance.choice([0.0, 0.5, 1.0])
        pause = [tag for tag in tags if chance.random() < share]
        resume = [tag for tag in tags if tag not in pause]
        guest, call = chance.choice(self.guests), chance.choice(["prepare", "leave", "come back"])
        how: Any = chance.choice([None, OSError("not now"), KeyboardInterrupt(), "driver"])
        if how == "driver":
            controls.arm(chance.randint(1, 3))
        elif how is not None:
            guest.failing = {call: how}
        begun = len(guest.calls)
        repeats = True
        try:
            memsaver.switch(pause=pause, resume=resume)
        except (memsaver.Error, KeyboardInterrupt):
            if how == "driver" or call != "come back":
                self.check(self.guests[1:])
                repeats = self.tags[0] in tags or chance.random() < 0.5
        else:
            repeats = False
            self.paused = (self.paused | set(pause)) - set(resume)
        guest.failing = {}
        controls.disarm()
        called = [each.split() for each in moves(guest.calls[begun:])]
        left = [name for name, verb, *_ in called if verb == "leave"]
        came = [name for name, verb, *_ in called if verb == "come"]
        assert left == sorted(left) and came == sorted(came, reverse=True)
        if repeats:
            memsaver.switch(pause=pause, resume=resume)
            self.paused = (self.paused | set(pause)) - set(resume)
        self.paused = (self.paused - set(self.regions)) | self.paused_regions()
        self.check(self.guests)
        for block in self.blocks:
            if block.region.state == "active":
                block.check()

    def paused_regions(self) -> set[str]:
        return {tag for tag, region in self.regions.items() if region.state == "paused"}

    def check(self, guests: list[Noted]) -> None:
        """A guest is away exactly while all of its tags are paused."""
        paused, found = self.paused_regions() | (self.paused - set(self.regions)), states()
        for guest in guests:
            assert found[guest.name] == ("away" if paused >= set(guest.tags) else "here")
            assert guest.is_here == (found[guest.name] == "here")


def test_guests_are_away_exactly_while_their_tags_are_paused(make: Make, visit: Visit, tag: str) -> None:
    world = World(make, visit, tag)
    for seed in range(400):
        world.step(random.Random(seed))


def test_tags_count_as_their_regions_are_when_a_guest_moves(visit: Visit, tag: str) -> None:
    """Also after changes that no transition has told the guest of."""
    names = [f"{tag} {each}" for each in ("first", "second")]
    first, second = (memsaver.region(each, device="cpu") for each in names)
    first.pause()
    guest = visit(tag, names)  # when one of its tags is paused
    second.pause()
    assert states()[guest.name] == "away"
    memsaver.resume(names)
    assert states()[guest.name] == "here"
    first.pause()
    first.close()
    first = memsaver.region(names[0], device="cpu")
    second.pause()
    assert (first.state, second.state, states()[guest.name]) == ("active", "paused", "here")
    first.pause()
    assert states()[guest.name] == "away"


def test_a_guest_stays_away_if_its_tag_is_paused_again_before_it_comes_back(
    make: Make, visit: Visit, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    region = make()
    guest = visit("guest", region.tag)
    region.pause()
    come_back = _guests.Moves.come_back

    def pause_before(moves: _guests.Moves) -> None:
        monkeypatch.undo()
        thread = threading.Thread(target=region.pause)
        thread.start()
        thread.join()
        come_back(moves)

    monkeypatch.setattr(_guests.Moves, "come_back", pause_before)
    region.resume()
    assert (region.state, states()[guest.name], moves(calls)) == ("paused", "away", ["guest leave"])
    region.resume()
    assert (region.state, states()[guest.name]) == ("active", "here")


# Failures


@pytest.mark.parametrize("call", ["prepare", "leave"])
def test_guest_that_cannot_leave_aborts_the_pause(make: Make, visit: Visit, calls: list[str], call: str) -> None:
    region = make("host")
    block = Block(region, MIB)
    visit("first", region.tag)
    visit("second", region.tag).failing = {call: OSError(f"no {call}")}
    visit("third", region.tag)
    with pytest.raises(memsaver.GuestError, match=f"guest 'second' could not {call}: OSError: no {call}") as raised:
        region.pause()
    assert (raised.value.guest, raised.value.stage) == ("second", call)
    assert isinstance(raised.value.__cause__, OSError)
    assert pickle.loads(pickle.dumps(raised.value)).guest == "second"
    assert moves(calls) == ([] if call == "prepare" else ["first leave", "second leave", "first come back"])
    assert region.state == "active"
    assert set(states().values()) == {"here"}
    block.check()


@pytest.mark.parametrize("call", ["prepare", "leave"])
def test_guest_whose_method_calls_a_transition_that_would_wait_for_itself_is_refused(
    make: Make, visit: Visit, call: str
) -> None:
    region, beside, other = make("host"), make(), make()
    block, guest = Block(region, MIB), visit("guest", region.tag)
    for nested in (region.pause, region.resume, beside.pause, memsaver.pause, partial(memsaver.start, resume=beside)):
        guest.then = lambda at, nested=nested: nested(timeout=5) if at == call else None  # type: ignore[misc]
        with pytest.raises(memsaver.GuestError, match=f"could not {call}: Error: a method of a guest called"):
            memsaver.pause([region, beside])
        assert (region.state, beside.state, states()[guest.name]) == ("active", "active", "here")
    guest.then = lambda at: other.pause() if at == call else beside.pause() if at == "come back" else None
    memsaver.pause([region, beside])
    memsaver.resume([region, beside])
    assert (region.state, beside.state, other.state) == ("active", "paused", "paused")
    block.check()


def test_guest_that_cannot_come_back_is_named_and_a_repeated_resume_continues(
    make: Make, visit: Visit, calls: list[str]
) -> None:
    region = make("host")
    visit("first", region.tag)
    second = visit("second", region.tag)
    visit("third", region.tag)
    region.pause()
    del calls[:]
    second.failing = {"come back": OSError("not now")}
    with pytest.raises(memsaver.GuestError, match="guest 'second' could not come back: OSError") as raised:
        region.resume()
    assert (raised.value.guest, raised.value.stage) == ("second", "come back")
    assert region.state == "active"
    assert states() == {"first": "away", "second": "away", "third": "here"}
    second.failing = {}
    region.resume()
    assert calls == ["third come back", "second come back", "second come back", "first come back"]
    assert set(states().values()) == {"here"}


# Phases, background


def test_a_bound_ends_the_wait_for_guests_before_and_after_the_commit(make: Make, visit: Visit) -> None:
    first, second, third = make(), make("host"), make()
    held = Block(second, MIB)
    inside, proceed = threading.Event(), threading.Event()
    moving: list[Any] = []

    def stay(call: str) -> None:
        if call == "leave":
            inside.set()
            assert proceed.wait(60)

    def begin() -> None:
        until(lambda: controls.stopped("cuEventSynchronize"))  # the resume of the other region moves contents
        moving.append(memsaver.start(pause=first))
        assert inside.wait(60)
        controls.go_on("cuEventSynchronize")

    visit("slow", first.tag).then = stay
    visit("other", second.tag)
    visit("third", third.tag)
    second.pause()
    try:
        with pytest.raises(memsaver.WaitTimeoutError, match="stage 'guests'.*; the regions are active, and another"):
            controls.hold("cuEventSynchronize")
            threading.Thread(target=begin).start()
            second.resume(timeout=0.5)
        with pytest.raises(memsaver.WaitTimeoutError, match="stage 'guests'.*; nothing has changed") as raised:
            third.pause(timeout=0.01)
        assert (raised.value.stage, third.state, states()["slow"]) == ("guests", "active", "leaving")
    finally:
        proceed.set()
    moving[0].result(60)
    assert (second.state, states()["other"]) == ("active", "away")
    second.resume()
    assert states()["other"] == "here"
    held.check()


# The register


def test_guest_that_is_away_can_be_removed(make: Make, visit: Visit, calls: list[str]) -> None:
    region, other = make(), make()
    guest = Noted("guest", region.tag, calls)
    memsaver.register(guest)
    with pytest.raises(ValueError, match="there is a guest 'guest'"):
        memsaver.register(Noted("guest", region.tag, calls))
    visit("second", other.tag)
    visit("of a name", f"{other.tag} alone")  # of no region
    guest.then = lambda call: other.pause() if call == "leave" else None  # it would wait for itself
    with pytest.raises(memsaver.GuestError, match="called a transition of guests"):
        region.pause()
    assert region.state == other.state == "active"
    guest.then = lambda call: None
    memsaver.define_phase("with", [region, other, f"{other.tag} alone"])
    memsaver.define_phase("without", other)
    del calls[:]
    with memsaver.phase("without"):
        assert states() == {"guest": "away", "second": "here", "of a name": "away"}
    with memsaver.phase("with"):
        assert moves(calls) == ["guest leave", "of a name leave", "of a name come back", "guest come back"]
    region.pause()
    memsaver.unregister(guest)
    region.resume()
    assert moves(calls)[4:] == ["guest leave"]
    with pytest.raises(ValueError, match="'guest' is not registered"):
        memsaver.unregister(guest)


def test_wrong_arguments_of_a_guest_raise() -> None:
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (("", "tag"), {}, TypeError, "name is ''"),
        ((3, "tag"), {}, TypeError, "name is 3"),
        (("guest", []), {}, ValueError, "tags is \\[\\]"),
        (("guest", 3), {}, TypeError, "tags is 3"),
        (("guest", [""]), {}, ValueError, "tag is ''"),
        (("guest", "tag"), {"order": 1.5}, TypeError, "order is 1.5"),
    ]
    for arguments, options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            memsaver.Guest(*arguments, **options)
    with pytest.raises(TypeError, match="expected a memsaver.Guest"):
        memsaver.register("guest")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^guest 'plain' is a Guest without leave\(\), expected an override$"):
        memsaver.register(memsaver.Guest("plain", tags="weights"))
    assert memsaver.stats().guests == []


def test_workspaces_are_cleared_before_the_cache_in_a_pause(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a torch with CUDA that has used it."""
    cleared: list[str] = []
    uses_cuda = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_cuda)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append("empty cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append("clear"), raising=False)
    memsaver.register(Workspaces(tag))
    memsaver.pause(tag)
    memsaver.resume(tag)
    uses_cuda = True
    with memsaver.capturing(), pytest.raises(memsaver.GuestError, match="a graph is being captured"):
        memsaver.pause(tag)
    assert cleared == []
    memsaver.pause(tag)
    memsaver.resume(tag)
    assert cleared == ["clear", "empty cache"]
