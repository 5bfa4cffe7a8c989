"""The leader, in the process of rank 0: runs the turn of all ranks by messages through the store."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from memsaver.distributed.link import Link
from memsaver.distributed.liveness import Watch
from memsaver.distributed.messages import dumps
from memsaver.distributed.ranks import Processes, StoreRank, ranks_of
from memsaver.distributed.reports import Collector
from memsaver.errors import Error, WaitTimeoutError
from memsaver.guests.store import Pace
from memsaver.turns.plan import Plan, TurnOptions
from memsaver.turns.ranks import Rank
from memsaver.turns.turn import Turn, TurnReport, Turns


class Leader:
    """Runs one turn at a time, in a thread of its own. Its own process takes part as the others do."""

    def __init__(self, link: Link, world_size: int, plan: Plan, watch: Watch) -> None:
        self._link, self._plan = link, plan
        self._processes = Processes(link, world_size, watch)
        self._collector = Collector(link, self._processes.hello, world_size, 0)
        self._turns: Turns | None = None  # made in the first turn, when the members of all processes are known
        self._overwriting: dict[int, Turn] = {}  # by number, turns whose bodies write contents
        self._missing: list[int] = []  # the processes that have not called enter()
        self._refused: list[tuple[int, Error]] = []  # turns that could not begin, which the others may wait for

    def run(self, number: int, phase: str, options: TurnOptions) -> None:
        """Runs a turn. Its result or error goes to all processes."""
        begin = time.monotonic()
        try:
            self._processes.begin(number)
            self._end_refused()
            self._link.set("decision", f"{number} open")
            self._gather(number, phase, options, begin)
            turn = self._joined().enter(phase, options, lambda: self._decide(number))
            if turn.unrestored:
                self._overwriting[number] = turn
            fields = {each.name: getattr(turn, each.name) for each in dataclasses.fields(turn)}
            self._link.set("result", dumps({"turn": number, "fields": fields}))
            ending: dict[str, Any] = {"end": "done"}
        except BaseException as error:
            ending = {"end": "failed", "error": error, "cause": error.__cause__}
        # The own process is the last: it may end when it has this, and the thread with it.
        for process in reversed(range(self._processes.count)):
            try:
                self._processes.send(process, ending)
            except Error:  # the store is gone: each process finds this out by itself
                return

    def awaited(self) -> list[int]:
        """The processes for which the turn under way waits. The thread of the caller asks."""
        return self._missing or self._processes.unanswered()

    def refuse(self, number: int, error: Error) -> None:
        """Notes a turn that could not begin, since an earlier one has not ended. The next turn tells the others."""
        self._refused.append((number, error))

    def _end_refused(self) -> None:
        for number, error in self._refused:
            for process in range(self._processes.count):
                self._processes.send(process, {"turn": number, "end": "failed", "error": error, "cause": None})
        self._refused.clear()

    def _gather(self, number: int, phase: str, options: TurnOptions, begin: float) -> None:
        """Waits until all processes have called enter() with the same arguments. Nothing has been asked of them yet."""
        arrived: dict[int, Mapping[str, Any]] = {}
        pace = Pace()
        while True:
            self._processes.look()
            for process, messages in enumerate(self._processes.arrivals):
                while messages:
                    message = messages.popleft()
                    if message["turn"] != number:  # of a turn that has failed before the process came to it
                        continue
                    if "left" in message:
                        self._refuse(phase, process, f"rank {process} left the turn", message["error"])
                    arrived[process] = message
            missing = [process for process in range(self._processes.count) if process not in arrived]
            self._missing = missing
            if not missing:
                break
            for process in missing:
                try:
                    self._processes.check_lives(process)
                except Error as error:
                    self._refuse(phase, process, f"rank {process} is lost", error)
            if options.until is not None and time.monotonic() >= options.until:
                waited = time.monotonic() - begin
                text = f"it has not {self._processes.awaited(missing[0])} (stage 'answer', after {waited:.2f} s)"
                named = ", ".join(f"rank {process}" for process in missing)
                cause = WaitTimeoutError(text, stage="answer", waited_s=waited)
                self._refuse(phase, missing[0], f"{named} did not answer", cause, missing)
            pace.sleep(options.until)
        self._compare(phase, arrived)
        for process in sorted(arrived):
            for failed in arrived[process]["failed"]:
                if failed in self._overwriting and self._turns is not None:
                    self._turns.mark_unwritten(self._overwriting[failed])
        if self._turns is not None:
            self._overwriting = {n: turn for n, turn in self._overwriting.items() if self._turns.awaits(turn)}

    def _compare(self, phase: str, arrived: Mapping[int, Mapping[str, Any]]) -> None:
        mine = arrived[0]
        for process, message in sorted(arrived.items()):
            for what in ("enter", "options"):
                if message[what] != mine[what]:
                    text = (
                        f"rank 0 enters {mine['enter']!r} with {mine['options']}, rank {process} enters "
                        f"{message['enter']!r} with {message['options']}"
                        if what == "options"
                        else f"rank 0 enters {mine['enter']!r}, rank {process} enters {message['enter']!r}"
                    )
                    self._refuse(phase, process, f"{text}; expected the same on all ranks", None)

    def _joined(self) -> Turns:
        """The turns of all members. Raises memsaver.Error if the processes made groups that do not fit."""
        if self._turns is None:
            hellos = [self._processes.hello(process) or {} for process in range(self._processes.count)]
            for process, hello in enumerate(hellos):
                if hello["plan"] != hellos[0]["plan"]:
                    text = f"rank {process} made its group with {hello['plan']}, rank 0 with {hellos[0]['plan']}"
                    raise Error(f"{text}; expected the same phases, backup and restore on all ranks", rank=process)
            members = ranks_of(self._processes, [hello["roles"] for hello in hellos])
            missing = self._plan.roles_in_phases() - {rank.role for rank in members}
            if missing:
                there = ", ".join(map(repr, sorted({rank.role for rank in members}))) or "no members"
                raise Error(
                    f"no rank has a member of the role {min(missing)!r}, which a phase names; there are {there}"
                )
            self._turns = Turns(self._plan, members, self._report)
        return self._turns

    def _decide(self, number: int) -> None:
        """Decides that the turn commits, unless a process has taken this one for dead and decided otherwise."""
        found = self._link.exchange("decision", f"{number} open", f"{number} commit")
        if found != f"{number} commit":
            raise Error("another rank took rank 0 for dead while all ranks prepared, and has aborted the turn")

    def _report(self, title: str, ranks: Sequence[Rank]) -> TurnReport:
        report = self._collector.collect(title)
        doing: dict[Rank, str] = {}
        for rank in ranks:
            if isinstance(rank, StoreRank) and rank.process in report.doing:
                doing[rank] = report.doing[rank.process]
        return TurnReport(report.path, doing)

    def _refuse(
        self, phase: str, process: int, text: str, cause: Exception | None, silent: Sequence[int] = ()
    ) -> NoReturn:
        """``silent``: the processes that have exceeded the deadline of the turn, for the report."""
        why = f": {cause}" if cause is not None else ""
        text, path = f"phase {phase!r} could not be entered: {text}{why}", None
        if silent:
            report = self._collector.collect(text)
            path = report.path
            text += "".join(f"; rank {each} {report.doing[each]}" for each in silent if each in report.doing)
            text += f"; report: {path}" if path is not None else ""
        raise Error(text, phase=phase, role=None, rank=process, report=path) from cause
