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
from typing import Any

import torch
import torch.multiprocessing  # registers the reducers of tensors
from torch.utils._python_dispatch import TorchDispatchMode

from memsaver.drop_in import DropInError
from memsaver.drop_in.vllm import sources, version

Spec = tuple[tuple[int, ...], str]  # shape, and dtype such as "bfloat16"


class WeightReceiver:
    """Lets another process on the device write the weights of a vLLM worker.

    A worker extension of vLLM: ``worker_extension_cls="memsaver.drop_in.vllm.weights.WeightReceiver"``.

    Example::

        specs = {name: (tuple(each.shape), "bfloat16") for name, each in trained.items()}
        plans = llm.collective_rpc("memsaver_weight_plan", args=(specs,))
        with attached(plans[rank]) as weights:     # in the trainer, on the device of this rank
            weights.write(trained)
    """

    def memsaver_weight_plan(self, specs: dict[str, Spec]) -> bytes:
        """The plan of this rank, pickled: vLLM's own serialization would make a dict of it.

        Args:
            specs: Shape and dtype of each weight of the checkpoint, by its name there.

        Raises:
            DropInError: The model is quantized, a weight cannot be written in place, or this version of vLLM has other
                modules of layers than memsaver knows.
        """
        worker: Any = self
        sources.check(version(), sources.PROCESSED)
        quantization = worker.model_config.quantization
        if quantization is not None:
            raise DropInError(f"the model is quantized ({quantization}): use vLLM's own load_weights")
        return bytes(ForkingPickler.dumps(make_plan(worker.get_model(), specs)))


@dataclass(frozen=True)
class Piece:
    """A part of a weight of the checkpoint, and the target that it is copied to.

    Attributes:
        weight: Name in the checkpoint.
        target: A view of a parameter.
        offset: First element of the part within the weight.
        stride: Strides of the part within the contiguous weight, in elements. Its shape is that of the target.
        fill: The value that the target gets instead of a part of the weight, as rows of padding do. None: no fill.
    """

    weight: str
    target: torch.Tensor
    offset: int = 0
    stride: tuple[int, ...] = ()
    fill: float | None = None


class WeightPlan:
    """The writes that a load of a checkpoint makes on one rank of vLLM.

    Args:
        specs: Shape and dtype by name of each weight of the checkpoint.
        pieces: The writes. Their targets are valid until the next pause of the weights.

    Attributes:
        pieces: The writes by weight.
    """

    def __init__(self, specs: Mapping[str, Spec], pieces: list[Piece]) -> None:
        self._specs = {name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()}
        self.pieces: dict[str, list[Piece]] = {name: [] for name in specs}
        for piece in pieces:
            self.pieces[piece.weight].append(piece)

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
        pieces = [piece for name in weights for piece in self.pieces[name]]
        for piece in pieces:
            if piece.fill is not None:
                piece.target.fill_(piece.fill)
        copies = [piece for piece in pieces if piece.fill is None]
        parts = [_part(weights[each.weight], each) for each in copies]
        if copies:
            torch._foreach_copy_([each.target for each in copies], parts)
        return sum(part.nbytes for part in parts)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._specs:
            raise ValueError(f"there is no weight {name!r} in the plan")
        shape, dtype = self._specs[name]
        if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, dtype):
            raise ValueError(f"{name!r} is {tensor.dtype} {tuple(tensor.shape)}; expected torch.{dtype} {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name!r} has strides {tensor.stride()}; expected a contiguous tensor")

    def drop(self) -> None:
        """Drops the targets."""
        self.pieces.clear()


def _part(weight: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a weight that is copied. as_strided() counts from the begin of the storage."""
    return weight.as_strided(piece.target.shape, piece.stride, weight.storage_offset() + piece.offset)


@contextmanager
def attached(plan: bytes) -> Iterator[WeightPlan]:
    """The weights of one rank of vLLM, to be written by this process, without a copy in between.

    Args:
        plan: Of a rank on the same device, as ``memsaver_weight_plan`` returns it.

    Raises:
        memsaver.ReceiveError: The weights were paused after the plan was made, or vLLM does not answer.
        memsaver.RegionPausedError: They are paused.
    """
    found = pickle.loads(plan)
    if not isinstance(found, WeightPlan):
        raise TypeError(f"plan holds a {type(found).__name__}, expected the result of memsaver_weight_plan")
    try:
        yield found
    finally:
        found.drop()  # a pause of vLLM waits for the end of the targets


def make_plan(model: torch.nn.Module, specs: Mapping[str, Spec]) -> WeightPlan:
    """The writes that ``model.load_weights`` makes for a checkpoint of these weights. No weight changes.

    Args:
        model: A model of vLLM, on this rank.
        specs: Shape and dtype by name.

    Raises:
        DropInError: A weight is computed before it is stored, as quantization does, or not stored at all. Or vLLM
            processes the weights of a layer after a load: latent attention and mixtures of experts.
    """
    for module in model.modules():
        if any(each.__module__.startswith(tuple(sources.PROCESSED)) for each in type(module).__mro__):
            name = type(module).__name__
            raise DropInError(f"vLLM processes the weights of {name} after a load: use vLLM's own load_weights")
    recorder = _Recorder(model, specs)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(recorder.weights())  # type: ignore[operator]
    except (NotImplementedError, RuntimeError) as error:  # torch's, for the values of a tensor without memory
        if isinstance(error, DropInError):
            raise
        raise DropInError(f"load_weights reads the values of a weight, and no plan can be made: {error}") from error
    unused = sorted(specs.keys() - {piece.weight for piece in recorder.pieces if piece.fill is None})
    if unused:
        raise DropInError(f"load_weights stores nothing of {', '.join(map(repr, unused[:4]))} ({len(unused)} in all)")
    return WeightPlan(specs, recorder.pieces)


class _Recorder(TorchDispatchMode):
    """Notes copies from tensors without memory and fills of parameters, and skips both."""

    _FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)

    def __init__(self, model: torch.nn.Module, specs: Mapping[str, Spec]) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self._sources = {
            name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
            for name, (shape, dtype) in specs.items()
        }
        self._names = {_storage(tensor): name for name, tensor in self._sources.items()}
        self._held = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._loading = ""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, for ``load_weights``."""
        for name, weight in self._sources.items():
            self._loading = name
            yield name, weight

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is not None and target.device.type != "meta" and func._schema.is_mutable:
            if func is torch.ops.aten.copy_.default and args[1].device.type == "meta":
                self._copied(target, args[1])
                return target
            if _storage(target) in self._held:
                if func not in self._FILLS:
                    raise DropInError(
                        f"load_weights changes a parameter by {func}: such weights cannot be written in place"
                    )
                value = 0.0 if func is torch.ops.aten.zero_.default else float(args[1])
                self._note(Piece(self._loading, target, fill=value))
                return target
        return func(*args, **(kwargs or {}))

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._names.get(_storage(source))
        if name is None:
            raise DropInError(
                f"load_weights computes a tensor of shape {tuple(source.shape)} before it stores it (quantization or "
                "another dtype than the model's): such weights cannot be written in place"
            )
        if source.dtype != target.dtype:
            raise DropInError(f"{name!r} is {source.dtype} and its parameter {target.dtype}: expected the same dtype")
        source = source.expand(target.shape)  # copy_() broadcasts
        self._note(Piece(name, target, int(source.storage_offset()), tuple(source.stride())))

    def _note(self, piece: Piece) -> None:
        if piece.target.numel():
            self.pieces.append(piece)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
