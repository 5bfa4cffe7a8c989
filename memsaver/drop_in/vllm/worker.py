"""The calls of vLLM's worker: KV transfer, errors on several ranks, waits, and the driver's free memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from memsaver import config, drop_in
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.vllm import engine, ranks

transfers_kv = False  # vLLM has a KV connector, which may export the memory of the KV cache


def install(module: ModuleType) -> None:
    """Replaces the constructor of ``Worker``, and ``sleep``, ``wake_up`` and, from vLLM 0.31 on, ``discard``."""
    worker, logger = module.Worker, module.logger
    worker.__init__ = _without_transfer(worker.__init__)
    worker.sleep = _settled(_without_assertion(worker.sleep, logger), logger)
    worker.wake_up = _settled(worker.wake_up, logger)
    if hasattr(worker, "discard"):
        worker.discard = _settled(worker.discard, logger)


def shares() -> bool:
    """Whether this process takes its memory from a shared pool."""
    return config.options().get("pool") == "shared"


def check_transfer(vllm_config: Any) -> None:
    """Gives each segment of the KV cache one handle of the driver if vLLM transfers a KV cache that lies in a region.

    Libraries that transfer KV caches, such as NIXL, LMCache and UCX, export the handle at the first byte of a tensor.
    With several handles in a segment they read the first chunk alone, without an error. Raises DropInError with a
    shared pool, whose chunks have fixed sizes.

    Args:
        vllm_config: vLLM's VllmConfig.
    """
    global transfers_kv
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_transfer_instance:
        return
    if not vllm_config.model_config.enable_cumem_allocator:  # sleep mode sets it; without it there are no regions
        return
    if shares():
        raise DropInError(
            f"vLLM's KV connector {transfer.kv_connector!r} may export the memory of the KV cache. In a shared pool it "
            "has many handles of the driver, and the other side would read the first one alone. Start this engine "
            "without MEMSAVER_POOL=shared, without the KV connector, or without sleep mode"
        )
    transfers_kv = True


def _is_in(*states: str) -> bool:
    status = drop_in.status().get("vllm")
    return status is not None and status.state in states


def _without_transfer(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of ``Worker``, the first call that has vLLM's configuration. It comes before all allocations."""

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if _is_in("waiting", "active"):
            check_transfer(vllm_config)
        original(self, vllm_config, *args, **kwargs)

    return init


def _settled(original: Callable[..., Any], logger: logging.Logger) -> Callable[..., Any]:
    """The method, with errors that the last rank raises for all, see :func:`ranks.settle`."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_in("active"):
            return original(self, *args, **kwargs)
        result, error = None, None
        with engine.bounding() if shares() else nullcontext():
            try:
                result = original(self, *args, **kwargs)
            except engine.EndedError:
                raise
            except Exception as caught:
                error = caught
            ranks.settle(self, original.__name__, error, logger)
        return result

    return method


def _without_assertion(original: Callable[..., Any], logger: logging.Logger) -> Callable[..., Any]:
    """``Worker.sleep`` that returns if the driver's free memory has shrunk meanwhile, with a shared pool.

    vLLM's worker asserts, as its last step, that it has not. A sleep returns memory to the pool, not to the driver, and
    the broker or another process may take memory of the driver at the same time.
    """

    @functools.wraps(original)
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except AssertionError as error:
            if not _is_in("active") or not shares() or "after sleeping" not in str(error):
                raise
            logger.info("memsaver: the memory of this sleep is in the shared pool, not in the driver.")

    return sleep
