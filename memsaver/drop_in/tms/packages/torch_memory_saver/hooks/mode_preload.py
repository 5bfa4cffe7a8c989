import os
from collections.abc import Iterator
from contextlib import contextmanager

from memsaver.drop_in.tms.library import preload_variable

from ..utils import change_env, get_binary_path_from_package
from .base import HookUtilBase


class HookUtilModePreload(HookUtilBase):
    def get_path_binary(self) -> str:
        preloaded = os.environ.get("LD_PRELOAD", "")
        found = [path for path in preloaded.split(":") if "torch_memory_saver" in path]
        assert len(found) == 1, f"LD_PRELOAD is {preloaded!r}, expected one library of torch_memory_saver in it"
        return found[0]


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that are started within the with statement load memsaver's library first (LD_PRELOAD)."""
    path = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    with change_env("LD_PRELOAD", preload_variable(path, os.environ.get("LD_PRELOAD", ""))):
        yield
