import torch

from .utils import is_xpu

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]


def get_device() -> str:
    """Name of a GPU for torch."""
    return "cuda"


def empty_cache() -> None:
    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Bytes in use on a GPU by the driver's figure, which it prints with the message."""
    free, total = torch.cuda.mem_get_info(gpu_id)
    print(f"{message}: {(total - free) / 2**30:.3f} GiB in use on GPU {gpu_id}")  # noqa: T201
    return total - free
