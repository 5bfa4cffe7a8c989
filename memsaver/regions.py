"""Regions by tag, and the transitions between them. What torch is needed for stands behind :class:`Adapter`."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import partial
from typing import Any, Protocol, TypeVar

from memsaver import _core, membership
from memsaver.errors import Error, RegionPausedError
from memsaver.transitions import Outcome, Progress, Transition

log = logging.getLogger("memsaver")

BACKUPS: tuple[str, ...] = _core.BACKUPS
_NO_FILL, *FILLS = _core.FILLS
_LONGEST_TAG = 200
ATTACHED_S = 60.0  # how long a pause waits for other processes that are attached to its regions
_LONGEST_TIMEOUT_S = 86400.0 * 365  # what the core's clock can add without overflow, and more than anybody waits
Tags = str | Iterable[str] | None
Ranges = list[tuple[int, int]]  # (offset, bytes) within a region
_T = TypeVar("_T")


class Adapter(Protocol):
    """What regions ask of a tensor library. ``memsaver.torch`` is the one there is."""

    def enter(self, region: Region) -> None: ...
    def leave(self, region: Region, error: BaseException | None) -> None: ...
    def empty(self, region: Region, shape: Sequence[int], dtype: Any) -> Any: ...
    def pool(self, region: Region) -> Any: ...
    def live(self, region: Region) -> Ranges | None: ...
    def check_pausable(self, regions: Sequence[Region], thread: int | None) -> None: ...
    def refresh(self) -> None: ...
    def outside(self) -> AbstractContextManager[None]: ...
    def trim(self, regions: Sequence[Region]) -> None: ...
    def cpu_backup(self, tensor: Any, clone: bool) -> Any: ...
    def graph_region(self, pool_id: tuple[int, int]) -> Region | None: ...


# Set by memsaver/__init__.py, which alone knows both sides. Loading torch waits until something needs it.
load_adapter: Callable[[], Adapter]
_adapter: Adapter | None = None


_loading = threading.Lock()


def adapter() -> Adapter:
    global _adapter
    with _loading:
        if _adapter is None:
            _adapter = load_adapter()  # noqa: F821
        return _adapter


class Region:
    """Addresses that stay, over memory that comes and goes. Made by :func:`region`, and lives as long as the process.

    As a context manager it takes every torch allocation of the current thread, backward passes included. It can be
    nested, entered again, and entered from several threads at once.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self.tag: str = core.tag
        self.device: str = core.device
        self.backup: str = core.backup
        self.frozen: bool = core.frozen
        self.fill: str | None = core.fill if core.fill in FILLS else None

    @property
    def state(self) -> str:
        """One of "active", "pausing", "paused", "resuming" and "lost"."""
        return str(self._core.state)

    @property
    def residence(self) -> int:
        """Counts the stays in memory: another number after each resume. What no backup keeps lasts for one stay."""
        return int(self._core.residence)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the segments in use: what torch, or :meth:`empty`, asked for and has not freed."""
        return int(self._core.allocated_bytes)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of device memory that the region holds now."""
        return int(self._core.mapped_bytes)

    @property
    def backup_bytes(self) -> int:
        """Bytes of contents that wait in host memory or on disk now; of a frozen region, since its first pause."""
        return int(self._core.backup_bytes)

    def owns(self, address: int) -> bool:
        """Whether an address is one of the region's."""
        base: int = self._core.base
        return base <= address < base + int(self._core.span)

    @property
    def pool(self) -> Any:
        """A ``torch.cuda.MemPool`` over the region, for code that captures graphs itself:
        ``torch.cuda.graph(g, pool=region.pool.id)``. What is allocated from it is backed up whole.

        Raises memsaver.Error where the region is not on a CUDA device.
        """
        return adapter().pool(self)

    def pause(
        self,
        backup: str | None = None,
        timeout: float = ATTACHED_S,
        *,
        wait: bool = True,
        progress: Progress | None = None,
    ) -> Transition:
        """Returns the region's memory. See :func:`memsaver.pause`."""
        return transition(pause=[self], backup=backup, attached=timeout, wait=wait, progress=progress)

    def resume(
        self,
        restore: bool = True,
        timeout: float = 0.0,
        *,
        wait: bool = True,
        progress: Progress | None = None,
    ) -> Transition:
        """Brings memory back under the region's addresses. See :func:`memsaver.resume`."""
        return transition(resume=[self], restore=restore, timeout=timeout, wait=wait, progress=progress)

    def thaw(self) -> None:
        """Drops the copy that a frozen region keeps, so that its contents may change; its next pause makes another.

        Raises RegionPausedError unless the region is active.
        """
        self._core.thaw()

    def empty(self, shape: int | Sequence[int], dtype: Any = None) -> Any:
        """An uninitialised torch tensor in the region, of the given shape and dtype (torch's default dtype if None).

        Raises ValueError for a negative size, RegionPausedError while the region is paused, and OutOfMemoryError on the
        host driver (on CUDA, torch's own error).
        """
        if not isinstance(shape, (int, Iterable)):
            raise TypeError(f"shape is {shape!r}, expected an integer or several")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"shape is {shape!r}, expected integers")
            if size < 0:
                raise ValueError(f"shape is {shape!r}, expected sizes of 0 or more")
        self.check_fillable(f"take an allocation of shape {sizes}" if math.prod(sizes) else "be allocated in")
        return adapter().empty(self, sizes, dtype)

    def check_active(self, purpose: str) -> None:
        """Raises RegionPausedError unless the region is active. ``purpose`` completes "cannot ..."."""
        state = self.state
        if state != "active":
            raise RegionPausedError(f"region {self.tag!r} is {state}: it cannot {purpose}", tag=self.tag, state=state)

    def check_fillable(self, purpose: str) -> None:
        """Raises as check_active() does, and Error where a frozen region has its copy already."""
        self.check_active(purpose)
        if self._core.sealed:
            raise Error(
                f"region {self.tag!r} is frozen and its contents are copied: "
                f"it cannot {purpose} before thaw() drops the copy"
            )

    def __enter__(self) -> Region:
        adapter().enter(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        adapter().leave(self, error)

    def __repr__(self) -> str:
        return f"<memsaver.Region {self.tag!r} on {self.device}, backup={self.backup!r}, {self.state}>"


_regions: dict[tuple[str, str, str], Region] = {}


def default_device() -> str:
    """The current CUDA device where there is one, else ``"cpu"``."""
    return canonical_device("cuda") if _core.cuda_device_count() > 0 else "cpu"


def canonical_device(device: object) -> str:
    """``"cpu"`` or ``"cuda:N"`` from a torch-style string or a ``torch.device``. Raises ValueError for others."""
    name = str(device)
    if name == "cpu":
        return name
    kind, colon, index = name.partition(":")
    if kind == "cuda" and (not colon or (index.isascii() and index.isdecimal() and len(index) < 5)):
        if index:
            return f"cuda:{int(index)}"
        torch = sys.modules.get("torch")
        return f"cuda:{torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0}"
    raise ValueError(f"device is {device!r}, expected 'cpu', 'cuda' or 'cuda:N'")


def region(
    tag: str,
    device: object = None,
    backup: str = "none",
    *,
    frozen: bool | None = None,
    fill: str | None = None,
) -> Region:
    """The region of this tag, device and backup policy; made if there is none.

    - ``device``: a torch-style string; by default the current CUDA device, or ``"cpu"``, the host driver, where there
      is no CUDA.
    - ``backup``: what becomes of the contents on a pause: ``"none"`` (undefined after a resume), ``"host"`` (kept in
      pinned host memory) or ``"disk"`` (kept in a file in the directory of ``configure(disk_dir=...)``).
    - ``frozen``: the contents never change once they are there, as those of a reference model. They are copied out by
      the first pause; later ones copy nothing. From that pause on the region takes no allocations: :meth:`Region.thaw`
      drops the copy.
    - ``fill``: what a resume writes where it brings no contents: ``"zero"``, or ``"poison"``, bytes of 0xFF, which are
      NaN in float16, bfloat16, float32, float64, float8_e4m3fn and float8_e5m2. By default nothing.

    ``frozen`` and ``fill`` are given where the region is made; elsewhere they can be left out.

    Raises TypeError or ValueError for other arguments, or options other than those the region was made with,
    ConfigError for ``"disk"`` without a directory, DriverError where the device cannot be used, BrokerError where its
    memory is to come from a shared pool and that cannot be reached.
    """
    if not isinstance(tag, str):
        raise TypeError(f"tag is {tag!r}, expected a string")
    if not tag:
        raise ValueError("tag is '', expected a name")
    if len(tag) > _LONGEST_TAG or not tag.isprintable():
        raise ValueError(f"tag is {tag!r}, expected at most {_LONGEST_TAG} printable characters")
    check_backup(backup)
    if frozen is not None and not isinstance(frozen, bool):
        raise TypeError(f"frozen is {frozen!r}, expected True or False")
    if frozen and backup == "none":
        raise ValueError("frozen is True and backup is 'none', expected a backup that keeps what is frozen")
    if fill is not None and fill not in FILLS:
        raise ValueError(f"fill is {fill!r}, expected one of {', '.join(map(repr, FILLS))}")
    name = default_device() if device is None else canonical_device(device)
    found = _regions.get((tag, name, backup))
    if found is None:
        membership.join(name)
        core = _core.region(tag, name, backup, bool(frozen), fill or _NO_FILL)
        found = _regions.setdefault((tag, name, backup), Region(core))
        if name != "cpu" and "torch" in sys.modules:
            adapter()  # from now on captures must be seen, whoever makes them
    for option, given, has in (("frozen", frozen, found.frozen), ("fill", fill, found.fill)):
        if given is not None and given != has:
            raise ValueError(f"{option} is {given!r}, but region {tag!r} was made with {has!r}")
    return found


def check_backup(backup: object) -> None:
    if backup not in BACKUPS:
        raise ValueError(f"backup is {backup!r}, expected one of {', '.join(map(repr, BACKUPS))}")


def all_regions() -> list[Region]:
    return list(_regions.values())


def owning(address: int) -> Region | None:
    """The region that an address belongs to, if any."""
    return next((each for each in all_regions() if each.owns(address)), None)


def find(tags: Tags) -> list[Region]:
    """The regions of a tag, of several, or (None) all.

    Raises ValueError for a tag that no region has, TypeError for what is no tags, such as a region.
    """
    if tags is None:
        return all_regions()
    if not isinstance(tags, Iterable):
        raise TypeError(f"tags is {tags!r}, expected a tag, several, or None for all")
    names = [tags] if isinstance(tags, str) else several(tags, "tags")
    known = {each.tag for each in all_regions()}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no region {name!r}; there are {', '.join(map(repr, sorted(known))) or 'none'}")
    return [each for each in all_regions() if each.tag in names]


def several(tags: object, what: str) -> list[str]:
    """Tags as a list. Raises TypeError for anything else, one string alone among it; ``what`` says what that was."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise TypeError(f"{what} is {tags!r}, expected a list of tags")
    names = list(tags)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{what} has {name!r}, expected a string")
    return names


def pause(
    tags: Tags = None,
    *,
    backup: str | None = None,
    timeout: float = ATTACHED_S,
    wait: bool = True,
    progress: Progress | None = None,
) -> Transition:
    """Returns the memory of these regions to where it came from, after waiting for the device's work.

    - ``tags``: one, several, or None for all regions; an empty list is nothing. What is paused already stays so.
    - ``backup``: another policy than the regions' own, for this pause.
    - ``timeout``: seconds to wait for other processes that are attached to the regions (see :func:`memsaver.attach`).
    - ``wait``: False returns at once; the transition goes on in the background, behind earlier ones on the same
      regions, and its errors come with :meth:`Transition.wait`. The interpreter ends after it.
    - ``progress``: called with bytes copied and bytes to copy, some times a second and at the end, by the thread that
      moves them. An exception in it is logged.

    Raises ValueError for an unknown tag, BackupError where host memory or disk is short, AttachedError where others
    stay attached, memsaver.Error while a graph is being captured; then everything is as it was. A driver or file call
    that fails later leaves the regions paused with nothing lost that their policies keep; pausing again goes on from
    there, and resuming brings everything back.
    """
    return transition(pause=find(tags), backup=backup, attached=timeout, wait=wait, progress=progress)


def resume(
    tags: Tags = None,
    *,
    restore: bool = True,
    timeout: float = 0.0,
    wait: bool = True,
    progress: Progress | None = None,
) -> Transition:
    """Brings memory back under the same addresses, and contents where a backup waits.

    ``restore=False`` leaves the contents undefined, for regions about to be overwritten. ``timeout``: seconds to wait
    for memory that others still hold (0: none), once earlier transitions on the same regions have ended. ``wait`` and
    ``progress`` as for :func:`pause`.

    Raises ValueError for an unknown tag, OutOfMemoryError where memory is short, BackupError where a file cannot be
    read; then everything is as it was.
    """
    return transition(resume=find(tags), restore=restore, timeout=timeout, wait=wait, progress=progress)


def switch(
    *,
    pause: Tags = (),
    resume: Tags = (),
    backup: str | None = None,
    restore: bool = True,
    timeout: float = 0.0,
    wait: bool = True,
    progress: Progress | None = None,
) -> Transition:
    """One transition: contents go out and come in at once, through the same chunks. Arguments as for the two above.

    Raises what pause() and resume() raise, and ValueError for a tag on both sides. What is needed is reserved first; if
    what comes in fails after that, what was to go out is paused, and the same call can be made again.
    """
    return transition(
        pause=find(pause),
        resume=find(resume),
        backup=backup,
        restore=restore,
        timeout=timeout,
        attached=max(seconds(timeout), ATTACHED_S),
        wait=wait,
        progress=progress,
    )


def transition(
    pause: Sequence[Region] = (),
    resume: Sequence[Region] = (),
    backup: str | None = None,
    restore: bool = True,
    timeout: float = 0.0,
    attached: float = 0.0,
    wait: bool = True,
    progress: Progress | None = None,
) -> Transition:
    """The one way in which regions change state; see the three functions above."""
    if backup is not None:
        check_backup(backup)
    timeout, attached = seconds(timeout), seconds(attached)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {progress!r}, expected something to call, or None")
    both = {each.tag for each in pause} & {each.tag for each in resume}
    if both:
        raise ValueError(f"{sorted(both)[0]!r} is to be paused and resumed at once, expected one of the two")
    if not pause and not resume:
        return Transition()
    here = threading.get_ident() if wait else None  # the thread that may be inside a region that it pauses
    if _adapter is not None:  # looked at again below, when nobody can enter any more; here it disturbs nobody
        _adapter.check_pausable([each for each in pause if each.state == "active"], here)
    move = _Move([each._core for each in pause], [each._core for each in resume], here)
    run = partial(move.run, backup, bool(restore), timeout, attached, progress)
    if wait:
        return Transition(*astuple(run()))
    try:
        return Transition.under_way(in_thread(run, "memsaver transition"))
    except BaseException:  # there is no thread to be had
        move.core.abort()
        raise


def seconds(timeout: object) -> float:
    """A timeout as a float that the core can take. Raises TypeError or ValueError."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is {timeout!r}, expected seconds")
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout!r}, expected seconds of 0 or more")
    return float(min(timeout, _LONGEST_TIMEOUT_S))


def in_thread(function: Callable[[], _T], name: str) -> Future[_T]:
    """Runs it in a thread of its own, which the interpreter waits for, and which cannot be cancelled."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name).start()
    return future


class _Move:
    """One transition, which has its place in the queues of its regions from the moment it is made."""

    def __init__(self, pause: list[Any], resume: list[Any], thread: int | None) -> None:
        self.core = _core.Transition(pause, resume)
        self._thread = thread
        self._timeout = 0.0
        self._report: _Report | None = None

    def prepare(
        self, backup: str | None, restore: bool, timeout: float, attached: float, progress: Progress | None
    ) -> None:
        """Everything up to the point of no return. Where this raises, all is as it was."""
        move = self.core
        self._timeout = timeout
        self._report = _Report(progress) if progress is not None else None
        try:
            move.begin(attached)
            going_out = [_wrapper(each) for each in move.pausing]
            policies = [backup or each.backup for each in going_out]
            if _adapter is not None:
                _adapter.check_pausable(going_out, self._thread)
            live = [_live(each) if policy != "none" else [] for each, policy in zip(going_out, policies)]
            move.prepare(policies, live, restore, timeout, self._report)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        self.core.abort()  # now, not when a traceback lets go of it
        if _adapter is not None:
            _adapter.refresh()

    def commit(self) -> Outcome:
        move, report = self.core, self._report
        try:
            done = move.run(self._timeout)
        except BaseException as error:
            move.abort()
            if isinstance(error, Error):
                error.name_discarded(_tags(move.discarded))
            raise
        finally:
            if _adapter is not None:
                _adapter.refresh()
        outcome = Outcome(
            paused=_tags(done["paused"]),
            resumed=_tags(done["resumed"]),
            released_bytes=done["released_bytes"],
            restored_bytes=done["restored_bytes"],
            copied_bytes=done["copied_bytes"],
            seconds=done["seconds"],
        )
        log.debug("%s", outcome)
        if report is not None and report.interrupt is not None:
            raise report.interrupt
        return outcome

    def run(
        self, backup: str | None, restore: bool, timeout: float, attached: float, progress: Progress | None
    ) -> Outcome:
        self.prepare(backup, restore, timeout, attached, progress)
        return self.commit()


class Prepared:
    """A pause that has reserved all it needs, and changed nothing yet: :meth:`commit` it, or :meth:`abort`.

    Its regions are "pausing" meanwhile. Made by :func:`prepare_pause`.
    """

    def __init__(self, move: _Move | None) -> None:
        self._move = move

    def commit(self) -> Transition:
        """Goes through with the pause. Raises what pause() raises after its point of no return."""
        move, self._move = self._move, None
        return Transition(*astuple(move.commit())) if move is not None else Transition()

    def abort(self) -> None:
        """Takes everything back: the regions are as they were before. Harmless when called again, or after commit()."""
        move, self._move = self._move, None
        if move is not None:
            move.abort()


def prepare_pause(tags: Tags = None, *, backup: str | None = None, timeout: float = ATTACHED_S) -> Prepared:
    """The first half of :func:`pause`, with its arguments and errors, for those who pause together or not at all."""
    found = find(tags)
    if backup is not None:
        check_backup(backup)
    timeout = seconds(timeout)
    if not found:
        return Prepared(None)
    move = _Move([each._core for each in found], [], threading.get_ident())
    move.prepare(backup, True, 0.0, timeout, None)
    return Prepared(move)


class _Report:
    """What the core calls with the progress: nothing that a caller's function raises may reach it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.interrupt: BaseException | None = None  # such as Ctrl-C: raised when the transition has ended

    def __call__(self, done: int, total: int) -> None:
        try:
            self._progress(done, total)
        except Exception:
            log.exception("the progress function of a transition failed")
        except BaseException as error:
            self.interrupt = error


def _wrapper(core: Any) -> Region:
    return _regions[core.tag, core.device, core.backup]


def _tags(cores: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(core.tag for core in cores))


def _live(each: Region) -> Ranges:
    """What of the region is to be copied: what torch's pools hold live, or all segments where torch has no say."""
    known = _adapter.live(each) if _adapter is not None else None
    return list(each._core.live()) if known is None else known


def outside() -> AbstractContextManager[None]:
    """Within it, torch allocates in its default pool again, whatever regions the thread has entered."""
    return adapter().outside()


def trim(tags: Tags = None) -> None:
    """Gives back what torch's pools over these active regions hold free, after waiting for the device.

    A pool cannot shrink while it lives, so a new one takes its place; segments with live tensors follow when those are
    gone and ``torch.cuda.empty_cache()`` runs. Pools with graphs are left alone. Raises ValueError for unknown tags.
    """
    chosen = [each for each in find(tags) if each.state == "active"]
    if _adapter is not None:
        _adapter.trim(chosen)
    _core.reclaim([each._core for each in chosen])
