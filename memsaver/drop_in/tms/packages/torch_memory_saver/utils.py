import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsaver.drop_in.tms.library import FOLDER


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

    suffix = "" if getattr(torch.version, "hip", None) else f"_cu{_detect_cuda_major()}"
    package = Path(__file__).parent
    # The last one differs from the second in an editable installation.
    folders = (package, package.parent, FOLDER)
    found = next(filter(None, (sorted(folder.glob(f"{stem}{suffix}.*so")) for folder in folders)), [])
    assert len(found) == 1, f"expected one library {stem}{suffix} in {folders}, found {found}"
    return found[0]


def _detect_cuda_major() -> int:
    """13 for a build of torch without CUDA."""
    import torch

    return int((torch.version.cuda or "13").partition(".")[0])
