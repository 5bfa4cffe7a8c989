"""Guests in the turns of a group, with members of this process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver.ray import Colocated, Group  # noqa: E402
from tests.support import MIB, Block, Make, Visitor  # noqa: E402


class Pair:
    """An engine with a region, and a trainer with a region and two guests: one with its tag, one with a tag alone.

    ``refusing``: the stage in which the second guest raises an error.
    """

    refusing = ""

    def __init__(self, make: Make, alone: str) -> None:
        self.weights, self.params = make("host"), make("host")
        self.blocks = [Block(self.weights, MIB, 1), Block(self.params, MIB, 2)]
        self.guests = [Visitor("of a region", self.params.tag), Visitor("by name", alone, self.refuse)]
        phases = {"rollout": {"engine": [self.weights.tag]}, "train": {"trainer": [self.params.tag, alone]}}
        self.group = Group(engine=Colocated(), trainer=Colocated(), phases=phases)

    def refuse(self, stage: str) -> None:
        if stage == self.refusing:
            raise OSError(f"no {stage}")

    def states(self) -> list[str]:
        guests = [each.state for each in memsaver.stats().guests]
        assert guests[0] == guests[1]
        return [self.weights.state, self.params.state, guests[0]]

    def fails(self, name: str, text: str, stage: str, **options: Any) -> Any:
        self.refusing = stage
        with pytest.raises(memsaver.Error, match=f"trainer 0 could not {text}") as raised:
            self.group.enter(name, **options)
        self.refusing = ""
        return raised.value.__cause__


@pytest.fixture
def pair(make: Make, tag: str) -> Pair:
    made = Pair(make, tag)
    for each in made.guests:
        memsaver.register(each)
    return made


def test_guest_that_refuses_in_the_first_half_ends_the_turn_before_anything_changes(pair: Pair, tag: str) -> None:
    turn = pair.group.enter("rollout")
    assert turn.paused["trainer"][0].paused == (pair.params.tag, tag)
    assert pair.states() == ["active", "paused", "away"]
    turn = pair.group.enter("train")
    assert turn.resumed["trainer"][0].resumed == (pair.params.tag, tag)
    pair.fails("rollout", "prepare to pause.*guest 'by name' could not prepare", "prepare")
    assert pair.states() == ["paused", "active", "here"]
    # One that refuses after the commit keeps its rank as it was.
    pair.fails("rollout", "pause.*guest 'by name' could not leave", "leave")
    assert pair.states() == ["paused", "active", "here"]
    pair.group.enter("rollout")
    assert pair.states() == ["active", "paused", "away"]
    pair.blocks[0].check()


def test_guest_that_cannot_come_back_fails_the_turn_and_the_next_turn_continues(pair: Pair) -> None:
    pair.group.enter("rollout")
    cause = pair.fails("train", "resume.*guest 'by name' could not come back", "come back")
    assert isinstance(cause, memsaver.GuestError) and cause.resumed == (pair.params.tag,)
    assert (pair.params.state, pair.weights.state) == ("paused", "paused")  # the memory is free for any phase
    pair.group.enter("rollout")
    pair.group.enter("train")
    assert pair.states() == ["paused", "active", "here"]
    pair.blocks[1].check()
    # Contents that such a resume left undefined are refused later.
    pair.group.enter("rollout")
    pair.fails("train", ".*could not come back", "come back", restore=False)
    with pytest.raises(memsaver.Error, match="the phase that was to write them failed"):
        pair.group.enter("train")
    pair.group.enter("train", restore=False)
