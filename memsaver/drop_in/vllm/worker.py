"""vLLM's worker beside a shared pool."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Final

from memsaver import config, drop_in

MODULE: Final = "vllm.v1.worker.gpu_worker"


def install(module: ModuleType) -> None:
    """Lets ``Worker.sleep`` return if the driver's free memory has shrunk meanwhile, with a shared pool.

    vLLM's worker asserts, as its last step, that it has not. A sleep returns memory to the pool, not to the driver, and
    the broker or another process may take memory of the driver at the same time.
    """
    original = module.Worker.sleep

    @functools.wraps(original)
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except AssertionError as error:
            status = drop_in.status().get("vllm")
            if status is None or status.state != "active" or not shares() or "after sleeping" not in str(error):
                raise
            module.logger.info("memsaver: the memory of this sleep is in the shared pool, not in the driver.")

    module.Worker.sleep = sleep


def shares() -> bool:
    """Whether this process takes its memory from a shared pool."""
    return config.options().get("pool") == "shared"
