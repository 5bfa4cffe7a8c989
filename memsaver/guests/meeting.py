"""The ranks of a world agree, through its store, on rounds in which all of them open their groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from torch.distributed import PrefixStore, Store

from memsaver.errors import Error
from memsaver.guests.agreement import START, Agreement
from memsaver.guests.store import clone

log = logging.getLogger("memsaver")

_GATHERED, _OPENED, _CLOSED = 1, 2, 3  # the questions of a round. The last one is never decided


class Meeting:
    """One rank's part in the rounds of a world.

    A round asks two questions. ``_GATHERED``: have all ranks joined it? ``_OPENED``: have all of them opened their
    groups in it? A rank joins the first round of which no question is decided.

    - A rank that gives up decides the question that it waits for, by its reason. If that is decided, ranks with time
      left join the next round. If all had joined, it decides ``_OPENED``. So no round stays open after one of its ranks
      has given up, and the groups stay open on all ranks, or all ranks close them again.
    - A rank that cannot reach the store knows no decision, and closes its groups. A rank that was killed may count as
      joined. This round is then not opened, and no later round is gathered.
    - The answer ``_CLOSED`` tells ranks whose groups are open that another rank has closed its own.

    Args:
        store: The store of the world. Calls use a connection of their own.
        name: The prefix of all keys.
        rank: This rank of the world.
        size: The number of ranks.
        timeout: Seconds, for the texts of errors.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout: float) -> None:
        self._store, self._name, self._rank, self._timeout = store, name, rank, timeout
        self._agreement = Agreement(store, name, rank, size)
        self.round = 0  # the last that this rank joined; 0: torch has made the groups

    def gather(self, until: float) -> int:
        """Waits until all ranks have joined a round. Returns its number.

        Raises:
            TimeoutError: Ranks are missing at ``until``. This rank is not counted any more.
            memsaver.Error: The store has failed.
        """
        self._agreement.link.until = until
        first = 0
        try:
            while True:
                number, question = self._agreement.last()[0].place
                if question == _GATHERED:  # this rank's groups are closed, so this round cannot be opened
                    self._agreement.decide((number, _OPENED), [], f"rank {self._rank} opens its groups again")
                self.round = number + 1
                first = first or self.round
                place = self.round, _GATHERED
                self._agreement.answer(place, True)
                given_up = f"rank {self._rank} gave up"
                found = self._agreement.wait(place, until, lambda _: given_up if time.monotonic() >= until else None)  # noqa: B023
                if found.place == place and found.reason is None:
                    self._clean()
                    return self.round
                if time.monotonic() >= until:
                    raise TimeoutError(self._missing(first))
        except BaseException as error:
            self.give_up(error)
            raise

    def settle(self, until: float) -> None:
        """This rank has opened its groups. Waits until all ranks have.

        Raises:
            memsaver.Error: A rank has failed, or has not opened its groups at ``until``: all ranks close them again. Or
                the store has failed.
        """

        def late(missing: list[int]) -> str | None:
            if time.monotonic() < until:
                return None
            return f"the ranks {listed(missing)} have not opened their groups in time"

        self._agreement.link.until = until
        self._agreement.answer((self.round, _OPENED), True)
        found = self._agreement.wait((self.round, _OPENED), until, late)
        if found.reason is not None:
            raise _closed_again(found.reason)

    def check(self, until: float) -> None:
        """Raises memsaver.Error if a rank has failed to open its groups in this round."""
        self._agreement.link.until = until
        last, agreed = self._agreement.last()
        if last.place >= (self.round, _OPENED) > agreed.place:
            raise _closed_again(last.reason)

    def give_up(self, error: BaseException) -> bool:
        """This rank does not open its groups in the round, if it is not too late.

        Returns:
            Whether it is too late: all ranks have opened them.
        """
        if not self.round:
            return False
        reason = f"rank {self._rank} gave up: {type(error).__name__}: {error}"
        self._agreement.link.until = time.monotonic()
        try:
            found = self._agreement.decide((self.round, _GATHERED), [], reason)
            if found.reason is None:
                found = self._agreement.decide((self.round, _OPENED), [], reason)
            return bool(found.reason is None)
        except Error as second:
            log.warning("the other ranks could not be told that this rank gave up: %s", second)
            return False

    def is_intact(self, until: float) -> bool:
        """Whether no rank has closed its groups since this rank opened them."""
        self._agreement.link.until = until
        place = (self.round, _OPENED) if self.round else START
        return self._agreement.last()[1].place == place and all(at == place for at, _ in self._agreement.answers())

    def close(self, until: float) -> None:
        """This rank closes the groups of the round. A store that fails is no error."""
        self._agreement.link.until = until
        try:
            self._agreement.answer((self.round, _CLOSED), True)
        except Error as error:
            log.warning("the other ranks could not be told that this rank closes its groups: %s", error)

    def store_of_round(self, until: float) -> Store:
        """A store for the groups that are opened in this round. It has a connection and a prefix of its own."""
        prefix = f"{self._name}/{self.round}/groups"
        return self._agreement.link.call(lambda _: PrefixStore(prefix, clone(self._store)), until)

    def _missing(self, first: int) -> str:
        """The text of an error. ``first``: the first round that this rank has joined meanwhile."""
        joined = [place[0] for place, _ in self._agreement.answers()]
        missing = [rank for rank, number in enumerate(joined) if number < first]
        if missing:
            return f"the ranks {listed(missing)} did not come back within {self._timeout:g} s"
        gone = [rank for rank, number in enumerate(joined) if number < self.round]
        return f"all ranks came back, but not within the same {self._timeout:g} s; the ranks {listed(gone)} gave up"

    def _clean(self) -> None:
        """Deletes torch's keys of earlier rounds, which no rank reads any more, as far as the store can."""

        def clean(store: Any) -> None:
            for key in store.list_keys():
                number = key.partition("/")[0]
                if number.isdigit() and int(number) < self.round:
                    store.delete_key(key)

        try:
            self._agreement.link.call(clean, self._agreement.link.until)
        except (Error, AttributeError, NotImplementedError) as error:  # versions and stores differ
            log.debug("the store keeps the keys of earlier rounds: %s", error)


def _closed_again(reason: str) -> Error:
    return Error(f"the groups of all ranks are closed again: {reason}")


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(each) for each in ranks)
