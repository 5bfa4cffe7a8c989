"""Entry points of other libraries' plugins. Installed as ``memsaver_drop_in``, apart from the package ``memsaver``.

Python imports this module in each process of a library that loads plugins, with or without the variable. So it imports
nothing else until the variable is set.
"""

import os
import sys


def vllm() -> None:
    """The plugin in the group ``vllm.general_plugins``."""
    if os.environ.get("MEMSAVER_DROP_IN"):
        from memsaver import drop_in

        drop_in.install("vllm")


def start() -> None:
    """Prepares the import of torch_memory_saver. ``memsaver_drop_in.pth`` calls it if the variable is set.

    It runs when Python starts, where an error would be printed and ignored. So errors come with the import.
    """
    names = [part.partition(":")[0].strip() for part in os.environ.get("MEMSAVER_DROP_IN", "").split(",")]
    if "tms" in names and "torch_memory_saver" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Installs the drop-in at the import of torch_memory_saver."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch_memory_saver":
            return None
        from importlib.util import find_spec

        from memsaver import drop_in

        sys.meta_path.remove(self)  # type: ignore[arg-type]
        try:
            drop_in.install("tms")
            return find_spec(name)
        except BaseException:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
            raise
