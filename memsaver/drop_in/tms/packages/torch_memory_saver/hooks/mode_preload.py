import os
from collections.abc import Iterator
from contextlib import contextmanager

from memsaver.drop_in.startup import preload_variable

from ..utils import change_env, get_binary_path_from_package


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that are started within the with statement load memsaver's library first (LD_PRELOAD)."""
    path = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    with change_env("LD_PRELOAD", preload_variable(path, os.environ.get("LD_PRELOAD", ""))):
        yield
