"""The ranks of a world agree through its store: a question is decided once, and all ranks read the same outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from memsaver.guests.store import Pace, StoreLink

_LOOK_S = 0.5  # between looks at the answers, while the decision alone is read more often
_RANKS_A_SECOND = 200  # longer with many ranks, each of which reads the answers of all

Place = tuple[int, int]
"""A question: the number of a round, and its own number in the round."""

START: Place = (0, 0)


@dataclass(frozen=True)
class Outcome:
    """The decision of a question.

    ``answers``: by rank; None for a rank without one. ``reason``: why they were not awaited; None: all have answered.
    """

    place: Place
    answers: list[Any]
    reason: Any = None


class Agreement:
    """One rank's part in the questions of a world. Ranks answer them in the order of their places.

    Each rank writes its answer, JSON's types, under a key of its own. The first rank that has all answers, or a reason
    not to wait for them, decides: it writes an outcome under a key of its own, and ``compare_set`` makes this key the
    decision, unless another rank was faster. The decision names two outcomes: the last one, and the last one with the
    answers of all ranks. Values take the place of older ones, so the number of keys is constant.

    All methods raise StoreError if the store fails.

    Args:
        store: The store of the world.
        prefix: The prefix of all keys.
        rank: This rank of the world.
        size: The number of ranks.
    """

    def __init__(self, store: Store, prefix: str, rank: int, size: int) -> None:
        self.link = StoreLink(store, prefix)
        self._rank, self._keys = rank, [f"answer/{each}" for each in range(size)]
        self._look_s = _LOOK_S + size / _RANKS_A_SECOND

    def answer(self, place: Place, answer: Any) -> None:
        """Writes this rank's answer. It is one for all questions up to this place."""
        self.link.set(self._keys[self._rank], _dumps([place, answer]))

    def answers(self) -> list[tuple[Place, Any]]:
        """By rank, the place and the value of its last answer."""
        found = [json.loads(each or f"[{list(START)}, null]") for each in self.link.get_all(self._keys)]
        return [((place[0], place[1]), answer) for place, answer in found]

    def last(self) -> tuple[Outcome, Outcome]:
        """The last decision, and the last one with the answers of all ranks. Of the place START if there is none."""
        while True:
            found = [self._outcome(named) for named in _named(self.link.get("decision"))]
            if found[0] is not None and found[1] is not None:  # else outcomes of later questions have taken their place
                return found[0], found[1]

    def decide(self, place: Place, answers: list[Any], reason: Any = None) -> Outcome:
        """Decides a question, if neither it nor a later one is decided. Returns the last decision."""
        while True:
            text = self.link.get("decision")
            last, agreed = _named(text)
            if (last[0], last[1]) >= place:
                return self._of(place)
            used = {last[2], agreed[2]}  # which others read now
            key = next(key for number in range(3) if (key := f"outcome/{self._rank}/{number}") not in used)
            self.link.set(key, _dumps([place, answers, reason]))
            own = [*place, key]
            wanted = _dumps([own, own if reason is None else agreed])
            if self.link.exchange("decision", text or "", wanted) == wanted:
                return Outcome(place, answers, reason)

    def wait(self, place: Place, until: float | None, reason: Callable[[list[int]], Any]) -> Outcome:
        """Waits for the decision of a question that this rank has answered. Returns it.

        If it was decided without the answers of all ranks, and another question has been decided since, returns that.

        ``reason``: called with the ranks that have not answered, at ``until`` and about twice a second. It returns a
        reason not to wait for them any more, or None.
        """
        pace, look = Pace(), 0.0
        while tuple(_named(self.link.get("decision"))[0][:2]) < place:
            now = time.monotonic()
            if now >= look or (until is not None and now >= until):
                look = now + self._look_s
                found = [answer if at >= place else None for at, answer in self.answers()]
                missing = [rank for rank, answer in enumerate(found) if answer is None]
                given = reason(missing) if missing else None
                if not missing or given is not None:
                    return self.decide(place, found, given)
            pace.sleep()
        return self._of(place)

    def _of(self, place: Place) -> Outcome:
        last, agreed = self.last()
        return agreed if agreed.place == place else last

    def _outcome(self, named: tuple[int, int, str]) -> Outcome | None:
        """None if another outcome has taken its place."""
        number, question, key = named
        if not key:
            return Outcome(START, [])
        place, answers, reason = json.loads(self.link.get(key) or "null")
        return Outcome((number, question), answers, reason) if place == [number, question] else None


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _named(decision: str | None) -> list[tuple[int, int, str]]:
    """The places of two outcomes, and their keys."""
    found: list[list[Any]] = json.loads(decision) if decision else [[*START, ""]] * 2
    return [(number, question, key) for number, question, key in found]
