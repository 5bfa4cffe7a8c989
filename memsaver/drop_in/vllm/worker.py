"""The calls of vLLM's worker: KV transfer, errors on several ranks, the driver's free memory, the end of the engine."""

from __future__ import annotations

import _thread
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from memsaver import config, drop_in
from memsaver.drop_in import DropInError
from memsaver.drop_in.vllm import ranks
from memsaver.errors import Error

_MONITOR = "DeathPipeMonitor"  # the thread of a worker that reads the executor's pipe: it ends when the pipe is closed
_LOOK_S = 0.1
transfers_kv = False  # vLLM has a KV connector, which may export the memory of the KV cache
_monitor: threading.Thread | None = None


def install(module: ModuleType) -> tuple[()]:
    """Replaces the constructor of ``Worker``, and ``sleep``, ``wake_up`` and, from vLLM 0.31 on, ``discard``."""
    worker, logger = module.Worker, module.logger
    worker.__init__ = _without_transfer(worker.__init__)
    for name in ("sleep", "wake_up", "discard"):
        if hasattr(worker, name):
            setattr(worker, name, _settled(getattr(worker, name), logger))
    return ()


def shares() -> bool:
    """Whether this process takes its memory from a shared pool."""
    return config.options().get("pool") == "shared"


def _is_in(*states: str) -> bool:
    status = drop_in.status().get("vllm")
    return status is not None and status.state in states


def _without_transfer(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of ``Worker``, the first call that has vLLM's configuration. It comes before all allocations.

    It gives each segment of the KV cache one handle of the driver if vLLM transfers a KV cache that lies in a region.
    Libraries that transfer KV caches, such as NIXL, LMCache and UCX, export the handle at the first byte of a tensor.
    With several handles in a segment they read the first chunk alone, without an error. Raises DropInError with a
    shared pool, whose chunks have fixed sizes.
    """

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        global transfers_kv
        transfer = vllm_config.kv_transfer_config
        # Sleep mode sets enable_cumem_allocator. Without it there are no regions.
        is_in_region = _is_in("waiting", "active") and vllm_config.model_config.enable_cumem_allocator
        if is_in_region and transfer is not None and transfer.is_kv_transfer_instance:
            if shares():
                raise DropInError(
                    f"vLLM's KV connector {transfer.kv_connector!r} may export the memory of the KV cache. In a shared "
                    "pool it has many handles of the driver, and the other side would read the first one alone. Start "
                    "this engine without MEMSAVER_POOL=shared, without the KV connector, or without sleep mode"
                )
            transfers_kv = True
        original(self, vllm_config, *args, **kwargs)

    return init


def _settled(original: Callable[..., Any], logger: logging.Logger) -> Callable[..., Any]:
    """The method, with errors that the last rank raises for all, see :func:`ranks.settle`.

    vLLM's worker asserts, as the last step of a sleep, that the driver's free memory has not shrunk. With a shared pool
    a sleep returns memory to the pool, and the broker or another process may take memory of the driver meanwhile.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_in("active"):
            return original(self, *args, **kwargs)
        result, error = None, None
        with bounding() if shares() else nullcontext():
            try:
                result = original(self, *args, **kwargs)
            except EndedError:
                raise
            except Exception as caught:
                if isinstance(caught, AssertionError) and shares() and "after sleeping" in str(caught):
                    logger.info("memsaver: the memory of this sleep is in the shared pool, not in the driver.")
                else:
                    error = caught
            ranks.settle(self, original.__name__, error, logger)
        return result

    return method


class EndedError(Error):
    """The engine has ended or shuts down."""


@contextmanager
def bounding() -> Iterator[None]:
    """Within the with statement, a wait of the main thread raises EndedError when the engine shuts down.

    vLLM's executor closes a pipe when it shuts down, for example after the end of one worker. The others then have five
    seconds to return from their call, four more after SIGTERM, which vLLM ignores by then, and get SIGKILL. A wake-up
    may wait longer for memory.

    A no-op in other threads, and where vLLM has no such pipe: the engine is in this process, or Ray has the workers.
    """
    global _monitor
    if _monitor is None:  # else it may have ended since
        _monitor = next((each for each in threading.enumerate() if each.name == _MONITOR), None)
    monitor = _monitor
    previous: Any = signal.getsignal(signal.SIGTERM)  # vLLM's
    if monitor is None or not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    over = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if not monitor.is_alive():
            raise EndedError("vLLM's engine has ended or shuts down, and this worker ends with it")
        previous(number, frame)

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if not monitor.is_alive():
                _thread.interrupt_main(signal.SIGTERM)  # runs the handler in the main thread; sends no signal
                return

    signal.signal(signal.SIGTERM, handle)
    threading.Thread(target=watch, name="memsaver engine", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, previous)
