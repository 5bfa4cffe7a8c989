"""Guests: they leave and come back with the regions of their tags."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import memsaver
from memsaver import _guests
from memsaver.transitions import prepare_pause
from tests import controls
from tests.support import MIB, Block, host_held_bytes, host_used_bytes

Make = Callable[..., memsaver.Region]


class Visitor(memsaver.Guest):
    """Writes its calls to a common list. ``failing``: the calls that raise."""

    def __init__(self, name: str, tags: str | list[str], calls: list[str], *, order: int = 0) -> None:
        super().__init__(name, tags, order=order)
        self.calls = calls
        self.failing: set[str] = set()
        self.on_call: Callable[[str], object] = lambda call: None

    def _called(self, call: str) -> None:
        self.calls.append(f"{self.name} {call}")
        self.on_call(call)
        if call in self.failing:
            raise OSError(f"no {call}")

    def prepare(self) -> None:
        self._called("prepare")

    def leave(self) -> None:
        self._called("leave")

    def come_back(self) -> None:
        self._called("come back")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def visit(calls: list[str]) -> Iterator[Callable[..., Visitor]]:
    """Registers guests that write to one list, and removes them."""
    made: list[Visitor] = []

    def register(name: str, tags: str | list[str], *, order: int = 0) -> Visitor:
        guest = Visitor(name, tags, calls, order=order)
        memsaver.register(guest)
        made.append(guest)
        return guest

    yield register
    for guest in made:
        memsaver.unregister(guest)


Visit = Callable[..., Visitor]


def states() -> dict[str, str]:
    return {each.name: each.state for each in memsaver.stats().guests}


def moves(calls: list[str]) -> list[str]:
    """The calls without those of prepare()."""
    return [each for each in calls if not each.endswith("prepare")]


# Order


def test_guests_leave_in_order_before_the_regions_and_come_back_in_reverse(
    make: Make, visit: Visit, calls: list[str]
) -> None:
    region = make("host")
    block = Block(region, MIB)
    late = visit("late", region.tag, order=1)
    visit("first", region.tag)
    visit("second", region.tag)
    mapped: list[int] = []
    late.on_call = lambda call: mapped.append(region.mapped_bytes)
    done = region.pause()
    assert done.paused == (region.tag,)
    assert calls[:3] == ["first prepare", "second prepare", "late prepare"]
    assert calls[3:] == ["first leave", "second leave", "late leave"]
    assert mapped[-1] > 0  # the region was still there
    del calls[:]
    late.on_call = lambda call: block.check()  # the region is there again
    assert region.resume().resumed == (region.tag,)
    assert calls == ["late come back", "second come back", "first come back"]


def test_a_second_pause_and_a_second_resume_call_no_guest(make: Make, visit: Visit, calls: list[str]) -> None:
    region = make()
    visit("guest", region.tag)
    region.pause()
    region.pause()
    region.resume()
    region.resume()
    assert moves(calls) == ["guest leave", "guest come back"]


def test_guest_of_several_tags_is_away_while_all_of_them_are_paused(make: Make, visit: Visit, calls: list[str]) -> None:
    first, second = make(), make()
    visit("guest", [first.tag, second.tag])
    first.pause()
    assert calls == []
    second.pause()
    assert moves(calls) == ["guest leave"]
    first.resume()
    assert moves(calls) == ["guest leave", "guest come back"]
    second.resume()
    assert moves(calls) == ["guest leave", "guest come back"]


def test_switch_moves_guests_of_both_sides(make: Make, visit: Visit, calls: list[str]) -> None:
    leaving, coming = make(), make()
    visit("leaving", leaving.tag)
    visit("coming", coming.tag)
    coming.pause()
    del calls[:]
    memsaver.switch(pause=leaving, resume=coming)
    assert calls == ["leaving prepare", "leaving leave", "coming come back"]


# Tags without regions


def test_tag_of_a_guest_alone_is_paused_and_resumed_by_its_name(visit: Visit, tag: str, calls: list[str]) -> None:
    visit("guest", tag)
    assert memsaver.pause(tag).paused == (tag,)
    assert memsaver.pause(tag).paused == ()
    assert states() == {"guest": "away"}
    assert memsaver.switch(resume=tag).resumed == (tag,)
    assert moves(calls) == ["guest leave", "guest come back"]


def test_tag_of_a_guest_on_both_sides_of_a_switch_raises(visit: Visit, tag: str, calls: list[str]) -> None:
    visit("guest", tag)
    with pytest.raises(ValueError, match="paused and resumed at once"):
        memsaver.switch(pause=tag, resume=tag)
    assert calls == []


def test_unknown_tag_still_raises_and_names_tags_of_guests(visit: Visit, tag: str) -> None:
    visit("guest", tag)
    with pytest.raises(ValueError, match=f"there is no region 'nobody'.*{tag}"):
        memsaver.pause("nobody")


# Failures


@pytest.mark.parametrize("call", ["prepare", "leave"])
def test_guest_that_cannot_leave_aborts_the_pause(make: Make, visit: Visit, calls: list[str], call: str) -> None:
    region = make("host")
    block = Block(region, MIB)
    visit("first", region.tag)
    visit("second", region.tag).failing = {call}
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


def test_failed_leave_forgets_its_tags(make: Make, visit: Visit, calls: list[str]) -> None:
    """Otherwise the pause of the other tag would make the first guest leave, though its own tag is resident."""
    first, second = make(), make()
    visit("shared", [first.tag, second.tag])
    visit("guest", first.tag).failing = {"leave"}
    with pytest.raises(memsaver.GuestError):
        first.pause()
    second.pause()
    assert states()["shared"] == "here"


def test_guest_that_cannot_come_back_is_named_and_a_repeated_resume_continues(
    make: Make, visit: Visit, calls: list[str]
) -> None:
    region = make("host")
    visit("first", region.tag)
    second = visit("second", region.tag)
    visit("third", region.tag)
    region.pause()
    del calls[:]
    second.failing = {"come back"}
    with pytest.raises(memsaver.GuestError, match="guest 'second' could not come back: OSError") as raised:
        region.resume()
    assert (raised.value.guest, raised.value.stage) == ("second", "come back")
    assert region.state == "active"
    assert states() == {"first": "away", "second": "away", "third": "here"}
    second.failing = set()
    region.resume()
    assert calls == ["third come back", "second come back", "second come back", "first come back"]
    assert set(states().values()) == {"here"}


def test_guests_stay_if_memory_cannot_be_reserved(make: Make, visit: Visit, calls: list[str]) -> None:
    region = make("host")
    held = Block(region, host_held_bytes() - host_used_bytes() + 5 * MIB)  # more than the idle bytes
    visit("guest", region.tag)
    memsaver.configure(host_limit=0)
    with pytest.raises(memsaver.BackupError):
        region.pause()
    assert calls == ["guest prepare"]
    held.check()


def test_guests_stay_away_if_memory_is_short_in_a_resume(make: Make, visit: Visit, calls: list[str]) -> None:
    region = make()
    block = Block(region, 8 * MIB)
    visit("guest", region.tag)
    region.pause()
    controls.arm(1)
    with pytest.raises(memsaver.Error):
        region.resume()
    controls.disarm()
    assert moves(calls) == ["guest leave"]
    region.resume()
    assert moves(calls) == ["guest leave", "guest come back"]
    assert block.tensor.data_ptr() == block.address


def test_interrupt_in_leave_undoes_what_has_left(make: Make, visit: Visit, calls: list[str]) -> None:
    def interrupted(call: str) -> None:
        if call == "leave":
            raise KeyboardInterrupt

    region = make("host")
    visit("first", region.tag)
    visit("second", region.tag).on_call = interrupted
    with pytest.raises(KeyboardInterrupt):
        region.pause()
    assert set(states().values()) == {"here"}
    assert region.state == "active"


def test_failed_resume_leaves_its_tag_paused(make: Make, visit: Visit, calls: list[str]) -> None:
    """Otherwise the guest would stay, though all of its tags are paused."""
    first, second = make(), make()
    held = Block(first, 8 * MIB)
    visit("guest", [first.tag, second.tag])
    first.pause()
    controls.arm(1)
    with pytest.raises(memsaver.Error):
        first.resume()
    controls.disarm()
    assert first.state == "paused"
    second.pause()
    assert moves(calls) == ["guest leave"]
    assert held.tensor.data_ptr() == held.address


def test_interrupt_after_the_guests_left_brings_them_back(
    make: Make, visit: Visit, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes before the regions pause."""

    def interrupted(moves: Any, pausing: set[str]) -> None:
        leave(moves, pausing)
        raise KeyboardInterrupt

    region, other = make(), make()
    visit("guest", region.tag)
    visit("shared", [region.tag, other.tag])
    leave = _guests.Moves.leave
    with monkeypatch.context() as patch:
        patch.setattr(_guests.Moves, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            region.pause()
    assert region.state == "active"
    assert moves(calls) == ["guest leave", "guest come back"]
    other.pause()
    assert states() == {"guest": "here", "shared": "here"}
    region.pause()
    assert states() == {"guest": "away", "shared": "away"}


def test_guest_stays_away_after_a_pause_that_failed_in_its_second_half(
    make: Make, visit: Visit, calls: list[str]
) -> None:
    region = make("host")
    held = Block(region, 8 * MIB)
    visit("guest", region.tag)
    controls.arm(1, "error", "cuMemUnmap")
    with pytest.raises(memsaver.Error):
        region.pause()
    controls.disarm()
    assert region.state == "paused"
    assert moves(calls) == ["guest leave"]
    region.resume()
    assert moves(calls) == ["guest leave", "guest come back"]
    held.check()


# Two halves, phases, background


def test_guests_leave_in_the_second_half_of_a_prepared_pause(make: Make, visit: Visit, calls: list[str]) -> None:
    region = make("host")
    visit("guest", region.tag)
    prepare_pause(region.tag).abort()
    assert calls == ["guest prepare"]
    prepared = prepare_pause(region.tag)
    assert moves(calls) == []
    prepared.commit()
    assert moves(calls) == ["guest leave"]
    region.resume()


def test_phases_move_guests_with_their_tags(
    make: Make, visit: Visit, calls: list[str], fresh_tag: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memsaver.transitions, "_phases", {})
    weights, params, groups = make(), make(), fresh_tag()
    visit("of region", params.tag)
    visit("of name", groups)
    memsaver.define_phase("rollout", weights)
    memsaver.define_phase("train", [params, groups])
    with memsaver.phase("rollout"):
        assert states() == {"of region": "away", "of name": "away"}
    with memsaver.phase("train") as moved:
        assert states() == {"of region": "here", "of name": "here"}
    assert set(moved.resumed) == {params.tag, groups}
    assert moves(calls) == ["of region leave", "of name leave", "of name come back", "of region come back"]


def test_transition_in_the_background_moves_guests(make: Make, visit: Visit) -> None:
    region = make("host")
    visit("guest", region.tag)
    memsaver.start(pause=region).result(60)
    assert states() == {"guest": "away"}
    memsaver.start(resume=region).result(60)
    assert states() == {"guest": "here"}


def test_another_transition_of_guests_waits_at_most_for_its_timeout(make: Make, visit: Visit) -> None:
    first, second = make(), make()
    inside, proceed = threading.Event(), threading.Event()

    def stay(call: str) -> None:
        if call == "leave":
            inside.set()
            assert proceed.wait(60)

    visit("slow", first.tag).on_call = stay
    visit("other", second.tag)
    pausing = memsaver.start(pause=first)
    assert inside.wait(60)
    assert states()["slow"] == "leaving"
    try:
        with pytest.raises(memsaver.WaitTimeoutError, match="stage 'guests'") as raised:
            second.pause(timeout=0.01)
        assert raised.value.stage == "guests"
        assert second.state == "active"
    finally:
        proceed.set()
    pausing.result(60)
    second.pause()
    assert states() == {"slow": "away", "other": "away"}


def test_the_bound_of_a_resume_ends_its_wait_for_guests_after_the_commit_too(make: Make, visit: Visit) -> None:
    first, second = make(), make("host")
    held = Block(second, MIB)
    inside, proceed = threading.Event(), threading.Event()
    moving: list[Any] = []

    def stay(call: str) -> None:
        if call == "leave":
            inside.set()
            assert proceed.wait(60)

    def begin(done: int, total: int) -> None:
        if not moving:  # the resume of the other region moves contents
            moving.append(memsaver.start(pause=first))
            assert inside.wait(60)

    visit("slow", first.tag).on_call = stay
    visit("other", second.tag)
    second.pause()
    try:
        with pytest.raises(memsaver.WaitTimeoutError, match="stage 'guests'.*; the regions are active, and another"):
            second.resume(timeout=0.5, progress=begin)
    finally:
        proceed.set()
    moving[0].result(60)
    assert (second.state, states()["other"]) == ("active", "away")
    second.resume()
    assert states()["other"] == "here"
    held.check()


def test_guest_that_moves_guests_raises_instead_of_waiting_for_itself(make: Make, visit: Visit) -> None:
    region, other = make(), make()
    visit("guest", region.tag).on_call = lambda call: other.pause() if call == "leave" else None
    visit("second", other.tag)
    with pytest.raises(memsaver.GuestError, match="called a transition of guests"):
        region.pause()
    assert region.state == other.state == "active"


# The register


def test_stats_list_guests_in_their_order(visit: Visit, fresh_tag: Callable[[], str]) -> None:
    tags = [fresh_tag(), fresh_tag()]
    visit("last", tags, order=5)
    visit("first", tags[0], order=-1)
    rows = memsaver.stats().guests
    assert [(each.name, each.tags, each.order, each.state, each.nbytes) for each in rows] == [
        ("first", (tags[0],), -1, "here", 0),
        ("last", tuple(tags), 5, "here", 0),
    ]
    assert memsaver.stats().asdict()["guests"][0]["name"] == "first"


def test_guest_that_is_away_can_be_removed(make: Make, calls: list[str]) -> None:
    region = make()
    guest = Visitor("guest", region.tag, calls)
    memsaver.register(guest)
    region.pause()
    memsaver.unregister(guest)
    region.resume()
    assert moves(calls) == ["guest leave"]
    with pytest.raises(ValueError, match="'guest' is not registered"):
        memsaver.unregister(guest)


def test_second_guest_of_a_name_is_refused(visit: Visit, tag: str, calls: list[str]) -> None:
    visit("guest", tag)
    with pytest.raises(ValueError, match="there is a guest 'guest'"):
        memsaver.register(Visitor("guest", tag, calls))


@pytest.mark.parametrize(
    ("arguments", "order", "kind", "text"),
    [
        (("", "tag"), 0, TypeError, "name is ''"),
        ((3, "tag"), 0, TypeError, "name is 3"),
        (("guest", []), 0, ValueError, "tags is \\[\\]"),
        (("guest", 3), 0, TypeError, "tags is 3"),
        (("guest", [""]), 0, ValueError, "tag is ''"),
        (("guest", "tag"), 1.5, TypeError, "order is 1.5"),
    ],
)
def test_wrong_arguments_of_a_guest_raise(arguments: tuple[str, str], order: int, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        memsaver.Guest(*arguments, order=order)


def test_only_guests_register() -> None:
    with pytest.raises(TypeError, match="expected a memsaver.Guest"):
        memsaver.register("guest")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^guest 'plain' is a Guest without leave\(\), expected an override$"):
        memsaver.register(memsaver.Guest("plain", tags="weights"))
    assert memsaver.stats().guests == []
