"""The weights for engines, written into their tensors slice by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..model import EngineWeights, WeightPart, checksums
from .trainer_memory import own_rows

Rows = tuple[Tensor, int]  # some rows of a parameter, and the number of the first


class WeightWriter:
    """Brings a model's parameters, which FSDP2 shards, to engines of one dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._parameters, self.dtype = dict(model.named_parameters()), dtype
        self._rows = {name: own_rows(parameter) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def write(self, engines: Sequence[EngineWeights], gather: bool = False) -> int:
        """Write into the tensors of engines, of any degree of tensor parallel. Returns the bytes written.

        Each rank writes what its shards and the engines' slices have in common; when all ranks are done each tensor is
        whole. The cast is part of the copy, a few kernels in all, and takes no memory. With `gather`, for ranks that do
        not reach each other's engines, the ranks gather one parameter after the other, cast before it is sent, and each
        writes the slices of its own engines. That takes twice the memory of the largest parameter, and is collective,
        also for a rank without engines.
        """
        if not gather:
            return sum(_copy(self._rows, engine) for engine in engines)
        written = 0
        for name, parameter in self._parameters.items():
            cast = parameter.detach().to(self.dtype)  # before it is sent: 16 bits, not 32
            assert isinstance(cast, DTensor)
            full = cast.full_tensor()
            written += sum(_copy({name: (full, 0)}, engine) for engine in engines)
        return written

    @torch.no_grad()
    def checksums(self, layout: Mapping[str, WeightPart]) -> dict[str, int]:
        """Of each slice of a layout, in the engines' dtype, by the parameter's name. A collective."""
        parts = {name: _common(self._rows[name], part)[0].to(self.dtype) for name, part in layout.items()}
        return checksums(parts, of_all_ranks=True)


def _common(rows: Rows, part: WeightPart) -> tuple[Tensor, slice]:
    """The values that some rows and a slice of a parameter have in common, and their rows in the slice."""
    tensor, begin = rows
    if part.dim:
        return part.of(tensor), slice(begin, begin + len(tensor))
    first = max(begin, part.start)
    last = max(first, min(begin + len(tensor), part.start + part.shape[0]))  # of nothing, `first` once more
    return tensor[first - begin : last - begin], slice(first - part.start, last - part.start)


def _copy(rows: Mapping[str, Rows], engine: EngineWeights) -> int:
    """Copy the values that rows and the engine's slices have in common. Returns their bytes in the engine."""
    pairs = []
    for name, each in rows.items():
        values, place = _common(each, engine.layout[name])
        if values.numel():
            pairs.append((engine.tensors[name][place], values))
    # One slice of columns, which is not dense, would turn a grouped copy into one kernel for each tensor.
    for is_dense in (True, False):
        group = [pair for pair in pairs if all(each.is_contiguous() for each in pair) is is_dense]
        if group:
            torch._foreach_copy_([to for to, _ in group], [values for _, values in group])
    return sum(to.nbytes for to, _ in pairs)
