# The compiled core, csrc/module.cpp. Its types stand in the Python that wraps it.
from typing import Any

def __getattr__(name: str) -> Any: ...
