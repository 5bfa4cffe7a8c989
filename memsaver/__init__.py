"""memsaver gives one GPU to whoever needs it now.

Tensors live in regions. Pausing a region returns its physical memory; resuming it brings memory back under the same
virtual addresses, so that captured CUDA graphs stay valid. Importing this loads neither torch nor ray.
"""

import atexit
import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

# From a source tree the compiled core is found where it was installed.
__path__ = pkgutil.extend_path(__path__, __name__)

try:
    from memsaver import _core
except ImportError as error:
    if "_core" not in str(error):
        raise
    raise ImportError("memsaver's compiled core is not built for this interpreter: run `pip install .`") from error

from memsaver import config, errors, regions  # noqa: E402
from memsaver.backups import cpu_backup, release_host_memory  # noqa: E402
from memsaver.config import configure  # noqa: E402
from memsaver.errors import (  # noqa: E402
    AttachedError,
    BackupError,
    BrokerError,
    ConfigError,
    DriverError,
    Error,
    OutOfMemoryError,
    RegionPausedError,
)
from memsaver.phases import define_phase, phase  # noqa: E402
from memsaver.regions import Region, outside, pause, region, resume, switch, trim  # noqa: E402
from memsaver.stats import stats  # noqa: E402
from memsaver.transitions import Transition  # noqa: E402

if TYPE_CHECKING:
    from memsaver.graphs import CUDAGraph, graph
    from memsaver.sharing import Token, attach, share

_WITH_TORCH = {
    "CUDAGraph": "memsaver.graphs", "graph": "memsaver.graphs",
    "Token": "memsaver.sharing", "attach": "memsaver.sharing", "share": "memsaver.sharing",
}  # fmt: skip
__version__ = "0.1.0"
__all__ = [
    "AttachedError", "BackupError", "BrokerError", "CUDAGraph", "ConfigError", "DriverError", "Error",
    "OutOfMemoryError", "Region", "RegionPausedError", "Token", "Transition", "attach", "configure", "cpu_backup",
    "define_phase", "graph", "outside", "pause", "phase", "region", "release_host_memory", "resume", "share",
    "stats", "switch", "trim",
]  # fmt: skip

_core.set_error_factory(errors.make)
regions.load_adapter = lambda: import_module("memsaver.torch").Router()
config.from_environment()
atexit.register(_core.stop_background)


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:  # loaded when first asked for
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
