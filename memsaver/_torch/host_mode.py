"""torch on the host driver: the results of its factory functions move into the region that the thread has entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_EMPTY = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted,
    torch.Tensor.new_empty, torch.Tensor.new_empty_strided,
}  # fmt: skip
_FACTORIES = _EMPTY | {
    torch.arange, torch.eye, torch.full, torch.full_like, torch.linspace, torch.logspace, torch.ones, torch.ones_like,
    torch.rand, torch.rand_like, torch.randint, torch.randint_like, torch.randn, torch.randn_like, torch.randperm,
    torch.scalar_tensor, torch.tensor, torch.zeros, torch.zeros_like,
    torch.Tensor.new_full, torch.Tensor.new_ones, torch.Tensor.new_tensor, torch.Tensor.new_zeros,
}  # fmt: skip


def extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a tensor, with those between that its strides pass over."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory of a region can replace the tensor's own.

    False inside torch.func.vmap() and grad(), and for fake, nested and quantized tensors.
    """
    # torch.compile() knows the first of these functions alone, and warns of the other.
    if torch._C._are_functorch_transforms_active() and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    is_own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    has_memory = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_own and has_memory and not (tensor.is_nested or tensor.is_quantized)


class HostMode(TorchFunctionMode):
    """``allocate`` makes a tensor [elements] of a dtype in the entered region, or returns None outside of regions."""

    def __init__(self, allocate: Callable[[int, torch.dtype], torch.Tensor | None]) -> None:
        super().__init__()
        self._allocate = allocate

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _FACTORIES and (not kwargs or kwargs.get("out") is None):
            self._place(made, copy=func not in _EMPTY)
        return made

    def _place(self, made: torch.Tensor, copy: bool) -> None:
        if hasattr(made, "__tensor_flatten__"):  # a wrapper, such as DTensor: its parts have the memory
            for part in (getattr(made, name) for name in made.__tensor_flatten__()[0]):
                if isinstance(part, torch.Tensor):  # DTensor names its mesh there as well
                    self._place(part, copy)
        elif _is_plain(made) and made.numel():
            flat = self._allocate(extent(made), made.dtype)
            if flat is not None:
                placed = flat.as_strided(made.size(), made.stride())
                if copy:
                    placed.copy_(made.detach())
                made.data = placed
