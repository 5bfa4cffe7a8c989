"""The guest of process groups: their connections are closed before a pause and opened again after a resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, ProcessGroup

from memsaver._arguments import seconds, several
from memsaver._guests import Guest
from memsaver.errors import Error
from memsaver.guests.reopening import ReopeningGroup
from memsaver.guests.waits import within

log = logging.getLogger("memsaver")

_POLL_S = 0.001
_installed: ProcessGroups | None = None


@dataclass
class _Record:
    """A group that was wrapped, and the call that made its connections."""

    group: ReopeningGroup
    args: tuple[Any, ...]
    options: dict[str, Any]
    device: int | None  # of CUDA, current when the group was made
    seconds: list[float] = field(default_factory=list)  # of its last close, and of its last opening


class ProcessGroups(Guest):
    """Closes the process groups that were made after it, and opens them again in the same order.

    Make it before ``torch.distributed.init_process_group()``: every later group of one of ``backends``, the world
    included, is an object that outlives its connections. Meshes, DTensors and modules that hold it stay valid. While
    the connections are closed, a collective raises memsaver.Error.

    Closing and opening is collective: all ranks of the world pause and resume the guest's tags, and all have made the
    same groups. A rank that comes back waits for all others, at most ``timeout`` seconds, and the error names the ranks
    that did not come. Collectives that have not ended ``timeout`` seconds after the beginning of a pause refuse it.

    Splits of communicators (``torch.distributed.split_group()``) are not used: groups that torch would split from the
    world get connections of their own.

    Args:
        tags: As for ``memsaver.Guest``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.
        backends: The groups to wrap: those with one of these backends. Others stay open.
        timeout: Seconds that closing, and opening, may take.

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
        >>> tensor = torch.ones(1)
        >>> torch.distributed.all_reduce(tensor)
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
        timeout: float = 60.0,
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
        self._turn = 0  # counts the closings, on all ranks alike
        self._attempt = 0  # counts the attempts to open the groups of this turn
        _installed = self
        self._create = c10d._new_process_group_helper  # torch's own
        c10d._new_process_group_helper = self._wrapped
        self._split_source = getattr(c10d, "_get_split_source", None)
        c10d._get_split_source = _no_split_source

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

    @property
    def seconds_by_group(self) -> dict[str, list[float]]:
        """By group, the seconds of its last closing and, if it is open again, of its last opening."""
        return {each.group.group_name: list(each.seconds) for each in self._live()}

    def prepare(self) -> None:
        """Waits until all collectives have ended.

        Raises:
            TimeoutError: A collective whose ``Work`` somebody holds has not ended after ``timeout`` seconds.
        """
        deadline = time.monotonic() + self.timeout
        while names := [each.group.group_name for each in self._live() if each.group.is_open and each.group.pending()]:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"collectives of the groups {_listed(names)} have not ended after {self.timeout:g} s, "
                    "expected all of their ranks to have made the same calls"
                )
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Closes the groups, beginning with the one that was made last."""
        self._turn += 1
        self._attempt = 0
        for each in reversed(self._live()):
            self._close(each)

    def come_back(self) -> None:
        """Opens the groups in the order in which they were made, once all ranks of the world have come.

        Raises:
            TimeoutError: Ranks are missing, or a group could not be opened, after ``timeout`` seconds.
            Exception: A group could not be opened.
        """
        deadline = time.monotonic() + self.timeout
        closed = [each for each in self._live() if not each.group.is_open]
        if not closed:
            return
        self._await_ranks(deadline)
        self._attempt += 1
        try:
            for each in closed:
                self._open(each, deadline)
        except BaseException:
            for each in reversed(closed):  # the next attempt opens all of them anew
                if each.group.is_open:
                    self._close(each)
            raise

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
        _replace(made, group)
        self._records.append(_Record(group, args, options, _device(options.get("device_id"))))
        return group, store

    def _is_chosen(self, made: ProcessGroup) -> bool:
        backends = str(c10d._world.pg_backend_config[made]).lower()  # such as "cpu:gloo,cuda:nccl"
        return any(part.rpartition(":")[2] in self.backends for part in backends.split(","))

    def _close(self, each: _Record) -> None:
        """Closes a group. Connections that do not close in time are aborted: they need no other rank then."""
        since = time.monotonic()
        connections = each.group.connections
        try:
            _in_thread(connections.shutdown, self.timeout, each, "closed")
        except Exception as error:
            log.warning("process group %r was aborted: %s", each.group.group_name, error)
            connections.abort()
        each.group.connections = None
        each.seconds = [time.monotonic() - since]

    def _open(self, each: _Record, deadline: float) -> None:
        since = time.monotonic()
        left = max(0.0, deadline - since)
        each.group.connections = _in_thread(lambda: self._connect(each), left, each, "opened")
        each.seconds = [*each.seconds[:1], time.monotonic() - since]

    def _connect(self, each: _Record) -> ProcessGroup:
        """Makes connections by torch's function under a name of their own, which makes all keys in the store new."""
        args, options = list(each.args), dict(each.options)
        name = f"{each.group.group_name}@{self._turn}.{self._attempt}"
        if "group_name" in options:
            options["group_name"] = name
        else:
            args[_NAME_AT] = name
        options.pop("pg_tag", None)  # torch returns an existing group of this tag
        made, _ = self._create(*args, **options)
        _forget(made)
        return made

    def _await_ranks(self, deadline: float) -> None:
        """Waits until all ranks have closed their groups and come back. Raises TimeoutError naming those missing."""
        world = c10d._get_default_group()
        store = PrefixStore(f"memsaver/{self.name}/{self._turn}", c10d._get_default_store())
        within(lambda: store.set(str(world.rank()), "back"), self._left(deadline), "no answer from the store")
        missing = [rank for rank in range(world.size()) if not self._has_come(store, rank, deadline)]
        if missing:
            raise TimeoutError(f"the ranks {_listed(missing)} did not come back within {self.timeout:g} s")

    def _has_come(self, store: PrefixStore, rank: int, deadline: float) -> bool:
        try:
            store.wait([str(rank)], timedelta(seconds=max(0.01, self._left(deadline))))
        except Exception:  # each kind of store has its own for a wait that timed out
            if self._left(deadline) > 0:
                raise
            return False
        return True

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - time.monotonic())


_NAME_AT = 5  # the place of group_name among the arguments of torch's function


def _no_split_source(pg: ProcessGroup) -> Any:
    return None


def _device(bound: torch.device | None) -> int | None:
    """The device of a group on CUDA: the one that it is bound to, else the current one."""
    if bound is not None:
        return bound.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _in_thread(function: Callable[[], Any], timeout: float, each: _Record, verb: str) -> Any:
    """The result of a function on the group's device, within a bound."""

    device = _device(None) if each.device is None else each.device

    def run() -> Any:
        if device is not None:
            torch.cuda.set_device(device)  # it is of a thread
        return function()

    return within(run, timeout, f"process group {each.group.group_name!r} could not be {verb}")


def _registers() -> list[dict[ProcessGroup, Any]]:
    """torch's registers of groups by their object."""
    world: Any = c10d._world
    return [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag]


def _replace(old: ProcessGroup, new: ProcessGroup) -> None:
    """Puts ``new`` in the place of ``old`` in torch's registers."""
    world = c10d._world
    name = world.pg_names[old]
    for register in _registers():
        if old in register:
            register[new] = register.pop(old)
    for groups in world.tags_to_pg.values():
        groups[:] = [new if each is old else each for each in groups]
    c10d._unregister_process_group(name)
    c10d._register_process_group(name, new)


def _forget(made: ProcessGroup) -> None:
    """Removes a group from torch's registers. It stays open."""
    world = c10d._world
    name = world.pg_names[made]
    for register in _registers():
        register.pop(made, None)
    for tag, groups in list(world.tags_to_pg.items()):
        groups[:] = [each for each in groups if each is not made]
        if not groups:
            del world.tags_to_pg[tag]
    c10d._unregister_process_group(name)


def _listed(names: Iterable[object]) -> str:
    return ", ".join(str(each) for each in names)
