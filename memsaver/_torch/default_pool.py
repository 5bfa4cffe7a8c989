"""torch's default pool as a region, with expandable segments: see csrc/torch/default_pools.cpp."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import torch

from memsaver import _core
from memsaver._adapter import adapter, note, patch
from memsaver._torch.pools import DEFAULT_POOL, LIBRARY, RELEASE, plain_allocator, private
from memsaver._torch.routes import empty_cache, side_pools
from memsaver.broker import pool_client
from memsaver.errors import Error
from memsaver.policies import check_backup, check_tag, device_name
from memsaver.regions import Region, all_regions, default_device, wrapper

_EXPANDABLE: Final = "expandable_segments"
_PIECE: Final = "large_segment_size_mb"  # from torch 2.11 on
_PIECE_MIB: Final = 32  # a class of chunks: see csrc/memory/chunk.h
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first one that is set


def default_pool(tag: str = "torch", device: str | torch.device | None = None, backup: str = "host") -> Region:
    """Makes torch's default pool on a device a region, so that activations and cached blocks leave with a pause.

    The region has all memory that torch takes from now on for its default pool, for pools of graphs without a region,
    and for pools of the user without an allocator of their own. torch keeps its allocator, with expandable segments,
    which this call turns on if they are off. A pause copies blocks in use and no free ones. Call it before the first
    allocation: memory that torch has already stays outside of the region.

    While the region is paused or about to be, threads allocate from another pool, whose memory comes from the driver,
    beside regions and beside a shared pool. Threads inside ``torch.cuda.use_mem_pool()`` keep their pool: do not use
    such pools while the region is paused. Tensors of the default pool must not be used then either. A pause returns
    free blocks first, so a resume takes memory for the blocks in use alone.

    The region cannot be entered or closed, and lasts as long as the process. ``torch.cuda.empty_cache()`` returns
    memory of the region while it is active. If there is no memory, torch frees its cached blocks and tries again then,
    and not while the region is paused.

    Args:
        tag: The region's tag.
        device: ``"cuda"`` or ``"cuda:N"``. None: the current CUDA device.
        backup: The policy for blocks in use: ``"host"``, ``"disk"`` or ``"none"``.

    Returns:
        The region. A second call for the device gives the same one.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: ``device`` is not a CUDA device, or there is none. Or ``backup`` is not a policy, the tag has
            another region on the device, or the device's default pool is a region with another tag or policy.
        ConfigError: The policy is ``"disk"``, and ``disk_dir`` is not set.
        memsaver.Error: This torch's allocator cannot be used: a version before 2.10, another backend than ``"native"``,
            or a table of the driver's functions that is not as expected.

    Examples:
        >>> torchs = memsaver.default_pool()  # doctest: +SKIP
        >>> activations = torch.empty(1 << 30, device="cuda")  # doctest: +SKIP
        >>> memsaver.pause("torch").released_bytes  # doctest: +SKIP
        1073741824
    """
    check_tag(tag)
    check_backup(backup)
    name = default_device() if device is None else device_name(device)
    if not name.startswith("cuda:"):
        where = "there is no CUDA device" if device is None else f"device is {name!r}, expected a CUDA device"
        raise ValueError(f"{where}: torch has a default pool on CUDA devices alone")
    if torch.version.cuda is None:
        raise Error(f"this build of torch ({torch.__version__}) has no CUDA")
    if RELEASE < (2, 10):
        raise Error(f"torch {torch.__version__} has no regions beside expandable segments: expected 2.10 or newer")
    with default_pools.making:
        default_pools.check(tag, name, backup)
        former = _settings()
        settings = _with_segments(former)
        torch.cuda.init()
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise Error(f"torch's allocator is {backend!r}, expected 'native'")
        if reason := _core.bind_default_pools(LIBRARY):
            raise Error(f"torch's default pool cannot be a region: {reason}")
        note("default pool")
        pool_client.join(name)
        patch(["captures"])
        router = adapter()
        if settings != former:
            _set(settings)
        try:
            region = wrapper(_core.default_pool(tag, name, backup))
        except BaseException:
            if settings != former:
                _set(former)
            raise
        router.adopt_pool(region, DEFAULT_POOL)
        default_pools.add(region)
    return region


class DefaultPools:
    """The regions of default pools. While one is paused or about to be, all threads allocate from another pool."""

    def __init__(self) -> None:
        self.making = threading.RLock()  # one region at a time
        self._lock = threading.RLock()  # over the check of a state and the move that follows
        self._regions: dict[int, Region] = {}  # by the number of the device
        # The numbers of the devices of each pause that has begun and not ended. Changed without a lock, by single
        # operations: a collection of garbage may end a pause that the caller dropped, in any line of any thread.
        self._expected: dict[object, frozenset[int]] = {}

    def check(self, tag: str, device: str, backup: str) -> None:
        """Raises ValueError if the device has another default pool, or the tag another region."""
        region = next((each for each in self._regions.values() if each.device == device), None)
        if region is None:
            if any((each.tag, each.device) == (tag, device) for each in all_regions()):
                raise ValueError(f"tag is {tag!r}, which has a region on {device}, expected a new tag")
        elif (region.tag, region.backup) != (tag, backup):
            raise ValueError(
                f"tag is {tag!r} and backup is {backup!r}, but the default pool of {device} is region "
                f"{region.tag!r} with {region.backup!r}"
            )

    def add(self, region: Region) -> None:
        self._regions.setdefault(region._index, region)

    def among(self, regions: Iterable[Region]) -> list[Region]:
        return [each for each in regions if each in self._regions.values()]

    def expect_pause(self, regions: Sequence[Region]) -> Callable[[], object]:
        """Lets all threads allocate from other pools before a pause, up to the call of the returned function or later.

        torch would hand out free blocks of a default pool, which have no memory while it is paused. Of regions without
        memory too: an earlier transition may resume them before the pause. Raises Error during a capture, and while
        another thread is inside a region of the device: the other pool would come before theirs.
        """
        pause, mine = object(), self.among(regions)
        self._expected[pause] = frozenset(region._index for region in mine)
        end = partial(self._expected.pop, pause, None)
        try:
            with self._lock:
                for region in mine:
                    index = region._index
                    if region.state not in ("active", "pausing") or side_pools.has_begun(index):
                        continue
                    empty_cache()  # free blocks would leave and come back
                    with side_pools.lock:  # no thread enters a region meanwhile: this pool would take its allocations
                        adapter().check_pausable([region], threading.get_ident())
                        begun = side_pools.begin(index, plain_allocator())
                    if not begun:
                        raise Error(
                            f"region {region.tag!r}, torch's default pool, cannot be paused: a CUDA graph is being "
                            "captured; end the capture first"
                        )
        except BaseException:
            end()  # else threads would never move back
            raise
        return end

    def move_threads_back(self) -> None:
        with self._lock:
            expected = frozenset[int]().union(*list(self._expected.values()))
            for index, region in self._regions.items():
                if side_pools.has_begun(index) and region.state == "active" and index not in expected:
                    side_pools.end(index)


default_pools = DefaultPools()


def _settings() -> str:
    """torch's settings. A call that sets some resets the others."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return str(torch._C._accelerator_getAllocatorSettings())
    return next((value for name in _VARIABLES if (value := os.environ.get(name))), "")


def _with_segments(former: str) -> str:
    """torch's settings with expandable segments, in pieces of whole chunks. Raises Error if they are turned off."""
    plain = former.replace(" ", "").lower()
    if f"{_EXPANDABLE}:false" in plain:
        raise Error(f"torch's allocator settings are {former!r}, expected {_EXPANDABLE}:True or none")
    missing = [] if f"{_EXPANDABLE}:true" in plain else [f"{_EXPANDABLE}:True"]
    if RELEASE >= (2, 11) and _PIECE not in plain:  # else the pieces have 2 MiB
        missing.append(f"{_PIECE}:{_PIECE_MIB}")
    return ",".join([*([former] if former else []), *missing])


def _set(settings: str) -> None:
    try:
        private("_accelerator_setAllocatorSettings")(settings)
    except (ValueError, RuntimeError) as error:
        raise Error(f"torch refuses the settings {settings!r} of its allocator: {error}") from error
