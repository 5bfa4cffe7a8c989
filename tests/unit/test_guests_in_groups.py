"""Guests in the turns of a group, with members of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver.ray import Colocated, Group  # noqa: E402
from tests.support import MIB, Block  # noqa: E402

Make = Callable[..., memsaver.Region]


class Connections(memsaver.Guest):
    """``refusing``: the stages that raise."""

    def __init__(self, name: str, tag: str) -> None:
        super().__init__(name, tag)
        self.refusing: set[str] = set()

    def prepare(self) -> None:
        self._check("prepare")

    def leave(self) -> None:
        self._check("leave")

    def come_back(self) -> None:
        self._check("come back")

    def _check(self, stage: str) -> None:
        if stage in self.refusing:
            raise OSError(f"no {stage}")


class Pair:
    """An engine with a region, and a trainer with a region and two guests: one with its tag, one with a tag alone."""

    def __init__(self, make: Make, alone: str) -> None:
        self.weights, self.params = make("host"), make("host")
        self.blocks = [Block(self.weights, MIB, 1), Block(self.params, MIB, 2)]
        self.of_region = Connections("of a region", self.params.tag)
        self.by_name = Connections("by name", alone)
        for each in (self.of_region, self.by_name):
            memsaver.register(each)
        phases = {
            "rollout": {"engine": [self.weights.tag]},
            "train": {"trainer": [self.params.tag, alone]},
        }
        self.group = Group(engine=Colocated(), trainer=Colocated(), phases=phases)

    def states(self) -> list[str]:
        return [each.state for each in memsaver.stats().guests]

    def close(self) -> None:
        for each in (self.of_region, self.by_name):
            memsaver.unregister(each)


@pytest.fixture
def pair(make: Make, tag: str) -> Iterator[Pair]:
    made = Pair(make, tag)
    yield made
    made.close()


def fails(pair: Pair, name: str, text: str, stage: str, **options: Any) -> Any:
    pair.by_name.refusing = {stage}
    with pytest.raises(memsaver.Error, match=text) as raised:
        pair.group.enter(name, **options)
    pair.by_name.refusing = set()
    return raised.value.__cause__


def test_turns_move_guests_with_their_tags(pair: Pair, tag: str) -> None:
    turn = pair.group.enter("rollout")
    assert turn.paused["trainer"][0].paused == (pair.params.tag, tag)
    assert pair.states() == ["away", "away"]
    turn = pair.group.enter("train")
    assert turn.resumed["trainer"][0].resumed == (pair.params.tag, tag)
    assert pair.states() == ["here", "here"]
    pair.blocks[1].check()


def test_guest_that_refuses_in_the_first_half_ends_the_turn_before_anything_changes(pair: Pair) -> None:
    pair.group.enter("train")
    fails(pair, "rollout", "trainer 0 could not prepare to pause.*guest 'by name' could not prepare", "prepare")
    assert pair.states() == ["here", "here"]
    assert (pair.params.state, pair.weights.state) == ("active", "paused")
    # One that refuses after the commit keeps its rank as it was.
    fails(pair, "rollout", "trainer 0 could not pause.*guest 'by name' could not leave", "leave")
    assert pair.states() == ["here", "here"]
    assert (pair.params.state, pair.weights.state) == ("active", "paused")
    pair.group.enter("rollout")
    assert (pair.params.state, pair.weights.state) == ("paused", "active")
    pair.blocks[0].check()


def test_guest_that_cannot_come_back_fails_the_turn_and_the_next_turn_continues(pair: Pair) -> None:
    pair.group.enter("rollout")
    cause = fails(pair, "train", "trainer 0 could not resume.*guest 'by name' could not come back", "come back")
    assert isinstance(cause, memsaver.GuestError) and cause.resumed == (pair.params.tag,)
    assert (pair.params.state, pair.weights.state) == ("paused", "paused")  # the memory is free for any phase
    pair.group.enter("rollout")
    pair.group.enter("train")
    assert pair.states() == ["here", "here"]
    pair.blocks[1].check()
    # Contents that such a resume left undefined are refused later.
    pair.group.enter("rollout")
    fails(pair, "train", "could not come back", "come back", restore=False)
    with pytest.raises(memsaver.Error, match="the phase that was to write them failed"):
        pair.group.enter("train")
    pair.group.enter("train", restore=False)
