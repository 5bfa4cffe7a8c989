"""The calls of vLLM's worker: KV transfer, errors on several ranks, the driver's free memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memsaver import _moves, config
from memsaver.drop_in import DropInError
from memsaver.drop_in.tagged import TaggedRegions
from memsaver.drop_in.vllm import ranks

transfers_kv = False  # vLLM has a KV connector, which may export the memory of the KV cache


def install(module: ModuleType) -> tuple[()]:
    """Replaces the constructor of ``Worker``, and ``sleep``, ``wake_up`` and, from vLLM 0.31 on, ``discard``.

    With ``MEMSAVER_STALE``, ``execute_model`` as well.
    """
    worker, logger = module.Worker, module.logger
    worker.__init__ = _without_transfer(worker.__init__)
    for name in ("sleep", "wake_up", "discard"):
        if hasattr(worker, name):
            setattr(worker, name, _settled(getattr(worker, name), logger))
    if _moves.stale() != "off":
        worker.execute_model = _checked(worker.execute_model)
    return ()


def shares() -> bool:
    """Whether this process takes its memory from a shared pool."""
    return config.options().get("pool") == "shared"


def _without_transfer(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of ``Worker``, the first call that has vLLM's configuration. It comes before all allocations.

    A KV cache that is transferred has one driver handle for each segment: NIXL, LMCache and UCX export the handle at
    the first byte of a tensor, and would read the first chunk alone. Chunks of a shared pool have fixed sizes.
    """

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        global transfers_kv
        transfer = vllm_config.kv_transfer_config
        # Sleep mode sets enable_cumem_allocator. Without it there are no regions.
        is_in_region = vllm_config.model_config.enable_cumem_allocator
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


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """``execute_model``. Before the first forward pass after a wake-up, all tensors of the model must be written."""

    @functools.wraps(original)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        def models() -> dict[str, Any]:
            draft = getattr(getattr(self.model_runner, "drafter", None), "model", None)
            return {"": self.get_model()} | ({} if draft is None else {"drafter.": draft})

        TaggedRegions("vllm").check_written(models)
        return original(self, *args, **kwargs)

    return execute_model


def _settled(original: Callable[..., Any], logger: logging.Logger) -> Callable[..., Any]:
    """The method, with errors that the last rank raises for all, see :func:`ranks.settle`.

    vLLM's worker asserts, as the last step of a sleep, that the driver's free memory has not shrunk. With a shared pool
    a sleep returns memory to the pool, and the broker or another process may take memory of the driver meanwhile.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, error = None, None
        try:
            result = original(self, *args, **kwargs)
        except Exception as caught:
            if isinstance(caught, AssertionError) and shares() and "after sleeping" in str(caught):
                logger.info("memsaver: the memory of this sleep is in the shared pool, not in the driver.")
            else:
                error = caught
        ranks.settle(self, original.__name__, error, logger)
        return result

    return method
