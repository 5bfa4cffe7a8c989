import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsaver.drop_in.startup import LIBRARIES


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


def get_binary_path_from_package(stem: str) -> Path:
    """The library of this name for the CUDA version of torch, within the package or beside it.

    Raises:
        AssertionError: There is not exactly one.
    """
    import torch

    major = (torch.version.cuda or "13").partition(".")[0]
    package = Path(__file__).parent
    folders = (package, package.parent, LIBRARIES)  # the last two differ in an editable installation
    found = next(filter(None, (sorted(folder.glob(f"{stem}_cu{major}.*so")) for folder in folders)), [])
    assert len(found) == 1, f"expected one library {stem}_cu{major} in {folders}, found {found}"
    return found[0]
