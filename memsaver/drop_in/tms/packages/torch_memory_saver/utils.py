import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsaver.drop_in.tms.routing import LIBRARIES


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
    """The library of this name for the CUDA version of torch.

    Raises:
        AssertionError: There is not exactly one.
    """
    found = list(LIBRARIES.glob(f"{stem}_cu{_detect_cuda_major()}.*.so"))
    assert len(found) == 1, f"expected one library {stem} in {LIBRARIES}, found {found}"
    return found[0]


def _detect_cuda_major() -> int:
    """13 for a build of torch without CUDA."""
    import torch

    return int((torch.version.cuda or "13").partition(".")[0])
