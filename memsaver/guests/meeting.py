"""The ranks of a world agree, through its store, on rounds in which all of them open their groups."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, Store

from memsaver.errors import Error
from memsaver.guests.store import ANSWER_S, Pace, StoreLink, clone

log = logging.getLogger("memsaver")

_YES = "yes"
_OF_A_ROUND = ("came", "gathered", "done", "opened", "closed")


class Meeting:
    """One rank's part in the rounds of a world.

    A round has a number and asks two questions. ``gathered``: have all ranks joined it? ``opened``: have all of them
    opened their groups in it? The store has the number of the newest round and, for each rank, the last round that it
    joined.

    - A question is decided once, by the first write to a key without a value (``compare_set``). All ranks read the same
      decision.
    - A rank joins the newest round if ``gathered`` is undecided and the rank has not joined this round before.
      Otherwise it makes the next round the newest one. So each rank counts once in a round.
    - The rank that joins last writes "yes" to ``gathered``. A rank that gives up writes its reason. If the reason is
      the decision, the round is over, and the ranks with time left join the next round. If "yes" is the decision, the
      rank writes its reason to ``opened``. So no round stays open after one of its ranks has given up.
    - The rank that has opened its groups last writes "yes" to ``opened``. A rank that fails, or that waits too long,
      writes its reason. So the groups stay open on all ranks, or all ranks close them again.

    A rank that cannot reach the store knows no decision, and closes its groups. A rank that was killed may be counted
    in the newest round. This round is then not opened, and no later round is gathered.

    A rank that closes the groups of a round marks the round. So a rank whose groups are open can find out whether the
    others have closed theirs.

    When all ranks have joined a round, no rank reads the keys of earlier rounds any more. The rank that joined last
    deletes them.

    Args:
        store: The store of the world. Calls use a connection of their own.
        name: The prefix of all keys.
        rank: This rank of the world.
        size: The number of ranks.
        timeout: Seconds, for the texts of errors.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout: float) -> None:
        self._store, self._name, self._rank, self._size, self._timeout = store, name, rank, size, timeout
        self._link = StoreLink(store, name)
        self.round = 0  # the last that this rank joined; 0: torch has made the groups

    def gather(self, until: float) -> int:
        """Waits until all ranks have joined a round. Returns its number.

        Raises:
            TimeoutError: Ranks are missing at ``until``. This rank is not counted any more.
            memsaver.Error: The store has failed.
        """
        first = 0
        try:
            while True:
                number = self._link.call(self._join, until + ANSWER_S)
                first = first or number
                if self._decided(f"{number}/gathered", until, f"rank {self._rank} gave up") == _YES:
                    return number
                if time.monotonic() >= until:
                    raise TimeoutError(self._link.call(partial(self._missing, first, number), until + ANSWER_S))
        except BaseException as error:
            self.give_up(error)
            raise

    def settle(self, until: float) -> None:
        """This rank has opened its groups. Waits until all ranks have.

        Raises:
            memsaver.Error: A rank has failed, or has not opened its groups at ``until``: all ranks close them again. Or
                the store has failed.
        """
        self._link.call(self._note_opened, until + ANSWER_S)
        decision = self._decided(f"{self.round}/opened", until, None)
        if decision != _YES:
            raise _closed_again(decision)

    def check(self, until: float) -> None:
        """Raises memsaver.Error if a rank has failed to open its groups in this round."""
        found = self._link.call(lambda store: _decision(store, f"{self.round}/opened"), until)
        if found is not None and found != _YES:
            raise _closed_again(found)

    def give_up(self, error: BaseException) -> bool:
        """This rank does not open its groups in the round, if it is not too late.

        Returns:
            Whether it is too late: all ranks have opened them.
        """
        reason = f"rank {self._rank} gave up: {type(error).__name__}: {error}"
        try:  # after a call under way, which may be about to join a round
            return self._link.call(lambda store: self._refuse(store, self.round, reason), time.monotonic() + ANSWER_S)
        except Error as second:
            log.warning("the other ranks could not be told that this rank gave up: %s", second)
            return False

    def is_intact(self, until: float) -> bool:
        """Whether no rank has closed its groups since this rank opened them."""
        return self._link.call(self._is_intact, until)

    def close(self, until: float) -> None:
        """This rank closes the groups of the round. A store that fails is no error."""
        try:
            self._link.call(lambda store: store.set(f"{self.round}/closed", _YES), until)
        except Error as error:
            log.warning("the other ranks could not be told that this rank closes its groups: %s", error)

    def store_of_round(self, until: float) -> Store:
        """A store for the groups that are opened in this round. It has a connection and a prefix of its own."""
        return self._link.call(lambda _: PrefixStore(f"{self._name}/{self.round}/groups", clone(self._store)), until)

    def _decided(self, key: str, until: float, reason: str | None) -> str:
        """Waits for a decision. At the bound this rank decides, by its reason. None: that ranks are late."""
        pace = Pace()
        while (found := self._link.call(lambda store: _decision(store, key), until + ANSWER_S)) is None:
            if time.monotonic() >= until:
                decide = lambda store: _decided(store, key, reason or self._late(store))  # noqa: E731
                return self._link.call(decide, until + ANSWER_S)
            pace.sleep(until)
        return found

    def _join(self, store: Any) -> int:
        while True:
            number = store.add("round", 0)
            joined = store.add(self._note("joined"), 0)
            if number and joined < number and _decision(store, f"{number}/gathered") is None:
                break
            # This rank's groups are closed, so the round that it had joined is over.
            if number and joined >= number:
                self._refuse(store, number, f"rank {self._rank} opens its groups again")
            store.compare_set("round", str(number), str(number + 1))
        self.round = number
        store.set(self._note("joined"), str(number))
        if store.add(f"{number}/came", 1) == self._size and _decided(store, f"{number}/gathered", _YES) == _YES:
            _clean(store, int(number))
        return int(number)

    def _note_opened(self, store: Any) -> None:
        store.set(self._note("opened"), str(self.round))
        if store.add(f"{self.round}/done", 1) == self._size:
            _decided(store, f"{self.round}/opened", _YES)

    def _late(self, store: Any) -> str:
        late = [each for each in range(self._size) if store.add(f"rank {each}/opened", 0) < self.round]
        return f"the ranks {_listed(late)} have not opened their groups in time"

    def _is_intact(self, store: Any) -> bool:
        if store.add("round", 0) != self.round:
            return False
        if self.round and not self._refuse(store, self.round, f"rank {self._rank} opens its groups again"):
            return False
        return not store.check([f"{self.round}/closed"])

    def _refuse(self, store: Any, number: int, reason: str) -> bool:
        """Decides that the round is not opened, if nothing else is decided. Returns whether it is."""
        if not number:  # torch has made the groups
            return False
        if _decided(store, f"{number}/gathered", reason) != _YES:
            return False
        return _decided(store, f"{number}/opened", reason) == _YES

    def _missing(self, first: int, last: int, store: Any) -> str:
        """The text of an error. ``first``, ``last``: the rounds that this rank has joined meanwhile."""
        joined = [store.add(f"rank {each}/joined", 0) for each in range(self._size)]
        missing = [rank for rank, number in enumerate(joined) if number < first]
        if missing:
            return f"the ranks {_listed(missing)} did not come back within {self._timeout:g} s"
        gone = [rank for rank, number in enumerate(joined) if number < last]
        return f"all ranks came back, but not within the same {self._timeout:g} s; the ranks {_listed(gone)} gave up"

    def _note(self, what: str) -> str:
        return f"rank {self._rank}/{what}"


def _decided(store: Any, key: str, value: str) -> str:
    """The decision of a question. ``value`` if there was none."""
    return str(store.compare_set(key, "", value).decode())


def _decision(store: Any, key: str) -> str | None:
    return str(store.get(key).decode()) if store.check([key]) else None


def _clean(store: Any, number: int) -> None:
    """Deletes the keys of the rounds before this one, those of torch included, as far as the store can."""
    first = store.add("cleaned", 0)
    try:
        if hasattr(store, "list_keys"):  # older versions of torch lack it
            keys = [key for key in store.list_keys() if _round_of(key) < number]
        else:
            keys = [f"{each}/{name}" for each in range(first, number) for name in _OF_A_ROUND]
        for key in keys:
            store.delete_key(key)
        store.set("cleaned", str(number))
    except (RuntimeError, NotImplementedError) as error:
        log.debug("the store keeps the keys of earlier rounds: %s", error)


def _round_of(key: str) -> float:
    """The round that a key belongs to. Infinity for keys of all rounds."""
    first = key.partition("/")[0]
    return int(first) if first.isdigit() else math.inf


def _closed_again(reason: str) -> Error:
    return Error(f"the groups of all ranks are closed again: {reason}")


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(each) for each in ranks)
