"""The places of a checkpoint's weights within the parameters of a vLLM model, and writes into them.

vLLM fuses projections and shards them by tensor parallel rank. A model's own ``load_weights`` knows the places. It runs
here on tensors without memory, and each copy that it would make is noted instead.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.multiprocessing  # registers the reducers of tensors
from torch.utils._python_dispatch import TorchDispatchMode

from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.vllm.sources import PROCESSED

Spec = tuple[tuple[int, ...], str]  # shape, and dtype such as "bfloat16"


class LoadableModel(Protocol):
    """A model of vLLM."""

    def load_weights(self, weights: Any) -> Any: ...
    def parameters(self) -> Iterator[torch.Tensor]: ...
    def buffers(self) -> Iterator[torch.Tensor]: ...
    def modules(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Piece:
    """A part of a weight of the checkpoint, and the target that it is copied to.

    Attributes:
        weight: Name in the checkpoint.
        offset: First element of the part within the weight.
        shape: Shape of the part, in elements.
        stride: Strides of the part within the contiguous weight, in elements.
        target: Name of the target.
        fill: The value that the target gets instead of a part of the weight, as rows of padding do. None: no fill.
    """

    weight: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: str
    fill: float | None = None


@dataclass(frozen=True)
class WeightPlan:
    """The pieces of one rank of vLLM, and their targets. It can be pickled.

    Attributes:
        specs: Shape and dtype by name of each weight of the checkpoint.
        pieces: All copies that a load of the checkpoint makes on this rank.
        targets: The tensors of the parameters by name, as ``ForkingPickler`` pickles them. Valid until the next pause
            of the weights.
    """

    specs: dict[str, Spec]
    pieces: tuple[Piece, ...]
    targets: bytes


def find_pieces(model: LoadableModel, specs: Mapping[str, Spec]) -> tuple[list[Piece], dict[str, torch.Tensor]]:
    """The copies that ``model.load_weights`` makes for a checkpoint of these weights. No weight changes.

    Args:
        model: A model of vLLM, on this rank.
        specs: Shape and dtype by name.

    Returns:
        The pieces, and the targets by name: views of the model's parameters.

    Raises:
        DropInError: A weight is computed before it is stored, as quantization does, or not stored at all. Or vLLM
            processes the weights of a layer after a load: latent attention and mixtures of experts.
    """
    for module in model.modules():
        if any(each.__module__.startswith(tuple(PROCESSED)) for each in type(module).__mro__):
            name = type(module).__name__
            raise DropInError(f"vLLM processes the weights of {name} after a load: use vLLM's own load_weights")
    sources = {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in specs.items()
    }
    by_storage = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
    recorder = _Recorder(model)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(recorder.each(sources))
    except (NotImplementedError, RuntimeError) as error:  # torch's, for the values of a tensor without memory
        if isinstance(error, DropInError):
            raise
        raise DropInError(f"load_weights reads the values of a weight, and no plan can be made: {error}") from error
    pieces, targets = [], {}
    for number, write in enumerate(each for each in recorder.writes if each.target.numel()):
        targets[str(number)] = write.target
        pieces.append(_piece(write, str(number), by_storage))
    unused = sorted(specs.keys() - {piece.weight for piece in pieces if piece.fill is None})
    if unused:
        raise DropInError(f"load_weights stores nothing of {', '.join(map(repr, unused[:4]))} ({len(unused)} in all)")
    return pieces, targets


def _piece(write: _Write, target: str, by_storage: Mapping[int, str]) -> Piece:
    if write.source is None:
        return Piece(write.weight, 0, tuple(write.target.shape), (), target, write.fill)
    name = by_storage.get(write.source.untyped_storage()._cdata)
    if name is None:
        raise DropInError(
            f"load_weights computes a tensor of shape {tuple(write.source.shape)} before it stores it (quantization or "
            "another dtype than the model's): such weights cannot be written in place"
        )
    if write.source.dtype != write.target.dtype:
        raise DropInError(
            f"{name!r} is {write.source.dtype} and its parameter {write.target.dtype}: expected the same dtype"
        )
    source = write.source.expand(write.target.shape)  # copy_() broadcasts
    return Piece(name, int(source.storage_offset()), tuple(source.shape), tuple(source.stride()), target)


def make_plan(model: LoadableModel, specs: Mapping[str, Spec]) -> WeightPlan:
    """:func:`find_pieces`, with the targets for another process.

    Raises:
        DropInError: As find_pieces().
    """
    pieces, targets = find_pieces(model, specs)
    plain = {name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()}
    return WeightPlan(plain, tuple(pieces), bytes(ForkingPickler.dumps(targets)))


class AttachedWeights:
    """The targets of a plan, mapped in this process. See :func:`attached`."""

    def __init__(self, plan: WeightPlan, targets: Mapping[str, torch.Tensor]) -> None:
        self._specs, self._targets = plan.specs, targets
        self._by_weight: dict[str, list[Piece]] = {}
        for piece in plan.pieces:
            self._by_weight.setdefault(piece.weight, []).append(piece)

    @torch.no_grad()
    def write(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Write whole weights by their names in the checkpoint: all, or a bucket of them.

        Args:
            weights: Contiguous tensors on the device of the targets, with the shapes and dtypes of the plan. They
                can be parts of one larger tensor.

        Returns:
            Bytes written.

        Raises:
            ValueError: A name, shape, dtype or layout is another. Nothing was written.
        """
        for name, tensor in weights.items():
            self._check(name, tensor)
        pieces = [piece for name in weights for piece in self._by_weight[name]]
        for piece in pieces:
            if piece.fill is not None:
                self._targets[piece.target].fill_(piece.fill)
        copies = [piece for piece in pieces if piece.fill is None]
        targets = [self._targets[piece.target] for piece in copies]
        parts = [_part(weights[each.weight], each) for each in copies]
        if copies:
            torch._foreach_copy_(targets, parts)
        return sum(part.nbytes for part in parts)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._specs:
            raise ValueError(f"there is no weight {name!r} in the plan")
        shape, dtype = self._specs[name]
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, dtype):
            raise ValueError(f"{name!r} is {tensor.dtype} {tuple(tensor.shape)}; expected torch.{dtype} {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name!r} has strides {tensor.stride()}; expected a contiguous tensor")


def _part(weight: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a weight that is copied. as_strided() counts from the begin of the storage."""
    return weight.as_strided(piece.shape, piece.stride, weight.storage_offset() + piece.offset)


@contextmanager
def attached(plan: WeightPlan | bytes) -> Iterator[AttachedWeights]:
    """The weights of one rank of vLLM, to be written by this process, without a copy in between.

    Args:
        plan: Of a rank on the same device: as it is, or pickled, as ``memsaver_weight_plan`` returns it.

    Raises:
        memsaver.ReceiveError: The weights were paused after the plan was made, or vLLM does not answer.
        memsaver.RegionPausedError: They are paused.
    """
    if isinstance(plan, bytes):
        plan = pickle.loads(plan)
    if not isinstance(plan, WeightPlan):
        raise TypeError(f"plan is a {type(plan).__name__}, expected the result of memsaver_weight_plan")
    targets: dict[str, torch.Tensor] = pickle.loads(plan.targets)
    try:
        yield AttachedWeights(plan, targets)
    finally:
        targets.clear()  # a pause of vLLM waits for the end of these


@dataclass(frozen=True)
class _Write:
    """A write of ``load_weights`` into a parameter, while it loads ``weight``: a copy, or a fill."""

    weight: str
    target: torch.Tensor
    source: torch.Tensor | None
    fill: float | None = None


class _Recorder(TorchDispatchMode):
    """Notes copies from tensors without memory and fills of parameters, and skips both."""

    _FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.writes: list[_Write] = []
        self._loading = ""
        held = [*model.parameters(), *model.buffers()]
        self._held = {tensor.untyped_storage()._cdata for tensor in held}

    def each(self, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, for ``load_weights``."""
        for name, weight in weights.items():
            self._loading = name
            yield name, weight

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and target.device.type != "meta" and func._schema.is_mutable:
            if func is torch.ops.aten.copy_.default and args[1].device.type == "meta":
                self.writes.append(_Write(self._loading, target, args[1]))
                return target
            if target.untyped_storage()._cdata in self._held:
                if func not in self._FILLS:
                    raise DropInError(
                        f"load_weights changes a parameter by {func}: such weights cannot be written in place"
                    )
                value = 0.0 if func is torch.ops.aten.zero_.default else float(args[1])
                self.writes.append(_Write(self._loading, target, None, value))
                return target
        return func(*args, **(kwargs or {}))
