"""memsaver lets several models and processes take turns on one GPU.

Tensors are allocated in regions. Pausing a region releases its physical memory. Resuming the region maps memory under
the same virtual addresses, so that captured CUDA graphs stay valid. Importing memsaver loads neither torch nor ray.
"""

import atexit
import logging
import pkgutil
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

with suppress(FileNotFoundError):  # the working directory is in sys.path, and was removed
    # In a source tree, the compiled core is in the installed package.
    __path__ = pkgutil.extend_path(__path__, __name__)

try:
    from memsaver import _core
except ImportError as error:
    if "_core" not in str(error):
        raise
    raise ImportError(
        f"memsaver's compiled core is not built for this interpreter ({sys.implementation.cache_tag}{sys.abiflags}): "
        "run `pip install .` with it"
    ) from error

from memsaver import _adapter, config, errors  # noqa: E402
from memsaver._guests import Guest, register, unregister  # noqa: E402
from memsaver._results import history  # noqa: E402
from memsaver.config import configure  # noqa: E402
from memsaver.errors import (  # noqa: E402
    AttachedError,
    BackupError,
    BrokerError,
    ConfigError,
    DriverError,
    Error,
    GuestError,
    OutOfMemoryError,
    RebuildError,
    ReceiveError,
    RegionPausedError,
    SameError,
    StaleError,
    VerifyError,
    WaitTimeoutError,
)
from memsaver.figures import stats  # noqa: E402
from memsaver.policies import Derived  # noqa: E402
from memsaver.regions import Region, capturing, cpu_backup, outside, region, release_host_memory  # noqa: E402
from memsaver.transitions import (  # noqa: E402
    Transition,
    TransitionFuture,
    pause,
    resume,
    start,
    switch,
    trim,
)
from memsaver.turns.late import wait_before_step  # noqa: E402
from memsaver.turns.phases import define_phase, phase  # noqa: E402

if TYPE_CHECKING:
    from memsaver import drop_in as drop_in
    from memsaver import guests as guests
    from memsaver import metrics as metrics
    from memsaver._torch.default_pool import default_pool
    from memsaver._torch.graphs import CUDAGraph, graph
    from memsaver._torch.stale import check_written, name_tensors

_WITH_TORCH = {
    "default_pool": "memsaver._torch.default_pool",
    "CUDAGraph": "memsaver._torch.graphs", "graph": "memsaver._torch.graphs",
    "check_written": "memsaver._torch.stale", "name_tensors": "memsaver._torch.stale",
}  # fmt: skip
__version__ = "0.1.0"
__all__ = [
    "AttachedError", "BackupError", "BrokerError", "CUDAGraph", "ConfigError", "Derived", "DriverError",
    "Error", "Guest", "GuestError", "OutOfMemoryError", "RebuildError", "ReceiveError", "Region", "RegionPausedError",
    "SameError", "StaleError", "Transition", "TransitionFuture", "VerifyError", "WaitTimeoutError", "capturing",
    "check_written", "configure", "cpu_backup", "default_pool", "define_phase", "graph", "history", "name_tensors",
    "outside", "pause", "phase", "region", "register", "release_host_memory", "resume", "start", "stats", "switch",
    "trim", "unregister", "wait_before_step",
]  # fmt: skip

_core.set_error_factory(errors.make)


config.from_environment()
atexit.register(_core.stop_background)
logging.getLogger("memsaver").addHandler(logging.NullHandler())  # without it logging prints warnings
try:  # before the interpreter joins its threads
    threading._register_atexit(_core.bound_waits)  # type: ignore[attr-defined]
except (AttributeError, RuntimeError):  # another Python, which lacks it; or the interpreter has begun to exit
    atexit.register(_core.bound_waits)


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:  # loaded on the first access
        return getattr(_adapter.with_torch(_WITH_TORCH[name]), name)
    if name in ("drop_in", "guests", "metrics"):
        return import_module(f"memsaver.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
