"""Pause, resume and switch, at once or in the background; trim."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext, suppress
from typing import Any

from memsaver import _guests, policies
from memsaver._adapter import loaded
from memsaver._moves import Move, active
from memsaver._results import Display, display, in_thread
from memsaver._results import Transition as Transition
from memsaver._results import TransitionFuture as TransitionFuture
from memsaver.policies import READERS_S, Backup, Bounds, Lazy, Restore
from memsaver.regions import NOTHING, Chosen, Selection, choose, find


def pause(
    tags: Selection = None,
    *,
    backup: Backup = None,
    lazy: Lazy = None,
    timeout: float | None = None,
    reader_timeout: float = READERS_S,
    progress: bool = False,
) -> Transition:
    """Releases the device memory of regions and keeps their addresses, after waiting for the device's work.

    Pausing a paused region is a no-op. If a driver or file call fails after the commit, the regions are paused, and
    contents that their policies keep are not lost: another pause continues, and a resume restores them.

    Args:
        tags: A tag, a Region, several of either, or None for all regions. A tag selects its regions on all devices.
            Guests of the tags leave first (see ``memsaver.Guest``); None names the tags of all guests as well.
        backup: Another policy than the regions' own: one for all tags, or ``{tag: policy}``. With ``"none"`` the
            contents are undefined after the resume, and ``Region.discarded`` is True until then if the region's own
            policy keeps them.
        lazy: True leaves chunks and contents where they are, not mapped, until a resume or an allocation lacks memory.
            ``"copy"`` copies the contents as well, while the process copies nothing else on the device: then a demand
            gets chunks without a wait for their copies. One value for all tags, or by tag. False for such a region
            copies and returns the rest. Default: the option ``lazy``. Not for regions with ``same_as``.
        timeout: Seconds for the whole call up to its commit, with all of its waits. None: no bound.
        reader_timeout: Seconds to wait for other processes that have tensors of the regions. Of two bounds the earlier
            one ends the wait.
        progress: True shows the copied bytes and the stage: as a bar (``pip install 'memsaver[progress]'``), or, if
            stderr is no terminal, as a line per second of the logger ``memsaver``, with the level INFO.

    Returns:
        The transition.

    Raises:
        TypeError: An argument has a wrong type.
        ModuleNotFoundError: ``progress`` needs tqdm for a bar.
        ValueError: A tag has no region, a policy does not exist, or a bound is negative.
        BackupError: Host memory or disk space is short. Nothing has changed.
        SameError: Regions with one ``same_as`` have different contents. Nothing has changed.
        AttachedError: A bound ended the wait for attached processes. Nothing has changed.
        WaitTimeoutError: ``timeout`` ended another wait. Nothing has changed.
        GuestError: A guest of the tags could not leave. Nothing has changed.
        DriverError: A call of the driver failed.
        memsaver.Error: A graph is being captured, or another thread is inside a region. Nothing has changed.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> memsaver.pause(["weights", kv]).paused
        ('weights', 'kv_cache')
    """
    bounds = Bounds(timeout, reader_timeout=reader_timeout)
    return transition(choose(tags), NOTHING, bounds, backup=backup, lazy=lazy, progress=progress)


def resume(
    tags: Selection = None,
    *,
    restore: Restore = True,
    timeout: float | None = None,
    memory_timeout: float | None = None,
    progress: bool = False,
) -> Transition:
    """Maps memory under the addresses of paused regions, and copies back the contents that have a backup.

    Resuming an active region is a no-op.

    Args:
        tags: As for ``pause()``. Guests of the tags come back last.
        restore: False leaves the contents undefined, for regions that are about to be overwritten. For all tags, or
            ``{tag: bool}``; True for tags that are left out.
        timeout: Seconds for the whole call up to its commit. None: no bound.
        memory_timeout: Seconds to wait for memory that others hold. 0: no wait. None: as
            ``configure(memory_timeout=...)`` says. Of two bounds the earlier one ends the wait.
        progress: As for ``pause()``.

    Returns:
        The transition.

    Raises:
        ValueError: A tag has no region, or a bound is negative.
        OutOfMemoryError: The device is short of memory until a bound ends the wait. Nothing has changed.
        WaitTimeoutError: ``timeout`` ended another wait. Nothing has changed.
        BackupError: A file with contents cannot be read. Nothing has changed.
        GuestError: A guest of the tags could not come back. The regions are active, and another resume continues.
        DriverError: A call of the driver failed.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> _ = memsaver.pause("weights")
        >>> memsaver.resume("weights", memory_timeout=30).resumed
        ('weights',)
    """
    bounds = Bounds(timeout, memory_timeout)
    return transition(NOTHING, choose(tags), bounds, restore=restore, progress=progress)


def switch(
    *,
    pause: Selection = (),
    resume: Selection = (),
    backup: Backup = None,
    lazy: Lazy = None,
    restore: Restore = True,
    timeout: float | None = None,
    memory_timeout: float | None = None,
    reader_timeout: float = READERS_S,
    progress: bool = False,
) -> Transition:
    """Pauses and resumes regions in one transition. Contents are copied in both directions at once.

    All needs are reserved first. If the resume fails after the commit, the regions to pause are paused, and the same
    call can be made again.

    Args:
        pause: The regions to pause: a tag, a Region, several of either, or None for all regions.
        resume: The regions to resume, in the same forms.
        backup: As for ``pause()``.
        lazy: As for ``pause()``. Chunks that the resume lacks are copied out at once.
        restore: As for ``resume()``.
        timeout: Seconds for the whole call up to its commit. None: no bound.
        memory_timeout: As for ``resume()``.
        reader_timeout: As for ``pause()``.
        progress: As for ``pause()``.

    Returns:
        The transition.

    Raises:
        ValueError: A region is selected on both sides, or as from ``pause()`` and ``resume()``.
        memsaver.Error: As from ``pause()`` and ``resume()``.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> optimizer = memsaver.region("optimizer", device="cpu", backup="host")
        >>> _ = memsaver.pause("weights")
        >>> done = memsaver.switch(pause="optimizer", resume="weights")
        >>> done.paused, done.resumed
        (('optimizer',), ('weights',))
    """
    bounds = Bounds(timeout, memory_timeout, reader_timeout)
    leaving, coming = choose(pause, "pause"), choose(resume, "resume")
    return transition(leaving, coming, bounds, backup=backup, lazy=lazy, restore=restore, progress=progress)


def start(
    *,
    pause: Selection = (),
    resume: Selection = (),
    backup: Backup = None,
    lazy: Lazy = None,
    restore: Restore = True,
    timeout: float | None = None,
    memory_timeout: float | None = None,
    reader_timeout: float = READERS_S,
    progress: bool = False,
) -> TransitionFuture:
    """Starts the transition of ``switch()`` in the background.

    Transitions of a region run in the order of the calls. The interpreter does not exit before their end.

    Args:
        pause: As for ``switch()``.
        resume: As for ``switch()``.
        backup: As for ``switch()``.
        lazy: As for ``switch()``.
        restore: As for ``switch()``.
        timeout: As for ``switch()``. The seconds begin with this call.
        memory_timeout: As for ``switch()``.
        reader_timeout: As for ``switch()``.
        progress: As for ``pause()``, until the end of the transition.

    Returns:
        The future of the transition, whose ``result()`` and ``await`` raise its errors.

    Raises:
        ValueError: As from ``switch()``.
        memsaver.Error: A thread, this one included, is inside a region to pause.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> memsaver.start(pause="weights").result(timeout=60).paused
        ('weights',)
    """
    bounds = Bounds(timeout, memory_timeout, reader_timeout)
    leaving, coming = choose(pause, "pause"), choose(resume, "resume")
    return started(leaving, coming, bounds, backup=backup, lazy=lazy, restore=restore, progress=progress)


def started(
    pause: Chosen, resume: Chosen, bounds: Bounds, *, progress: bool = False, **choices: Any
) -> TransitionFuture:
    """``transition()`` in the background. Transitions of one region run in the order of the calls."""
    future, shown = TransitionFuture(), display(progress)
    # To be taken once: after an interrupt its thread may run or not.
    queued = [_queued(pause, resume, bounds, thread=None, **choices)]
    try:
        in_thread(lambda: _run(queued.pop(), shown), "memsaver transition", future)
    except BaseException as error:
        with suppress(IndexError):
            if (move := queued.pop()) is not None:
                move.fail(error)
        raise
    return future


def transition(pause: Chosen, resume: Chosen, bounds: Bounds, *, progress: bool = False, **choices: Any) -> Transition:
    """Changes the state of regions. See ``switch()``. A tag of guests moves only if it is among those of a side.

    ``choices``: ``backup``, ``lazy`` and ``restore``.
    """
    shown = display(progress)
    move = _queued(pause, resume, bounds, thread=threading.get_ident(), **choices)
    try:
        return _run(move, shown)
    except BaseException as error:
        if move is not None:
            move.fail(error)  # also after an interrupt before it ran
        raise


def _queued(
    pause: Chosen,
    resume: Chosen,
    bounds: Bounds,
    *,
    thread: int | None,
    backup: Backup = None,
    lazy: Lazy = None,
    restore: Restore = True,
) -> Move | None:
    """Checks the arguments, and queues the transition at its regions. None: there is nothing to move.

    ``thread``: the one that may be inside a region that it pauses.
    """
    kept = policies.of_call("backup", backup, pause.tags)
    restored = policies.of_call("restore", restore, resume.tags)
    lazily = policies.of_call("lazy", lazy, pause.tags)
    for each in pause.regions:
        if each.same_as is not None and lazily.get(each.tag) and kept.get(each.tag, "host") == "host":
            raise ValueError(
                f"lazy is {lazily[each.tag]!r} for {each.tag!r}, whose contents are kept with "
                f"same_as={each.same_as!r}, expected False"
            )
    coming = set(resume.regions)
    both = [each.tag for each in pause.regions if each in coming] + sorted(pause.guests & resume.guests)
    if both:
        raise ValueError(f"{both[0]!r} is to be paused and resumed at once, expected one of the two")
    if not pause.tags and not resume.tags:
        return None
    _guests.check_caller([*pause.tags, *resume.tags])
    if pause.regions and (torch := loaded()) is not None:  # an early error; prepare() checks again
        torch.check_pausable(active(pause.regions), thread)
    return Move(pause, resume, thread, bounds, kept, restored, lazily)


def _run(move: Move | None, shown: Display | None) -> Transition:
    if move is None:
        return Transition()
    with nullcontext() if shown is None else shown(move.recorder):
        try:
            move.prepare()
            return move.commit()
        except BaseException as error:
            move.fail(error)
            raise


def prepare_pause(
    tags: Selection = None,
    *,
    backup: Backup = None,
    lazy: Lazy = None,
    timeout: float | None = None,
    reader_timeout: float = READERS_S,
) -> Move:
    """Prepares a pause without committing it, for processes that pause together or not at all.

    The regions are "pausing" until ``commit()`` or ``abort()`` of the result, or until it is dropped, which aborts. The
    arguments and the errors are those of ``pause()`` up to its commit. ValueError: there is nothing to pause.
    """
    bounds = Bounds(timeout, reader_timeout=reader_timeout)
    move = _queued(choose(tags), NOTHING, bounds, thread=threading.get_ident(), backup=backup, lazy=lazy)
    if move is None:
        raise ValueError(f"tags is {tags!r}, expected a region or a guest to pause")
    try:
        move.prepare()
        move.recorder.enter("prepared")
        return move
    except BaseException as error:
        move.fail(error)
        raise


def trim(tags: Selection = None, *, timeout: float | None = None) -> None:
    """Returns memory that active regions hold and that no tensor uses, after waiting for the device.

    These are the free blocks of torch's pools and the chunks without a segment. Contents do not move: a chunk with a
    live tensor stays whole. A pause and a resume lay the chunks of a region out anew.

    A pool of torch cannot shrink, so a new pool takes its place. Segments with live tensors are freed after the tensors
    by ``torch.cuda.empty_cache()``. Pools with graphs are not changed. torch may empty its other caches as well.

    Args:
        tags: A tag, a Region, several of either, or None for all regions.
        timeout: Seconds to wait for the device's work. None: no bound.

    Raises:
        ValueError: A tag has no region, or ``timeout`` is negative.
        WaitTimeoutError: ``timeout`` ended the wait.
        memsaver.Error: A graph is being captured.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> kept = kv.empty((16 << 20,), torch.uint8)
        >>> freed = kv.empty((128 << 20,), torch.uint8)
        >>> del freed
        >>> memsaver.trim("kv_cache")
        >>> kv.allocated_bytes >> 20, kv.mapped_bytes >> 20  # MiB: the chunk with `kept` stays whole
        (16, 32)
    """
    bounds, since = Bounds(timeout), time.monotonic()
    chosen = active(find(tags))
    if (torch := loaded()) is not None:
        torch.trim(chosen)
    for each in chosen:
        each._handle.release_unused(bounds.left(since).timeout)
