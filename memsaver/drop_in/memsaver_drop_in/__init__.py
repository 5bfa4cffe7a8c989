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
    """Prepares the import of torch_memory_saver. The files of ``memsaver/drop_in/startup.py`` call it.

    It runs when Python starts, where an error would be printed and ignored. So errors come with the import.
    """
    names = [part.partition(":")[0].strip() for part in os.environ.get("MEMSAVER_DROP_IN", "").split(",")]
    # A name that does not exist may be a misspelt "tms": the import then raises ConfigError.
    is_prepared = any(isinstance(each, _Finder) for each in sys.meta_path)
    if any(name not in ("", "vllm") for name in names) and "torch_memory_saver" not in sys.modules and not is_prepared:
        first = ["torch_memory_saver"]
        if os.environ.get("TMS_INIT_ENABLE"):  # the process is managed whether it imports that package or not
            first.append("torch")
        sys.meta_path.insert(0, _Finder(first))


class _Finder:
    """Installs the drop-in at the first import of one of these modules."""

    def __init__(self, names):  # type: ignore[no-untyped-def]
        self.names = names

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self.names:
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
