from pathlib import Path
from typing import Any, Literal

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """The library of a hook mode."""

    @staticmethod
    def create(hook_mode: HookMode) -> "HookUtilBase":
        from .mode_preload import HookUtilModePreload
        from .mode_torch import HookUtilModeTorch

        return {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}[hook_mode]()

    def get_path_binary(self) -> str | Path:
        raise NotImplementedError

    def get_allocator(self) -> Any:
        """None: memsaver's regions have allocators of their own."""
        return None
