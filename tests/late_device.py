"""A mode of the whole suite in which the host device is busy, as a GPU is. A missing wait makes tests fail.

Marks and copies are some milliseconds late, and a kernel is in flight at any time. Kernels that touch a tensor are in
flight after it was made, filled or read. If its memory is unmapped without a wait for them, the context dies and every
later call fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import memsaver
from memsaver import _core
from tests import controls, support

LATE_S = 0.004
KERNEL_S = 0.006  # longer than LATE_S, for which an idle device looks busy

FREED_AT_ONCE = "it expects freed memory to be there for the next allocation at once"
# Tests that cannot run on such a device.
EXEMPT = {
    "test_transitions.py::test_memory_freed_during_a_capture_is_reused_after_its_end": FREED_AT_ONCE,
    "test_transitions.py::test_a_capture_that_torch_did_not_begin_can_be_announced": FREED_AT_ONCE,
}

_stream: int | None = None


def begin() -> int:
    global _stream
    if _stream is None:
        _core.open_driver("cpu")
        controls.marks_delay(LATE_S)
        controls.copies_delay(LATE_S)
        controls.busy(LATE_S)
        _stream = controls.stream_create()
    return _stream


def end() -> None:
    """After host_reset(), which removed the stream and the delays."""
    global _stream
    _stream = None


def touch(address: int, nbytes: int) -> None:
    if nbytes > 0:
        controls.stream_touch(begin(), address, nbytes, KERNEL_S)


def settle() -> None:
    """Releases freed memory now instead of some milliseconds later, before a test counts bytes."""
    if not _core.capturing():
        controls.stream_release(begin())
        _core.settle()


def install() -> None:
    def then_touch(call: Callable[..., Any], touches: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(call)
        def both(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(self, *args, **kwargs)
            touches(self, result, *args)
            return result

        return both

    def touch_block(block: support.Block, *_: Any) -> None:
        if block.region.device == "cpu":
            touch(block.address, block.nbytes)

    def touch_tensor(region: memsaver.Region, tensor: Any, *_: Any) -> None:
        if region.device == "cpu":
            touch(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def touch_segment(_: support.Hooks, address: int | None, nbytes: int) -> None:
        if address is not None:
            touch(address, nbytes)

    def settle_first(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def both(*args: Any, **kwargs: Any) -> Any:
            settle()
            return call(*args, **kwargs)

        return both

    def then_settle(call: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(call)
        def both() -> None:
            call()
            settle()

        return both

    support.use_device = then_settle(support.use_device)
    support.free_bytes = settle_first(support.free_bytes)
    memsaver.stats = settle_first(memsaver.stats)
    mapped_bytes: Any = vars(memsaver.Region)["mapped_bytes"]
    region: Any = memsaver.Region  # Any: methods are replaced
    region.mapped_bytes = property(settle_first(mapped_bytes.fget))
    block: Any = support.Block
    block.fill = then_touch(block.fill, touch_block)
    block.check = then_touch(block.check, touch_block)
    hooks: Any = support.Hooks
    hooks.alloc = then_touch(hooks.alloc, touch_segment)
    region.empty = then_touch(region.empty, touch_tensor)
