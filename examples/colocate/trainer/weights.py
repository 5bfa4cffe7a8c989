"""The weights for engines, written into their tensors slice by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..model import WeightPart, checksums
from .trainer_memory import own_rows


class EngineWeights(NamedTuple):
    """The weights of an engine, or of one rank of an engine with tensor parallel, by Hugging Face name."""

    tensors: Mapping[str, Tensor]  # on one device
    layout: Mapping[str, WeightPart]  # the slices of the full parameters that the tensors are: see `weight_layout`


class WeightWriter:
    """Brings a model's parameters, which FSDP2 shards, to engines of one dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._parameters, self.dtype = dict(model.named_parameters()), dtype

    @torch.no_grad()
    def write(self, engines: Sequence[EngineWeights], gather: bool = False) -> None:
        """Write into the tensors of engines, of any degree of tensor parallel.

        Each rank writes what its shards and the engines' slices have in common; when all ranks are done each tensor is
        whole. The cast is part of the copy, and takes no memory. With `gather`, for ranks that do not reach each
        other's engines, the ranks gather one parameter after the other, cast before it is sent, and each writes the
        slices of its own engines. That takes twice the memory of the largest parameter, and is collective, also for a
        rank without engines.
        """
        for name, parameter in self._parameters.items():
            rows = own_rows(parameter)
            if gather:
                cast = parameter.detach().to(self.dtype)  # before it is sent: 16 bits, not 32
                assert isinstance(cast, DTensor)
                rows = cast.full_tensor(), 0
            for engine in engines:
                values, place = _common(rows, engine.layout[name])
                engine.tensors[name][place].copy_(values)

    @torch.no_grad()
    def checksums(self, layout: Mapping[str, WeightPart]) -> dict[str, int]:
        """Of each slice of a layout, in the engines' dtype, by the parameter's name. A collective."""
        parts = {name: _common(own_rows(self._parameters[name]), part)[0] for name, part in layout.items()}
        return checksums({name: part.to(self.dtype) for name, part in parts.items()}, of_all_ranks=True)


def _common(rows: tuple[Tensor, int], part: WeightPart) -> tuple[Tensor, slice]:
    """The values of a slice that are among some rows of its parameter, see `own_rows`, and their rows in the slice."""
    tensor, begin = rows
    if part.dim:
        return part.of(tensor), slice(begin, begin + len(tensor))
    first = max(begin, part.start)
    last = max(first, min(begin + len(tensor), part.start + part.length))  # of nothing, `first` once more
    return tensor[first - begin : last - begin], slice(first - part.start, last - part.start)
