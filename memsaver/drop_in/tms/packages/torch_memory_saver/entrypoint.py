from collections.abc import Iterator
from contextlib import contextmanager

from memsaver.drop_in.tms.saver import TorchMemorySaver

__all__ = ["TorchMemorySaver", "configure_subprocess"]


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Does nothing: processes that are started within it inherit ``MEMSAVER_DROP_IN``."""
    yield
