import os
from collections.abc import Iterator
from contextlib import contextmanager

from memsaver.drop_in.tms.routing import library
from memsaver.drop_in.tms.saver import TorchMemorySaver

from .utils import change_env

__all__ = ["TorchMemorySaver", "configure_subprocess"]


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that are started within the with statement load memsaver's library first (LD_PRELOAD)."""
    libraries = filter(None, [str(library()), os.environ.get("LD_PRELOAD")])
    with change_env("LD_PRELOAD", ":".join(libraries)):
        yield
