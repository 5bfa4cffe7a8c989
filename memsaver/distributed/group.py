"""A group over torch.distributed's store: all processes enter the phases together."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as distributed
from torch.distributed import Store

from memsaver.distributed.liveness import Watch, hello, start_heart
from memsaver.distributed.processes import Processes
from memsaver.errors import Error
from memsaver.guests.agreement import Agreement
from memsaver.guests.store import StoreError, StoreLink
from memsaver.policies import TurnBackup, TurnLazy, TurnRestore, seconds
from memsaver.turns.group import BaseGroup
from memsaver.turns.plan import Phases, Plan, TurnOptions
from memsaver.turns.ranks import check_distinct, check_member
from memsaver.turns.reports import Responder
from memsaver.turns.turn import Turn

_STORE_S = 60.0  # for the store to answer at the start
_CLOSE_S = 2.0  # bound of the wait for a heartbeat under way


class Group(BaseGroup):
    """The ranks of all roles in the processes of a torch.distributed job, and the phases that they enter together.

    Every process makes the group, with its own members, and every process calls ``enter()``. The processes agree
    through torch.distributed's store, so no process group is used: they may be suspended or closed. Methods of members
    are called in the thread that called ``enter()``, one after the other.

    The index of a rank in its role follows the order of the processes, and in a process the order of its members.

    Args:
        phases: The tags that are resident in each phase: as for ``memsaver.ray.Group``. The same in all processes.
        backup: As for ``memsaver.ray.Group``. The same in all processes.
        lazy: As for ``memsaver.ray.Group``. The same in all processes.
        restore: As for ``memsaver.ray.Group``. The same in all processes.
        store: A store that all processes of the group reach. None: that of ``torch.distributed.init_process_group()``.
        rank: The rank of this process. None: that of torch.distributed. Needed with ``store``.
        world_size: The number of processes. None: that of torch.distributed. Needed with ``store``.
        name: A name of the group in the store. Groups of one name are made in the same order in all processes.
        heartbeat_timeout: Seconds without a heartbeat after which a process on another host counts as ended. A process
            that holds the GIL sends none. Processes on the same host are looked up by their pid.
        roles: The members of this process by role, one or a list: objects that derive from ``Colocated`` or
            ``AsyncColocated``, or have their methods.

    Raises:
        TypeError: An argument has a wrong type, or a member lacks a method of ``Colocated``.
        ValueError: A member is given twice, no phase has tags, ``backup`` or ``restore`` does not fit the phases,
            ``rank`` is not within ``world_size``, or there is no store.
        memsaver.Error: The store cannot be reached.

    Examples:
        Under ``torchrun`` after ``init_process_group()``, the arguments ``store``, ``rank`` and ``world_size`` are left
        out:

        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> group = memsaver.distributed.Group(
        ...     phases={"rollout": {"worker": ["weights"]}, "train": {"worker": []}},
        ...     worker=memsaver.distributed.Colocated(),
        ...     store=torch.distributed.HashStore(), rank=0, world_size=1,
        ... )
        >>> group.enter("train", timeout=30).paused["worker"][0].paused
        ('weights',)
        >>> group.close()
    """

    def __init__(
        self,
        *,
        phases: Phases,
        backup: Mapping[str, TurnBackup] | None = None,
        lazy: Mapping[str, TurnLazy] | None = None,
        restore: Mapping[str, TurnRestore] | None = None,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        name: str = "group",
        heartbeat_timeout: float = 8.0,
        **roles: Any,
    ) -> None:
        members = {role: _members_of(role, given) for role, given in roles.items()}
        check_distinct((role, each) for role, found in members.items() for each in found)
        plan = Plan(phases, None, backup, restore, lazy)
        silence = seconds(heartbeat_timeout, "heartbeat_timeout")
        store, process, count = _joined(store, rank, world_size)
        until = time.monotonic() + _STORE_S
        link = StoreLink(store, f"memsaver/{name}")
        number = link.call(lambda keys: int(keys.add(f"made/{process}", 1)), until)
        prefix = f"memsaver/{name}/{number}"
        agreement = Agreement(store, prefix, process, count)
        agreement.link.until = until
        agreement.link.set(f"hello/{process}", hello())
        watch = Watch(agreement.link, silence)
        self._processes = processes = Processes(agreement, process, count, plan, members, watch)
        super().__init__(plan, processes)
        self._store = store  # it may serve the other processes
        own = StoreLink(store, prefix, direct=True)  # of a thread
        look = Responder(own, str(process), lambda: processes.doing).look
        self._heart, stop = start_heart(own, process, look)
        self._stop = weakref.finalize(self, stop.set)
        self._broken: str | None = None  # why no further turn can be entered: the store is lost

    def close(self) -> None:
        """Ends the heartbeats of this process. Afterwards ``enter()`` raises memsaver.Error.

        Examples:
            >>> group = memsaver.distributed.Group(
            ...     phases={"rollout": {"worker": ["kv_cache"]}}, worker=memsaver.distributed.Colocated(),
            ...     store=torch.distributed.HashStore(), rank=0, world_size=1,
            ... )
            >>> group.close()
        """
        self._stop()
        self._heart.join(_CLOSE_S)

    def _enter(self, phase: str, options: TurnOptions) -> Turn:
        if not self._stop.alive:
            raise Error("this group is closed, expected a new one")
        if self._broken is not None:
            raise Error(f"this group can enter no phase any more: {self._broken}")
        try:
            turn = super()._enter(phase, options)
        except StoreError as error:
            self._broken = str(error)
            text = f"phase {phase!r} could not be entered: {error}"
            raise Error(text, phase=phase, role=None, rank=None) from error
        except Error:
            if self._processes.interrupt is not None:
                raise self._processes.interrupt from None
            raise
        finally:
            self._processes.doing = "is outside of enter()"
        if self._processes.interrupt is not None:
            raise self._processes.interrupt
        return turn


def _joined(store: Store | None, rank: int | None, world_size: int | None) -> tuple[Store, int, int]:
    if store is None:
        if not distributed.is_initialized():
            raise ValueError("store is None, expected one, or a call of torch.distributed.init_process_group() before")
        store = distributed.distributed_c10d._get_default_store()
        rank = distributed.get_rank() if rank is None else rank
        world_size = distributed.get_world_size() if world_size is None else world_size
    if not isinstance(store, Store):
        raise TypeError(f"store is {store!r}, expected a torch.distributed.Store")
    for option, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option} is {value!r}, expected a number, which a store of its own needs")
    assert rank is not None and world_size is not None
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected one of 0 to {world_size - 1}, since world_size is {world_size}")
    return store, rank, world_size


def _members_of(role: str, given: Any) -> list[Any]:
    members = list(given) if isinstance(given, (list, tuple)) else [given]
    for each in members:
        check_member(role, each)
    return members
