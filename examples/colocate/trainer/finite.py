"""The check that loss and gradients are finite before an optimizer step, with one answer on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .memory import local

_SHOWN = 4  # names in the text of an error


@dataclass(frozen=True)
class RankFault:
    """A rank's own part in a step that was refused."""

    loss: float  # summed over the rank's tokens
    parameters: tuple[str, ...]  # those of whose gradients this rank's shards are not finite

    def __str__(self) -> str:
        names = ", ".join(self.parameters[:_SHOWN])
        more = f" and {len(self.parameters) - _SHOWN} more" if len(self.parameters) > _SHOWN else ""
        found = f" ({names}{more})" if names else ""
        return f"loss {self.loss}, {len(self.parameters)} parameters with gradients that are not finite{found}"


class NonFiniteError(RuntimeError):
    """A step's loss or gradients are NaN or infinite. Weights and optimizer state are those of before the step.

    All ranks raise it in the same step. `step`: of the optimizer, from 1, since it was made or reset. `rank`: the one
    that raised this. `grad_norm`: over all ranks. `ranks`: RankFault by rank, of those with something that is not
    finite; none of them where the norm overflowed.
    """

    def __init__(self, step: int, rank: int, grad_norm: float, ranks: Mapping[int, RankFault]) -> None:
        self.step, self.rank, self.grad_norm, self.ranks = step, rank, grad_norm, dict(ranks)
        found = "; ".join(f"rank {rank}: {fault}" for rank, fault in self.ranks.items())
        super().__init__(
            f"optimizer step {step} was not applied (rank {rank}): the gradient norm is {grad_norm}, expected finite "
            f"loss and gradients; {found or 'each gradient is finite, their norm overflowed'}"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.step, self.rank, self.grad_norm, self.ranks)


def refusal(loss: Tensor, grad_norm: float, model: nn.Module, step: int) -> NonFiniteError:
    """The error of a step that all ranks refuse, with the parts of all ranks. A collective."""
    names = tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
    )
    own = RankFault(float(loss), names)
    faults: list[RankFault] = [own] * dist.get_world_size()
    dist.all_gather_object(faults, own)
    found = {rank: fault for rank, fault in enumerate(faults) if fault.parameters or not math.isfinite(fault.loss)}
    return NonFiniteError(step, dist.get_rank(), grad_norm, found)
