"""Prepares the drop-ins when Python starts: this folder is in ``PYTHONPATH``. See ``memsaver drop-in path``."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

if os.environ.get("MEMSAVER_DROP_IN"):
    import memsaver_drop_in

    memsaver_drop_in.start()

# The sitecustomize that Python would have found without this folder.
_here = os.path.dirname(os.path.abspath(__file__))
_spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each or ".") != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
