"""The allocator of vLLM's sleep mode over regions."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from memsaver import _adapter, transitions
from memsaver.drop_in import DropInError
from memsaver.drop_in.tagged import TaggedRegions
from memsaver.drop_in.vllm import check_patches, ranks, worker
from memsaver.drop_in.vllm.sources import MODULE, REPLACED
from memsaver.drop_in.vllm.worker import shares
from memsaver.regions import Region, owning

Handle = tuple[int, int, int, int]  # device, bytes, address, handle of the driver (0: chunks are the region's)
_SHARED_POOL_S = 60.0  # seconds that wake_up waits for memory that another process holds


class RegionAllocator:
    """``CuMemAllocator`` over regions. :func:`install` makes a subclass for the installed vLLM.

    Each tag has a region ``vllm.<tag>``. A tag that is allocated in while its region sleeps gets another,
    ``vllm.<tag>.2``, which is awake. The regions have no backup policy of their own: each sleep brings it.
    """

    instance: ClassVar[RegionAllocator | None] = None
    module: ClassVar[ModuleType]  # with the replaced names
    data: ClassVar[Any]  # vLLM's AllocationData
    default_tag: ClassVar[str]

    def __init__(self) -> None:
        self.current_tag = self.default_tag
        self.allocator_and_pools: dict[str, Any] = {}
        self._regions = TaggedRegions("vllm")

    @classmethod
    def get_instance(cls) -> RegionAllocator:
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance

    # Allocation

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Allocate in the region of a tag within the with statement. Its free segments are released at the end."""
        tag = self.default_tag if tag is None else tag
        if not isinstance(tag, str):
            raise TypeError(f"tag is {tag!r}, expected a string or None")
        ranks.publish()
        entered = self._regions.active(tag, one_handle=tag == "kv_cache" and worker.transfers_kv)
        with self._tagged(tag):
            with entered:
                # Callers read the length alone. The pool itself would keep its free segments if it were held here.
                self.allocator_and_pools.setdefault(tag, []).append((entered, None))
                yield
            _adapter.adapter().trim([entered])

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """The id of a graph pool over the region ``vllm.cudagraph``. Raises as :func:`memsaver.graph`."""
        from memsaver._torch.graphs import check_registration

        check_registration()
        entered = self._regions.active("cudagraph")
        self.allocator_and_pools.setdefault("cudagraph", [(entered, None)])
        with self._tagged("cudagraph"):
            yield entered.pool.id

    @contextmanager
    def _tagged(self, tag: str) -> Iterator[None]:
        outer, self.current_tag = self.current_tag, tag
        try:
            yield
        finally:
            self.current_tag = outer

    @property
    def pointer_to_data(self) -> dict[int, Any]:
        """The segments that torch has allocated, by address, as ``AllocationData``. Writes to it change nothing."""
        found = {}
        for tag, region in self._regions.all():
            for address, nbytes in region._core.segments():
                data = self.data((region._index, nbytes, address, 0), tag)
                data.is_asleep = region.state != "active"  # versions up to 0.24 lack it
                found[address] = data
        return found

    def get_current_usage(self) -> int:
        """Bytes of all segments, asleep ones included."""
        return sum(data.handle[1] for data in self.pointer_to_data.values())

    def release_pools(self) -> None:
        """Return the segments that torch holds free. Those with live tensors follow when the tensors are gone."""
        self.allocator_and_pools.clear()
        gc.collect()
        torch = _adapter.loaded()
        if torch is not None:
            torch.trim([each for _, each in self._regions.all()], all_pools=True)
        _empty_cache()

    close = release_pools

    # Sleep

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Release the memory of all tags, and discard their contents, but for ``offload_tags``: None: the default tag.

        Raises as :func:`memsaver.pause`, or DropInError: a rank has no drop-in, or another version of it.
        """
        kept = _tags((self.default_tag,) if offload_tags is None else offload_tags)
        with ranks.naming("sleep"):
            check_patches()
            ranks.check()
            self._pause([tag for tag, _ in self._regions.all()], kept)
        gc.collect()
        _empty_cache()

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Release the memory of these tags without their contents. Raises as :meth:`sleep`."""
        with ranks.naming(f"discard of {', '.join(_tags(tags))}"):
            ranks.check()
            self._pause(_tags(tags), ())

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Map memory at the addresses of these tags again, or of all, and restore contents that were kept.

        vLLM from 0.32 on wakes tags outside of its DEFERRABLE_TAGS in any case. Raises as :func:`memsaver.resume`.
        """
        gc.collect()
        _empty_cache()
        deferrable = getattr(self.module, "DEFERRABLE_TAGS", None)
        waking = [
            each
            for tag, each in self._regions.all()
            if each.state != "active"
            and (tags is None or tag in tags or (deferrable is not None and tag not in deferrable))
        ]
        discarded = [each for each in waking if not _is_offloaded(each)]
        with ranks.naming(f"wake-up of {', '.join(tags or ['all tags'])}"):
            transitions.resume(waking, memory_timeout=_SHARED_POOL_S if shares() else 0.0)
        for each in discarded:
            for address, nbytes in each._core.segments():
                # Already mapped. Code that replaces this function to see each mapping still does.
                self.module.create_and_map((each._index, nbytes, address, 0))

    def _pause(self, tags: Sequence[str], kept: Sequence[str]) -> None:
        chosen = [(tag, each) for tag, each in self._regions.all() if tag in tags]
        asleep = [(tag, each) for tag, each in chosen if each.state != "active"]
        awake = [(tag, each) for tag, each in chosen if each.state == "active" and each.allocated_bytes]
        policies = {each.tag: "host" if tag in kept else "none" for tag, each in awake}
        done = transitions.pause([each for _, each in awake], backup=policies)
        self.module.logger.info(
            "memsaver: sleep released %.2f GiB in %.3f s; %.2f GiB of contents are kept in host memory.",
            done.released_bytes / 2**30,
            done.seconds,
            done.copied_bytes / 2**30,
        )
        if any((tag in kept) != _is_offloaded(each) for tag, each in asleep):
            self.module.logger.warning("memsaver: a sleep cannot change the policy of tags that are asleep already.")


def install(module: ModuleType) -> tuple[str, ...]:
    """Replace the names of ``vllm.device_allocator.cumem``. Returns the replaced names in full.

    Raises:
        DropInError: The original allocator is in use, or another package patches it.
    """
    check_patches()
    original = module.CuMemAllocator
    if original.instance is not None:
        raise DropInError(f"{MODULE}.CuMemAllocator is in use already: set MEMSAVER_DROP_IN before vLLM starts")
    names = {"__module__": MODULE, "__doc__": original.__doc__, "default_tag": original.default_tag, "module": module}
    names["data"] = import_module("vllm.device_allocator").AllocationData
    by_name = {
        "CuMemAllocator": type("CuMemAllocator", (RegionAllocator,), names),
        "create_and_map": _create_and_map,
        "unmap_and_release": _unmap_and_release,
    }
    for name in REPLACED:
        setattr(module, name, by_name[name])
    return tuple(f"{MODULE}.{name}" for name in REPLACED)


def _create_and_map(handle: Handle) -> None:
    """Map a segment. Its region is the unit: the whole region resumes."""
    found = owning(handle[2])
    if found is None:
        raise DropInError(f"no region has the address {handle[2]:#x}")
    found.resume()


def _unmap_and_release(handle: Handle) -> NoReturn:
    raise DropInError(
        f"the segment at {handle[2]:#x} cannot be released alone: memsaver releases whole tags, by sleep()"
    )


def _is_offloaded(region: Region) -> bool:
    """Whether a region sleeps and its contents are kept."""
    return region.state != "active" and region._core.keeps_contents


def _tags(tags: tuple[str, ...] | str) -> tuple[str, ...]:
    if isinstance(tags, str):
        return (tags,)
    if not isinstance(tags, tuple):
        raise TypeError(f"tags is {tags!r}, expected a string or a tuple of strings")
    return tags


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
