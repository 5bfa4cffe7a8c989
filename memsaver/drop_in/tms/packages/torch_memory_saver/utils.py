import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment within the with statement."""
    former = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if former is None:
            del os.environ[key]
        else:
            os.environ[key] = former


def is_xpu() -> bool:
    """Whether torch has Intel GPUs: memsaver does not serve them."""
    return False
