"""Regions: their class, the function that makes them, look-up by tag and by address, and their backups."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from memsaver import _core, _guests
from memsaver._adapter import adapter, loaded, wanted
from memsaver.broker import pool_client
from memsaver.errors import Error, RegionPausedError, WaitTimeoutError
from memsaver.policies import (
    BACKUPS,
    READERS_S,
    Backup,
    Bounds,
    Derived,
    LazyMode,
    Restore,
    check_backup,
    check_tag,
    device_name,
)

if TYPE_CHECKING:
    import torch

    from memsaver.transitions import Transition

_NO_FILL, *FILLS = _core.FILLS
Ranges = list[tuple[int, int]]  # addresses, or offsets within a region, and bytes


class Coming(NamedTuple):
    """The resume of a late region in the background. ``residence``: of the region before."""

    future: futures.Future[Any]
    phase: str
    residence: int


_rebuilding = threading.local()  # ``now``: this thread calls Derived.rebuild, and waits for no late region


@contextmanager
def rebuilding() -> Iterator[None]:
    _rebuilding.now = True
    try:
        yield
    finally:
        _rebuilding.now = False


class Region:
    """Fixed addresses on a device, over memory that can be released and restored.

    ``memsaver.region()`` makes regions. A region lasts until ``close()``.

    On a CUDA device, a with statement places every torch allocation of the current thread in the region, those of
    backward passes included. On the host driver, it places the results of torch's factory functions there. Regions can
    be nested, entered again, and entered by several threads at once. Entering a region raises RegionPausedError if the
    region is not active, and memsaver.Error if it is frozen and its contents are copied. A with statement in a
    coroutine must not await: other coroutines of the thread would allocate in the region, and its end raises
    memsaver.Error.

    Attributes:
        tag: The name by which calls select the region.
        device: ``"cpu"`` or ``"cuda:N"``.
        backup: The policy: ``"none"``, ``"host"``, ``"disk"``, or a ``memsaver.Derived``.
        frozen: Whether the contents do not change after the first pause.
        fill: The value of memory without contents: ``"zero"``, ``"poison"`` or ``"keep"``, or None for the rule of
            ``region()``.
        one_handle: Whether each segment has one handle of the driver.
        written_in_use: Whether ``memsaver.check_written()`` leaves the region out.
        same_as: The name of the copy that processes keep together. None: the region has a copy of its own.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> with weights:
        ...     tensor = torch.ones(4)
        >>> _ = weights.pause()
        >>> weights.state, weights.mapped_bytes
        ('paused', 0)
        >>> _ = weights.resume()
        >>> tensor
        tensor([1., 1., 1., 1.])
    """

    tag: str
    device: str
    backup: str | Derived
    frozen: bool
    fill: str | None
    one_handle: bool
    written_in_use: bool = False
    same_as: str | None = None
    _common: Any = None  # the core's memory of the copy that processes keep together
    _handle: Any  # the region of the core, which stays when it was closed
    _coming: Coming | None = None
    _pool_is_kept = False  # by the program, since a close that may have failed later

    def __init__(self, core: Any) -> None:
        self._handle = core
        self.tag = core.tag
        self.device = core.device
        self.backup = core.backup
        self.frozen = core.frozen
        self.fill = core.fill if core.fill in FILLS else None
        self.one_handle = core.one_handle

    @property
    def _core(self) -> Any:
        """The region of the core. Raises memsaver.Error if it was closed, and in a forked child."""
        if self._handle.closed:
            raise Error(f"region {self.tag!r} was closed")
        return self._handle

    @property
    def _index(self) -> int:
        """The number of its device; 0 for the host driver."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def state(self) -> str:
        """One of ``"active"``, ``"pausing"``, ``"paused"``, ``"resuming"`` and ``"lost"``."""
        return str(self._core.state)

    @property
    def residence(self) -> int:
        """A number that increases with each resume. If it has changed, contents without a backup are gone."""
        return int(self._core.residence)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the segments in use: requested by torch or by ``empty()``, and not freed."""
        return int(self._core.allocated_bytes)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of device memory that the region holds now."""
        return int(self._core.mapped_bytes)

    @property
    def offered_bytes(self) -> int:
        """Bytes of device memory that a lazy pause has left to whoever needs it."""
        return int(self._core.offered_bytes)

    @property
    def backup_bytes(self) -> int:
        """Bytes of contents in host memory or on disk now. A frozen region has them from its first pause on."""
        return int(self._core.backup_bytes)

    @property
    def discarded(self) -> bool:
        """Whether the last pause discarded contents that the region's own policy would have kept.

        True after a pause with ``backup="none"`` of a region with another policy, until the next resume.
        """
        return bool(self._core.discarded)

    def owns(self, address: int) -> bool:
        """Tests whether an address lies in the region.

        Args:
            address: A virtual address, such as ``tensor.data_ptr()``.

        Returns:
            True for each address of the region's segments, in every state of the region.

        Examples:
            >>> kv = memsaver.region("kv_cache", device="cpu")
            >>> kv.owns(kv.empty(16).data_ptr()), kv.owns(torch.empty(16).data_ptr())
            (True, False)
        """
        return bool(self._core.owns(address))

    @property
    def pool(self) -> torch.cuda.MemPool:
        """A ``torch.cuda.MemPool`` over the region, for code that captures graphs itself.

        Pass it as ``torch.cuda.graph(g, pool=region.pool.id)``. Everything that was allocated from it is backed up,
        also the parts that torch holds free. Raises memsaver.Error if the region is not on a CUDA device.
        """
        _ = self._core  # raises if the region was closed
        return adapter().pool(self)

    def pause(
        self,
        *,
        backup: Backup = None,
        lazy: LazyMode | None = None,
        timeout: float | None = None,
        reader_timeout: float = READERS_S,
        progress: bool = False,
    ) -> Transition:
        """Releases the region's memory and keeps its addresses, as ``memsaver.pause()`` does, with its errors.

        Args:
            backup: The policy of this pause. None: the region's own.
            lazy: As for ``memsaver.pause()``.
            timeout: Seconds for the whole call up to its commit. None: no bound.
            reader_timeout: Seconds to wait for other processes that are attached to the region.
            progress: As for ``memsaver.pause()``.

        Returns:
            The transition.

        Examples:
            >>> weights = memsaver.region("weights", device="cpu", backup="host")
            >>> tensor = weights.empty((1 << 20,), torch.uint8)
            >>> weights.pause().copied_bytes
            1048576
        """
        from memsaver.transitions import transition  # which imports this module

        bounds = Bounds(timeout, reader_timeout=reader_timeout)
        _ = self._core  # raises if the region was closed
        return transition(Chosen([self]), NOTHING, bounds, backup=backup, lazy=lazy, progress=progress)

    def resume(
        self,
        *,
        restore: Restore = True,
        timeout: float | None = None,
        memory_timeout: float | None = None,
        progress: bool = False,
    ) -> Transition:
        """Maps memory and copies back the contents, as ``memsaver.resume()`` does, with its errors.

        Args:
            restore: False leaves the contents undefined, for a region that is about to be overwritten.
            timeout: Seconds for the whole call up to its commit. None: no bound.
            memory_timeout: Seconds to wait for memory that others hold.
            progress: As for ``memsaver.pause()``.

        Returns:
            The transition.

        Examples:
            >>> weights = memsaver.region("weights", device="cpu", backup="host")
            >>> tensor = weights.empty((2,)).fill_(2)
            >>> weights.pause().paused, weights.resume().resumed, tensor
            (('weights',), ('weights',), tensor([2., 2.]))
        """
        from memsaver.transitions import transition

        bounds = Bounds(timeout, memory_timeout)
        _ = self._core
        return transition(NOTHING, Chosen([self]), bounds, restore=restore, progress=progress)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the resume of a region that comes late in its phase: see ``memsaver.define_phase()``.

        Args:
            timeout: Seconds to wait. None: no bound but those of the resume.

        Raises:
            WaitTimeoutError: ``timeout`` ended the wait. The resume goes on.
            memsaver.Error: The error of the resume, with the name of the phase. The region is paused, or active if
                ``resumed`` of the error names it.
            RegionPausedError: The region is not active, and is not on its way.

        Examples:
            >>> optimizer = memsaver.region("optimizer", device="cpu", backup="host")
            >>> memsaver.define_phase("train", [], late="optimizer")
            >>> _ = memsaver.pause("optimizer")
            >>> with memsaver.phase("train"):
            ...     optimizer.wait(timeout=60)
            >>> optimizer.state
            'active'
        """
        self._arrive(Bounds(timeout).timeout)
        self.check_active("be used")

    def _arrive(self, timeout: float | None = None) -> None:
        """Waits if the region comes late. Raises as wait() does, but if the region was paused since then."""
        if (coming := self._coming) is None:
            return
        # Active before the end: for guests that come back, and for code of a member after its resume.
        if getattr(_rebuilding, "now", False) or (self.state == "active" and not coming.future.done()):
            return
        began = time.monotonic()
        if not futures.wait([coming.future], timeout).done:
            text = f"region {self.tag!r} comes late in phase {coming.phase!r} and has not arrived"
            raise WaitTimeoutError(text, stage="late", waited_s=time.monotonic() - began)
        error = coming.future.exception()
        is_active = self.tag in getattr(error, "resumed", ())
        if (error is None or is_active or self.residence != coming.residence) and self._coming is coming:
            self._coming = None  # it has arrived, the error is raised now, or is of an earlier residence
        if error is not None and (is_active or self.residence == coming.residence):
            text = f"phase {coming.phase!r}, late regions: "
            again = copy.copy(error) if isinstance(error, Error) else Error(f"{type(error).__name__}: {error}")
            after = "" if is_active else ". The region is paused: resume it, or enter the phase again"
            again.args, again.phase = (f"{text}{again}{after}",), coming.phase
            raise again from error

    def thaw(self) -> None:
        """Drops the copy of a frozen region, so that its contents may change. Its next pause makes another copy.

        Raises:
            RegionPausedError: The region is not active.

        Examples:
            >>> reference = memsaver.region("reference", device="cpu", backup="host", frozen=True)
            >>> tensor = reference.empty((2,)).fill_(1)
            >>> _ = reference.pause(), reference.resume(), reference.thaw(), tensor.fill_(3)
            >>> reference.pause().paused, reference.resume().resumed, tensor
            (('reference',), ('reference',), tensor([3., 3.]))
        """
        self._core.thaw()

    def close(self, *, timeout: float | None = None) -> None:
        """Ends the region: releases its addresses, its backup and its idle memory.

        Afterwards only ``tag``, ``device``, ``backup``, ``frozen`` and ``fill`` of this object can be used, and
        ``memsaver.region()`` makes another region of the tag. Closing a closed region is a no-op.

        Args:
            timeout: Seconds to wait for the device's work on freed tensors. None: no bound.

        Raises:
            memsaver.Error: Tensors or graphs in the region are alive (the error names their bytes), or a thread, a
                transition, a guarded replay, a reader of its backup or an attached process uses it. The region is
                unchanged.
            WaitTimeoutError: The device's work has not ended within ``timeout``.

        Examples:
            >>> kv = memsaver.region("kv_cache", device="cpu")
            >>> kv.close()
            >>> kv
            <memsaver.Region 'kv_cache' on cpu, backup='none', closed>
        """
        bound = Bounds(timeout).timeout
        core = self._handle
        if core.closed:
            return
        self._check_own("be closed")
        core.check_unused()
        if (torch := loaded()) is not None:
            torch.check_unused(self)
            self._pool_is_kept |= torch.forget(self)
        core.release_unused(bound)  # without the registry's lock, so that other regions can be made meanwhile
        with _registry:
            if core.closed:  # another thread was faster
                return
            if (torch := loaded()) is not None:
                torch.check_pausable([self], None, "closed")
            try:
                core.close(keep_entry_points=self._pool_is_kept)
            finally:  # also after an interrupt
                if core.closed:
                    _regions.pop((self.tag, self.device), None)
                    if self._common is not None:
                        self._common.leave()
                        self._common = None

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocates an uninitialised torch tensor in the region.

        Args:
            shape: One size or several, in elements.
            dtype: The dtype of the tensor. None: torch's default dtype.

        Returns:
            A tensor of this shape on the region's device.

        Raises:
            TypeError: ``shape`` has other values than integers, or ``dtype`` is not a torch.dtype.
            ValueError: A size is negative.
            RegionPausedError: The region is not active.
            memsaver.Error: The region is frozen and its contents are copied, or it was closed.
            OutOfMemoryError: The host driver's device is full. On CUDA: torch.OutOfMemoryError.

        Examples:
            >>> kv = memsaver.region("kv_cache", device="cpu")
            >>> kv.empty((2, 3), torch.bfloat16).shape
            torch.Size([2, 3])
        """
        try:
            sizes = tuple(map(_size, shape)) if isinstance(shape, Iterable) else (_size(shape),)
        except TypeError:
            raise TypeError(f"shape is {shape!r}, expected integers") from None
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape is {shape!r}, expected sizes of 0 or more")
        self._check_own("be allocated in")
        self._arrive()
        if self._core.sealed or self.state != "active":
            self._check_fillable(f"take an allocation of shape {sizes}" if math.prod(sizes) else "be allocated in")
        return adapter().empty(self, sizes, dtype)

    def check_active(self, purpose: str) -> None:
        """Raises RegionPausedError unless the region is active.

        Args:
            purpose: Completes the text of the error, "region 'weights' is paused: it cannot ...".

        Raises:
            RegionPausedError: The region is not active.

        Examples:
            >>> weights = memsaver.region("weights", device="cpu", backup="host")
            >>> _ = weights.pause()
            >>> weights.check_active("serve requests")
            Traceback (most recent call last):
            memsaver.errors.RegionPausedError: region 'weights' is paused: it cannot serve requests
        """
        if (state := self.state) != "active":
            raise RegionPausedError(f"region {self.tag!r} is {state}: it cannot {purpose}", tag=self.tag, state=state)

    def _check_fillable(self, purpose: str) -> None:
        """Raises as check_active() does, and memsaver.Error if the region is frozen and its contents are copied."""
        self.check_active(purpose)
        if self._core.sealed:
            raise Error(
                f"region {self.tag!r} is frozen and its contents are copied: "
                f"it cannot {purpose} before thaw() drops the copy"
            )

    def _check_own(self, purpose: str) -> None:
        """Raises memsaver.Error if torch alone allocates in the region."""
        if self._core.placed:
            raise Error(f"region {self.tag!r} is torch's default pool of {self.device}: it cannot {purpose}")

    def __enter__(self) -> Region:
        self._check_own("be entered")
        self._arrive()
        adapter().enter(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        adapter().leave(self, error)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy would be no region of the process: calls would select nothing by it."""
        raise TypeError(f"region {self.tag!r} is neither copied nor pickled, expected its tag in its place")

    def __repr__(self) -> str:
        state = "closed" if self._handle.closed else self.state
        return f"<memsaver.Region {self.tag!r} on {self.device}, backup={self.backup!r}, {state}>"


_registry = threading.RLock()  # held while _regions changes, and while a region is closed; before the core's locks
_regions: dict[tuple[str, str], Region] = {}  # by tag and device


def _size(value: SupportsIndex) -> int:
    """An integer of any library, but no bool. Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def default_device() -> str:
    """The current CUDA device where there is one, else ``"cpu"``."""
    return device_name("cuda") if _core.cuda_device_count() > 0 else "cpu"


def region(
    tag: str,
    device: str | torch.device | None = None,
    backup: str | Derived | None = None,
    *,
    frozen: bool | None = None,
    fill: str | None = None,
    one_handle: bool | None = None,
    written_in_use: bool | None = None,
    same_as: str | None = None,
) -> Region:
    """Returns the region with this tag and device, and makes it if there is none.

    Args:
        tag: The name by which calls select the region. At most 200 printable characters.
        device: ``"cpu"`` (the host driver), ``"cuda"`` or ``"cuda:N"``. None: the current CUDA device, or ``"cpu"`` if
            there is no CUDA device.
        backup: The policy for contents in a pause. ``"none"``, the default of a new region: they are undefined after
            the resume. ``"host"``: they are kept in pinned host memory. ``"disk"``: they are kept in a file in the
            directory of ``configure(disk_dir=...)``. A ``memsaver.Derived``: they are computed again. Here and below,
            None is the value of the existing region.
        frozen: True: the contents do not change after the first pause, which copies them out. Later pauses copy
            nothing, and allocations in the region raise until ``Region.thaw()`` drops the copy.
        fill: The value of memory without contents. By default it has zeros or old bytes of this process. ``"zero"``: it
            is zero. ``"poison"``: it has bytes of 0xFF, which are NaN in torch's float types. ``"keep"``: nothing is
            written, and bytes of other processes of a shared pool can be seen.
        one_handle: True: each segment (one allocation of torch's allocator, or of ``empty()``) has one handle of the
            driver, of its size in whole pages of 2 MiB, as libraries expect that export the memory at a pointer. Each
            resume creates it, and each pause releases it: no pool, no ``retain``, and a switch needs its memory to be
            free before.
        written_in_use: True: the memory is written while it is used, as a KV cache is, or its zeros of ``fill`` are
            used. ``memsaver.check_written()`` leaves the region out.
        same_as: A name. Processes of one job (``MEMSAVER_JOB``) and host whose regions have one name and equal contents
            keep one copy of them in host memory, in the place of one each. A pause compares the contents first, in up
            to 32 MiB of device memory. Needs ``backup="host"``. One region of a process has the name.

    Returns:
        The region. The same arguments give the same object.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a wrong value, or the region was made with another ``backup``, ``frozen``,
            ``fill``, ``one_handle``, ``written_in_use`` or ``same_as``.
        ConfigError: The policy is ``"disk"``, and ``disk_dir`` is not set; or ``one_handle`` with a shared pool.
        DriverError: The device cannot be used.
        memsaver.Error: A process in another pid namespace, or with another version, has the name of ``same_as``.
        BrokerError: ``configure(pool="shared")`` is set, and the shared pool of the device cannot be reached.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> memsaver.region("weights", device="cpu") is weights
        True
    """
    check_tag(tag)
    derived = backup if isinstance(backup, Derived) else None
    if backup is not None and derived is None:
        check_backup(backup)
    flags = {"frozen": frozen, "one_handle": one_handle, "written_in_use": written_in_use}
    for option, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise TypeError(f"{option} is {flag!r}, expected True or False")
    if same_as is not None:
        check_tag(same_as, "same_as")
    if fill is not None and fill not in FILLS:
        raise ValueError(f"fill is {fill!r}, expected one of {', '.join(map(repr, FILLS))}")
    if device in BACKUPS:
        raise ValueError(f"device is {device!r}, expected 'cpu', 'cuda' or 'cuda:N'; did you mean backup={device!r}?")
    name = default_device() if device is None else device_name(device)
    found = _regions.get((tag, name))
    if found is None or found._handle.closed:  # the core raises in a forked child
        policy = "none" if derived is not None or backup is None else str(backup)
        if frozen and policy == "none":
            raise ValueError(f"frozen is True and backup is {backup or 'none'!r}, expected 'host' or 'disk'")
        if same_as is not None and policy != "host":
            raise ValueError(f"same_as is {same_as!r} and backup is {backup or 'none'!r}, expected 'host'")
        pool_client.join(name)
        common = None if same_as is None else _common_memory(same_as, tag, name)
        found = wrapper(_core.region(tag, name, policy, bool(frozen), fill or _NO_FILL, bool(one_handle)))
        found.backup = derived or found.backup
        found.written_in_use = bool(written_in_use)
        if common is not None:
            found.same_as, found._common = same_as, common
        observe_captures(name)
    for option, given in {**flags, "backup": backup, "fill": fill, "same_as": same_as}.items():
        if given is not None and given != (has := getattr(found, option)):
            raise ValueError(f"{option} is {given!r}, but region {tag!r} was made with {has!r}")
    return found


def _common_memory(name: str, tag: str, device: str) -> Any:
    for each in all_regions():
        if each.same_as == name:
            raise ValueError(f"same_as is {name!r}, which region {each.tag!r} of this process has on {each.device}")
    rank = os.environ.get("RANK", "")  # of torch.distributed
    what = f"region {tag!r} with same_as={name!r}"
    from memsaver.broker import discovery  # at the first use: an import of memsaver loads little

    path = str(discovery.common_path(name))
    return _core.common_memory(device, path, what, int(rank) if rank.isdecimal() else -1)


def observe_captures(device: str) -> None:
    """Loads the adapter, which observes captures, if the program asks for it and torch can capture on the device."""
    if "captures" in wanted() and device != "cpu" and "torch" in sys.modules:
        adapter()


def all_regions() -> list[Region]:
    if _core.region_count() == len(_regions):
        return list(_regions.values())
    return [wrapper(each) for each in _core.regions()]


def owning(address: int) -> Region | None:
    """The region that an address lies in, or None."""
    core = _core.region_at(address)
    return None if core is None else wrapper(core)


Selection = str | Region | Iterable[str | Region] | None
"""Regions of a call: a tag, a Region, several of either, or None for all regions."""


def tags_of(regions: Iterable[Any], guests: Iterable[str] = ()) -> tuple[str, ...]:
    """The tags of regions, which may be those of the core, and of guests, each once."""
    return tuple(dict.fromkeys([*(each.tag for each in regions), *sorted(guests)]))


class Chosen:
    """The regions of one side of a transition, and the tags of guests that move beside them."""

    def __init__(self, regions: Iterable[Region] = (), guests: Set[str] = frozenset()) -> None:
        self.regions, self.guests = list(regions), guests
        self.tags = tags_of(self.regions, guests)


NOTHING = Chosen()


def wrapper(core: Any) -> Region:
    """The region over one of the core, which may have been made without Python: see csrc/torch/tagged_hooks.cpp."""
    key = core.tag, core.device
    found = _regions.get(key)
    if found is None or found._handle is not core:  # it was closed, and made again
        with _registry:
            found = _regions.get(key)
            if found is None or found._handle is not core:
                found = _regions[key] = Region(core)
    return found


def selected(tags: Selection, name: str = "tags") -> list[str | Region]:
    """The parts of a selection, each a tag or a region. ``name`` is the argument's name in an error.

    Raises TypeError for all other values, mappings included.
    """
    if isinstance(tags, (str, Region)):
        return [tags]
    if not isinstance(tags, Iterable) or isinstance(tags, Mapping):
        raise TypeError(f"{name} is {tags!r}, expected a tag, a Region, or several of either")
    parts = list(tags)
    for each in parts:
        if not isinstance(each, (str, Region)):
            raise TypeError(f"{name} has {each!r}, expected a tag or a Region")
    return parts


def known_tags(every: Iterable[Region] | None = None) -> set[str]:
    """The tags of all regions and guests. ``every``: all regions, if the caller has them."""
    return {each.tag for each in (all_regions() if every is None else every)} | _guests.tags()


def choose(tags: Selection, name: str = "tags") -> Chosen:
    """The regions that a selection names, in the order in which they were made, and the tags of guests in it.

    None selects all. A tag of guests may have no region. Raises ValueError for any other tag without one, TypeError for
    a value that is not a selection, and memsaver.Error for a closed region and in a forked child. Another thread may
    close regions that are returned.
    """
    regions = all_regions()
    if tags is None:
        return Chosen(regions, _guests.tags())
    parts = selected(tags, name)
    known = known_tags(regions)
    for each in parts:
        if isinstance(each, Region):
            _ = each._core  # raises if the region was closed
        elif each not in known:
            raise ValueError(f"there is no region {each!r}; there are {', '.join(map(repr, sorted(known))) or 'none'}")
    wanted = set(parts)
    found = [each for each in regions if each.tag in wanted or each in wanted]
    return Chosen(found, _guests.tags().intersection(part for part in parts if isinstance(part, str)))


def find(tags: Selection, name: str = "tags") -> list[Region]:
    """The regions of ``choose()``."""
    return choose(tags, name).regions


def outside() -> AbstractContextManager[None]:
    """Suspends the regions that the thread has entered: torch allocates in its default pool again.

    Returns:
        A context manager. At its end the regions apply again.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> with kv:
        ...     cache = torch.empty(16)
        ...     with memsaver.outside():
        ...         scratch = torch.empty(16)
        >>> kv.owns(cache.data_ptr()), kv.owns(scratch.data_ptr())
        (True, False)
    """
    return adapter().outside()


def cpu_backup(tensor: torch.Tensor, *, clone: bool = False) -> torch.Tensor:
    """Returns the contents of a torch tensor whose region is paused or lost, as a CPU tensor.

    A region is lost when its device's context dies. Its contents on the host or on disk can still be read.

    Args:
        tensor: A tensor in a region. A view is allowed.
        clone: False: the result is a view of the backup in pinned host memory. Nothing is copied, and the next resume
            copies writes to it to the device. The memory is kept as long as the result; after the resume, only the
            result uses it. If a frozen region resumes while a result is held, its next pause makes another copy.
            True: the result is a copy. Backups on disk need this.

    Returns:
        A CPU tensor with the shape, strides and dtype of ``tensor``.

    Raises:
        TypeError: ``tensor`` is not a plain torch.Tensor.
        ValueError: The tensor is in no region.
        memsaver.Error: The region is neither paused nor lost.
        BackupError: There is no backup. Or ``clone`` is False, and the backup is on disk, or lies in several pieces and
            the driver pins no memory to join them.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> tensor = weights.empty((4,)).fill_(1)
        >>> _ = weights.pause()
        >>> memsaver.cpu_backup(tensor)[0] = 5
        >>> _ = weights.resume()
        >>> tensor
        tensor([5., 1., 1., 1.])
    """
    return adapter().cpu_backup(tensor, bool(clone))


def release_host_memory() -> int:
    """Releases pinned host memory, and files, that hold no contents now.

    The next pause that needs host memory allocates it again. The background does so earlier if a region with
    ``backup="host"`` grows.

    Returns:
        The bytes that were released.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> tensor = weights.empty((1 << 20,), torch.uint8)
        >>> _ = weights.pause(), weights.resume()
        >>> memsaver.release_host_memory() >= 1 << 20
        True
    """
    common = sum(each._common.leave() for each in all_regions() if each._common is not None)
    return int(_core.release_host_memory()) + common


@contextmanager
def capturing() -> Iterator[None]:
    """Announces a capture that torch did not begin, such as one by CuPy, by cuda.core, or by C++ code.

    A wait for the device, or a mark on all of its streams, breaks every capture under way in the process. Within the
    block the library does neither, on all threads: a pause, a switch that pauses, ``memsaver.trim()`` and the end of an
    attachment raise memsaver.Error before they wait, and memory that is freed in a region is not reused until the end
    of the block. Entering the block waits for device-wide waits under way. Blocks can be nested, also over threads.

    Captures by torch, those by ``memsaver.graph()`` included, need no such block.

    Examples:
        >>> with memsaver.capturing():
        ...     pass  # stream.begin_capture(); scale(x, out=y); graph = stream.end_capture()
    """
    begun: list[None] = []
    try:
        begin_capture(begun)
        yield
    finally:
        end_capture(begun)


def begin_capture(begun: list[None]) -> None:
    """Announces a capture to the core, and adds an item to ``begun``. No interrupt comes between the two."""
    begun.extend(itertools.starmap(_core.capture_begins, [()]))


def end_capture(begun: list[None]) -> None:
    """Ends the capture in ``begun``, if ``begin_capture()`` has announced one. Call it once."""
    for _ in begun:
        _core.capture_ends()
