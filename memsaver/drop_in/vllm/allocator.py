"""The allocator of vLLM's sleep mode over regions."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NoReturn

from memsaver import _adapter, transitions
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.tagged import TaggedRegions, index_of
from memsaver.drop_in.vllm import check_patches, ranks, worker
from memsaver.drop_in.vllm.segments import Handle, Segments, is_offloaded
from memsaver.drop_in.vllm.sources import MODULE, REPLACED
from memsaver.drop_in.vllm.worker import shares
from memsaver.regions import Region, owning

_SHARED_POOL_S = 60.0  # seconds that wake_up waits for memory that another process holds


class RegionAllocator:
    """The methods of ``CuMemAllocator`` over regions. The subclass that :func:`install` makes inherits from both.

    Each tag has a region ``vllm.<tag>``. A tag that is allocated in while its region sleeps gets another,
    ``vllm.<tag>.2``, which is awake. The regions have no backup policy of their own: each sleep brings it.
    """

    module: ClassVar[ModuleType]  # with the replaced names
    default_tag: ClassVar[str]

    def __init__(self) -> None:
        self.current_tag = self.default_tag
        self.allocator_and_pools: dict[str, Any] = {}
        self.pointer_to_data = Segments(self, self.module.AllocationData)
        self._regions = TaggedRegions("vllm")

    # Allocation

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Allocate in the region of a tag within the with statement. Its free segments are released at the end.

        Raises:
            TypeError: The tag is no string.
        """
        tag = self.default_tag if tag is None else tag
        if not isinstance(tag, str):
            raise TypeError(f"tag is {tag!r}, expected a string or None")
        ranks.publish()
        outer, self.current_tag = self.current_tag, tag
        try:
            entered = self._regions.active(tag, one_handle=tag == "kv_cache" and worker.transfers_kv)
            with entered:
                self._count_pool(tag, entered)
                yield
            _adapter.adapter().trim([entered])
        finally:
            self.current_tag = outer

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """The id of a graph pool over the region ``vllm.cudagraph``.

        Raises:
            memsaver.ConfigError: As :func:`memsaver.graph`: NCCL would register the buffers of graphs.
        """
        from memsaver._torch.graphs import check_registration

        check_registration()
        entered = self._regions.active("cudagraph")
        if "cudagraph" not in self.allocator_and_pools:
            self._count_pool("cudagraph", entered)
        outer, self.current_tag = self.current_tag, "cudagraph"
        try:
            yield entered.pool.id
        finally:
            self.current_tag = outer

    def get_current_usage(self) -> int:
        """Bytes of all segments, asleep ones included."""
        return sum(data.handle[1] for data in self.pointer_to_data.values())

    def release_pools(self) -> None:
        """Return the segments that torch holds free. Those with live tensors follow when the tensors are gone."""
        self.allocator_and_pools.clear()
        gc.collect()
        torch = _adapter.loaded()
        if torch is not None:
            torch.trim([each for _, each in self.regions()], all_pools=True)
        _empty_cache()

    def close(self) -> None:
        """As :meth:`release_pools`."""
        self.release_pools()

    # Sleep

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Release the memory of all tags.

        Args:
            offload_tags: Tags with contents to keep in pinned host memory. Those of other tags are discarded. None: the
                default tag.

        Raises:
            DropInError: A rank has no drop-in, or another version of it. Nothing has changed.
            memsaver.Error: As :func:`memsaver.pause`. Nothing has changed.
        """
        kept = _tags((self.default_tag,) if offload_tags is None else offload_tags)
        with ranks.naming("sleep"):
            check_patches()
            ranks.check()
            self._pause([tag for tag, _ in self.regions()], kept)
        gc.collect()
        _empty_cache()

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Release the memory of these tags without their contents. Raises as :meth:`sleep`."""
        with ranks.naming(f"discard of {', '.join(_tags(tags))}"):
            ranks.check()
            self._pause(_tags(tags), ())

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Map memory at the addresses of these tags again, and restore contents that were kept.

        Args:
            tags: None: all tags. vLLM from 0.32 on wakes tags outside of its DEFERRABLE_TAGS in any case.

        Raises:
            memsaver.OutOfMemoryError: A RuntimeError: the memory is not free. All stays asleep.
        """
        gc.collect()
        _empty_cache()
        deferrable = getattr(self.module, "DEFERRABLE_TAGS", None)
        waking = [
            each
            for tag, each in self.regions()
            if each.state != "active"
            and (tags is None or tag in tags or (deferrable is not None and tag not in deferrable))
        ]
        discarded = [each for each in waking if not is_offloaded(each)]
        with ranks.naming(f"wake-up of {', '.join(tags or ['all tags'])}"):
            transitions.resume(waking, memory_timeout=_SHARED_POOL_S if shares() else 0.0)
        for each in discarded:
            for address, nbytes in each._core.segments():
                # Already mapped. Code that replaces this function to see each mapping still does.
                self.module.create_and_map((index_of(each), nbytes, address, 0))

    def regions(self) -> list[tuple[str, Region]]:
        """Tag and region of each region of the allocator."""
        return self._regions.all()

    def _pause(self, tags: Sequence[str], kept: Sequence[str]) -> None:
        chosen = [(tag, each) for tag, each in self.regions() if tag in tags]
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
        if any((tag in kept) != is_offloaded(each) for tag, each in asleep):
            self.module.logger.warning("memsaver: a sleep cannot change the policy of tags that are asleep already.")

    def _count_pool(self, tag: str, entered: Region) -> None:
        """Callers read the length alone. The pool itself would keep its free segments if it were held here."""
        self.allocator_and_pools.setdefault(tag, []).append((entered, None))

    # The callbacks of the original's C library

    def python_malloc_callback(self, handle: Handle) -> NoReturn:
        raise DropInError("memsaver allocates for vLLM: its core takes no callbacks of vllm.cumem_allocator")

    python_free_callback = _python_malloc_callback = _python_free_callback = python_malloc_callback


# Methods of the original that work over the replacement. sources.SLEEP has what they may use.
_INHERITED = ("get_instance", "_shutdown_singleton")


def install(module: ModuleType) -> tuple[str, ...]:
    """Replace the names of ``vllm.device_allocator.cumem``. Returns the replaced names in full.

    Raises:
        DropInError: The original allocator is in use.
    """
    original = module.CuMemAllocator
    if original.instance is not None:
        raise DropInError(f"{MODULE}.CuMemAllocator is in use already: set MEMSAVER_DROP_IN before vLLM starts")
    names: dict[str, Any] = {"module": module, "__module__": module.__name__, "__doc__": original.__doc__}
    for name, member in vars(original).items():
        is_method = isinstance(member, (FunctionType, staticmethod, classmethod, property))
        if is_method and name not in _INHERITED and not hasattr(RegionAllocator, name):
            names[name] = _unknown(name, member)
    replacement = type("CuMemAllocator", (RegionAllocator, original), names)

    def create_and_map(handle: Handle) -> None:
        """Map a segment. Its region is the unit: the whole region resumes."""
        found = owning(handle[2])
        if found is None:
            raise DropInError(f"no region has the address {handle[2]:#x}")
        found.resume()

    def unmap_and_release(handle: Handle) -> NoReturn:
        raise DropInError(
            f"the segment at {handle[2]:#x} cannot be released alone: memsaver releases whole tags, by sleep()"
        )

    module.CuMemAllocator = replacement  # type: ignore[attr-defined]
    module.create_and_map = create_and_map  # type: ignore[attr-defined]
    module.unmap_and_release = unmap_and_release  # type: ignore[attr-defined]
    return tuple(f"{module.__name__}.{name}" for name in REPLACED)


def _unknown(name: str, member: object) -> Any:
    """In the place of a method that memsaver does not have: the original would use state of its own, which is empty."""

    def method(*args: object, **kwargs: object) -> NoReturn:
        raise DropInError(f"memsaver has no {MODULE}.CuMemAllocator.{name}, which this version of vLLM has")

    return property(method) if isinstance(member, property) else method


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
