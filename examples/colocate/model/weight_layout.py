"""Where an engine keeps each parameter: the slice that a rank holds, and its place among fused weights.

The engine and every program that writes weights follow this one description. vLLM has the same names and rows, which
`vllm_engine.py` checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .config import ModelConfig, parameter_shapes

# As in vLLM.
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_ROW_PARALLEL = ("o_proj", "down_proj")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WeightPart:
    """A slice of a parameter, from `start` on along `dim`, kept from `row` on in one of the engine's tensors."""

    dim: int
    start: int
    shape: tuple[int, ...]  # of the slice
    tensor: str  # its name in the engine
    row: int

    def of(self, full: Tensor) -> Tensor:
        """The slice of the full parameter, a view."""
        return full.narrow(self.dim, self.start, self.shape[self.dim])

    def within(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The slice where the engine keeps it, a view."""
        return tensors[self.tensor].narrow(0, self.row, self.shape[0])


def fused_shapes(layout: Mapping[str, WeightPart]) -> dict[str, tuple[int, ...]]:
    """Of the engine's tensors, by name. The last part of a tensor ends at its last row."""
    return {part.tensor: (part.row + part.shape[0], *part.shape[1:]) for part in layout.values()}


class EngineWeights(NamedTuple):
    """The weights of an engine, or of one rank of an engine with tensor parallel, by Hugging Face name."""

    tensors: Mapping[str, Tensor]  # on one device
    layout: Mapping[str, WeightPart]  # the slices of the full parameters that the tensors are


def weight_layout(config: ModelConfig, rank: int = 0, size: int = 1) -> dict[str, WeightPart]:
    """The part of every parameter, by its name, that one of `size` tensor-parallel ranks holds.

    Query, key and value are rows of one tensor, gate and up of another. Column-parallel parameters, and an output
    matrix whose rows can be shared, are cut along their rows, row-parallel ones along their columns. Norms and the
    embedding are whole on each rank. Raises ValueError for sizes that the ranks cannot share equally.
    """
    for field in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(config, field) % size:
            raise ValueError(f"{field} is {getattr(config, field)}; expected a multiple of the {size} ranks")
    layout, rows = dict[str, WeightPart](), Counter[str]()
    for name, shape in parameter_shapes(config).items():
        *path, module, kind = name.split(".")
        dim = 1 if module in _ROW_PARALLEL else 0
        shared = dim or module in _FUSED or (module == "lm_head" and shape[0] % size == 0)
        length = shape[dim] // size if shared else shape[dim]
        tensor = ".".join((*path, _FUSED.get(module, module), kind))
        own = (*shape[:dim], length, *shape[dim + 1 :])
        layout[name] = WeightPart(dim, rank * length if shared else 0, own, tensor, rows[tensor])
        rows[tensor] += own[0]
    return layout


def checksums(tensors: Mapping[str, Tensor], of_all_ranks: bool = False) -> dict[str, int]:
    """By name, the sum of a tensor's elements as integers of the same bits: an exact checksum.

    The sums of a tensor's parts add up to that of the whole, modulo 2**64. With `of_all_ranks` each rank has a part.
    """
    sums = [each.detach().view(_BITS[each.element_size()]).sum(dtype=torch.int64) for each in tensors.values()]
    found = torch.stack(sums)
    if of_all_ranks:
        dist.all_reduce(found)
    return dict(zip(tensors, found.tolist()))
