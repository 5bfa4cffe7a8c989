# The compiled core, csrc/*_bindings.cpp. Its types stand in the Python that wraps it.
from typing import Any

def __getattr__(name: str) -> Any: ...
