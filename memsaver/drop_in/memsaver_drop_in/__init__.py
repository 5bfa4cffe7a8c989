"""Entry points of other libraries' plugins. Installed as ``memsaver_drop_in``, apart from the package ``memsaver``.

Python imports this module in each process of a library that loads plugins, with or without the variable. So it imports
nothing else until the variable is set.
"""

import os


def vllm() -> None:
    """The plugin in the group ``vllm.general_plugins``."""
    if os.environ.get("MEMSAVER_DROP_IN"):
        from memsaver import drop_in

        drop_in.install("vllm")
