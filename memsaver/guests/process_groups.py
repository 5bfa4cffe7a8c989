"""The guest of process groups: their connections are closed before a pause and opened again after a resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup, Store

from memsaver._adapter import note
from memsaver._guests import Guest
from memsaver._results import Lane
from memsaver.errors import Error
from memsaver.guests.meeting import Meeting, listed
from memsaver.guests.reopening import ReopeningGroup
from memsaver.policies import seconds, several

log = logging.getLogger("memsaver")

_POLL_S = 0.001
_WATCH_S = 0.1
_installed: ProcessGroups | None = None


@dataclass(frozen=True)
class _Record:
    """A group that was wrapped, and the call that made its connections."""

    group: ReopeningGroup
    args: tuple[Any, ...]
    options: dict[str, Any]
    device: int | None  # of CUDA: the one that the group is bound to, else the current one when it was made


class ProcessGroups(Guest):
    """Closes the process groups that were made after it, and opens them again in the same order.

    Make it before ``torch.distributed.init_process_group()``: every later group of one of ``backends``, the world
    included, is an object that outlives its connections. Meshes, DTensors and modules that hold it stay valid. While
    the connections are closed, a collective raises memsaver.Error.

    Opening is collective: all ranks of the world pause and resume the guest's tags, and all have made the same groups.
    A resume opens the groups of all ranks, or closes those of all ranks again. After failures on any ranks, the groups
    are opened as soon as all ranks resume at the same time. The ranks agree through the store of the world.

    Groups that torch would split from the world (``torch.distributed.split_group()``) get connections of their own.

    Args:
        tags: As for ``memsaver.Guest``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.
        backends: The groups to wrap: those with one of these backends. Others stay open.
        timeout: Seconds. A pause waits at most so long for collectives, and so long until all groups are closed. A
            resume waits at most so long until all ranks have come and all groups are open. A store that does not answer
            adds at most 10 s.

    Raises:
        memsaver.Error: There is such a guest in this process already, or the world has been made.

    Examples:
        >>> groups = memsaver.guests.ProcessGroups("params", backends=["gloo"])
        >>> memsaver.register(groups)
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> done = memsaver.pause("params")
        >>> groups.closed
        ['0']
        >>> done = memsaver.resume("params")
        >>> torch.distributed.all_reduce(torch.ones(1))
        >>> torch.distributed.destroy_process_group()
        >>> memsaver.unregister(groups)
        >>> groups.unwrap()
    """

    def __init__(
        self,
        tags: str | Iterable[str],
        *,
        name: str = "process groups",
        order: int = 0,
        backends: Iterable[str] = ("nccl",),
        timeout: float = 20.0,
    ) -> None:
        global _installed
        super().__init__(name, tags, order=order)
        self.backends = tuple(several(backends, "backends"))
        self.timeout = seconds(timeout)
        if _installed is not None:
            raise Error(f"process groups are wrapped by the guest {_installed.name!r}, expected one such guest")
        if c10d.is_initialized():
            raise Error("torch.distributed is initialized, expected this guest to be made before init_process_group()")
        self._records: list[_Record] = []
        self._meeting: Meeting | None = None
        self._world: ProcessGroup | None = None  # that of the meeting
        _installed = self
        self._create = c10d._new_process_group_helper  # torch's own
        c10d._new_process_group_helper = self._wrapped
        self._split_source = getattr(c10d, "_get_split_source", None)
        c10d._get_split_source = _no_split_source  # type: ignore[assignment]  # its arguments differ by version

    def unwrap(self) -> None:
        """Ends the wrapping of new groups. Groups that were wrapped stay as they are."""
        global _installed
        if _installed is self:
            _installed = None
            c10d._new_process_group_helper = self._create
            if self._split_source is not None:
                c10d._get_split_source = self._split_source

    @property
    def closed(self) -> list[str]:
        """The names of the groups that are closed now, in the order in which they were made."""
        return [each.group.group_name for each in self._live() if not each.group.is_open]

    def prepare(self) -> None:
        """Waits until all collectives have ended.

        Raises:
            TimeoutError: A collective whose ``Work`` object exists has not ended after ``timeout`` seconds.
        """
        deadline = time.monotonic() + self.timeout
        while names := [each.group.group_name for each in self._live() if each.group.is_open and each.group.pending()]:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"collectives of the groups {listed(names)} have not ended after {self.timeout:g} s, "
                    "expected all of their ranks to have made the same calls"
                )
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Closes the groups, beginning with the one that was made last. Connections that do not close are aborted."""
        until = time.monotonic() + self.timeout
        if any(each.group.is_open for each in self._live()):
            self._of_world().close(_most(until))
            self._close_all(until)

    def come_back(self) -> None:
        """Opens the groups in the order in which they were made, once all ranks of the world have come.

        Raises:
            Exception: Ranks are missing after ``timeout`` seconds, or a rank could not open a group. The groups of all
                ranks are closed again.
        """
        until = time.monotonic() + self.timeout
        if not c10d.is_initialized():
            return
        meeting = self._of_world()
        live = self._live()  # none on a rank outside of all groups, for which the others wait as well
        if all(each.group.is_open for each in live) and meeting.is_intact(until):
            return
        self._close_all(until)  # those that an interrupted call left open, or that were made since the pause
        meeting.gather(until)
        try:
            most = _most(until)
            store = meeting.store_of_round(most)
            for each in live:
                self._open(each, store, meeting, most)
            meeting.settle(most)
        except BaseException as error:
            if not meeting.give_up(error):
                self._close_all(until)
            raise

    def _of_world(self) -> Meeting:
        world = c10d._get_default_group()
        if self._meeting is None or self._world is not world:
            name = f"memsaver/{self.name}"
            self._meeting = Meeting(c10d._get_default_store(), name, world.rank(), world.size(), self.timeout)
            self._world = world
        return self._meeting

    def _live(self) -> list[_Record]:
        """The groups that have not been destroyed."""
        self._records = [each for each in self._records if each.group in c10d._world.pg_map]
        return self._records

    def _wrapped(self, *args: Any, **options: Any) -> Any:
        """In place of torch's function that makes all groups."""
        made, store = self._create(*args, **options)
        if type(made) is not ProcessGroup or not self._is_chosen(made):
            return made, store
        name = c10d._world.pg_names[made]
        group = ReopeningGroup(made, str(name), str(made.group_desc))
        _put(group, made)
        bound = options.get("device_id")
        self._records.append(_Record(group, args, options, _current_device() if bound is None else bound.index))
        return group, store

    def _is_chosen(self, made: ProcessGroup) -> bool:
        backends = str(c10d._world.pg_backend_config[made]).lower()  # such as "cpu:gloo,cuda:nccl"
        return any(part.rpartition(":")[2] in self.backends for part in backends.split(","))

    def _close_all(self, until: float) -> None:
        most = _most(until)
        for each in reversed(self._live()):
            if each.group.is_open:
                self._close(each, most, until)

    def _close(self, each: _Record, most: float, until: float) -> None:
        """Closes a group. Connections that are not closed at ``most`` are aborted: they need no other rank then."""
        connections = each.group.connections
        each.group.connections = None  # first: a call that is interrupted leaves the group closed
        try:
            _within(connections.shutdown, most, each, "closed")
        except Exception as error:
            log.warning("process group %r is aborted: %s", each.group.group_name, error)
            try:
                _within(connections.abort, until, each, "aborted")
            except Exception as second:
                log.error("process group %r was not aborted: %s", each.group.group_name, second)

    def _open(self, each: _Record, store: Store, meeting: Meeting, until: float) -> None:
        connect = partial(self._connect, each, store, meeting.round)
        watch = partial(meeting.check, until)
        each.group.connections = _within(connect, until, each, "opened", ProcessGroup.abort, watch)

    def _connect(self, each: _Record, store: Store, number: int) -> ProcessGroup:
        """Makes connections by torch's function, under a name of their own."""
        args, options = list(each.args), dict(each.options)
        for name, value in (("store", store), ("group_name", f"{each.group.group_name}@{number}")):
            if name in options:
                options[name] = value
            else:
                args[_PLACES[name]] = value
        options.pop("pg_tag", None)  # torch returns an existing group of this tag
        made, _ = self._create(*args, **options)
        _put(None, made)
        return made


_PLACES = {"backend": 3, "store": 4, "group_name": 5}  # among the arguments of torch's function
_MOST = 0.75


def _most(until: float) -> float:
    """The end of the first attempt. The rest of the time until ``until`` is for its undoing, or for an abort."""
    now = time.monotonic()
    return now + _MOST * max(0.0, until - now)


def _no_split_source(*_: Any) -> None:
    """Of a group; from torch 2.15 on also of a backend."""


def _current_device() -> int | None:
    """The device of CUDA that is current in this thread, or None before torch uses CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _within(
    function: Callable[[], Any],
    until: float,
    each: _Record,
    verb: str,
    discard: Callable[[Any], object] = lambda result: None,
    watch: Callable[[], object] = lambda: None,
) -> Any:
    """The result of a call for a group in a thread of its own, since calls of torch cannot be interrupted.

    Raises its error, or TimeoutError at ``until``. The thread then goes on, and the exit of the interpreter waits 4 s
    for it at most. ``discard``: called with a result that comes too late. ``watch``: called every 0.1 s meanwhile; its
    error ends the wait.
    """
    device = _current_device() if each.device is None else each.device
    began = time.monotonic()

    def run() -> Any:
        if device is not None:
            torch.cuda.set_device(device)  # it is of a thread
        return function()

    future = Lane("memsaver guest").submit(run)
    try:
        while wait([future], max(0.0, min(until - time.monotonic(), _WATCH_S))).not_done:
            if time.monotonic() >= until:
                took = round(max(0.0, until - began), 2)
                raise TimeoutError(f"process group {each.group.group_name!r} could not be {verb} within {took:g} s")
            watch()
    except BaseException:
        future.add_done_callback(lambda done: done.exception() or discard(done.result()))
        raise
    return future.result()


def _put(new: ProcessGroup | None, old: ProcessGroup) -> None:
    """Puts a group in the place of another one in torch's registers. None: only removes the other one."""
    world: Any = c10d._world
    name = world.pg_names[old]
    for register in (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
    ):  # fmt: skip
        if old in register:
            value = register.pop(old)
            if new is not None:
                register[new] = value
    for tag, groups in list(world.tags_to_pg.items()):
        groups[:] = [new if each is old else each for each in groups if each is not old or new is not None]
        if not groups:
            del world.tags_to_pg[tag]
    c10d._unregister_process_group(name)
    if new is not None:
        c10d._register_process_group(name, new)
        note("process groups")
