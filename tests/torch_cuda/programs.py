"""Functions for the programs of these tests, which run in processes of their own."""

from __future__ import annotations

import torch

MIB = 1 << 20


def full(mib: int, value: int, device: str = "cuda") -> torch.Tensor:
    """A tensor with contents, written by a copy: kernels do nothing."""
    made = torch.empty(mib << 20, dtype=torch.uint8, device=device)
    return made.copy_(torch.full((mib << 20,), value, dtype=torch.uint8))


def holds(tensor: torch.Tensor, value: int) -> bool:
    return all(bool((part.cpu() == value).all()) for part in tensor.split(64 * MIB))
