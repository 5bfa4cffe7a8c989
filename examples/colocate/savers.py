"""The memory of both actors, by `--memory`: memsaver's regions, or one of the ways of programs without it.

memsaver            regions of a pool that both share; the trainer writes into the engine's weights
driver              the same without the pool: a pause returns memory to the driver, and a resume waits for it there
torch_memory_saver  its tags: tensors keep their addresses, also in graphs
to-cpu              torch's own memory, which is copied to the host and freed: addresses change, so there are no graphs
resident            torch's own memory, which stays: the KV cache gets what both leave

The last three take part in the same turns as guests of memsaver, which have the tags of its regions. Each pause copies
what it keeps and ends before a resume begins, and no other process can write into the memory: the trainer sends a copy
of the weights, which the engine takes in.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import memsaver

from .model import EngineWeights, WeightPart

if TYPE_CHECKING:
    from .trainer.weights import WeightWriter


class Resident(memsaver.Guest):
    """The tensors of a tag, in torch's own memory. A pause leaves the memory as it is.

    The class has the methods of memsaver.Region that the actors call.
    """

    keeps_addresses = True
    capture: Callable[..., AbstractContextManager[Any]] = torch.cuda.graph
    _graph_pool: Any = None

    def __init__(self, tag: str, device: str, backup: str = "none") -> None:
        super().__init__(tag, tag)
        self.device, self.backup = device, backup
        self.is_active, self.residence = True, 1  # how often the contents may have become others
        memsaver.register(self)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self:
            return torch.empty(shape, dtype=dtype, device=self.device)

    def __enter__(self) -> None: ...
    def __exit__(self, *raised: Any) -> None: ...

    def check_active(self, purpose: str) -> None:
        if not self.is_active:
            raise RuntimeError(f"{self.name!r} is paused, and cannot {purpose}")

    def graph(self, stream: Any) -> tuple[Any, AbstractContextManager[Any]]:
        """A graph of CUDA, and the context that captures it. All of a tag share their memory."""
        graph, self._graph_pool = torch.cuda.CUDAGraph(), self._graph_pool or torch.cuda.graph_pool_handle()
        return graph, self.capture(graph, pool=self._graph_pool, stream=stream)

    def wait(self) -> None: ...
    def leave(self) -> None: ...
    def come_back(self) -> None: ...


class ToCpu(Resident):
    """Its storages are copied to the host and freed; tensors and views keep them. A shard that FSDP2 pads stays."""

    keeps_addresses = False

    def __init__(self, tag: str, device: str, backup: str = "none") -> None:
        super().__init__(tag, device, backup)
        self._tensors: list[Tensor] = []
        self._kept: list[tuple[int, Tensor | None]] = []  # bytes of each, and contents

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._tensors.append(super().empty(shape, dtype))
        return self._tensors[-1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def leave(self) -> None:
        self.is_active = False
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            contents = tensor.detach().to("cpu", copy=True) if self.backup == "host" else None
            self._kept.append((storage.nbytes(), contents))
            storage.resize_(0)
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        for tensor, (nbytes, contents) in zip(self._tensors, self._kept):
            tensor.untyped_storage().resize_(nbytes)
            if contents is not None:
                tensor.detach().copy_(contents)
        self._kept.clear()
        self.is_active, self.residence = True, self.residence + 1


class Tagged(Resident):
    """A tag of torch_memory_saver."""

    def __init__(self, tag: str, device: str, backup: str = "none") -> None:
        self.saver = import_saver(device)
        self.saver.retain_cpu_backup = True  # else each pause pins its backup anew, which takes seconds
        super().__init__(tag, device, backup)
        self.capture = partial(self.saver.cuda_graph, tag=tag, enable_cpu_backup=True)

    def __enter__(self) -> None:
        self._inside = self.saver.region(tag=self.name, enable_cpu_backup=self.backup == "host")
        self._inside.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._inside.__exit__(*raised)

    def leave(self) -> None:
        self.is_active = False
        self.saver.pause(self.name)

    def come_back(self) -> None:
        self.saver.resume(self.name)
        self.is_active, self.residence = True, self.residence + 1


def import_saver(device: str) -> Any:
    """The object of torch_memory_saver. Raises ValueError if it cannot be used."""
    needs = "--memory torch_memory_saver needs a GPU and the package torch_memory_saver"
    if not device.startswith("cuda"):
        raise ValueError(f"{needs}; the device is {device!r}")
    try:
        return importlib.import_module("torch_memory_saver").torch_memory_saver
    except ImportError as error:
        raise ValueError(f"{needs}: {error}") from error


REGIONS: dict[str, Any] = {
    "memsaver": memsaver.region,
    "driver": memsaver.region,
    "torch_memory_saver": Tagged,
    "to-cpu": ToCpu,
    "resident": Resident,
}


def variables(saver: str) -> dict[str, str]:
    """Of the environment of the actors, which torch_memory_saver needs for graphs."""
    if saver != "torch_memory_saver":
        return {}
    from torch_memory_saver.utils import get_binary_path_from_package  # type: ignore[import-not-found]

    return {"LD_PRELOAD": str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))}


def packed(writer: WeightWriter, layout: Mapping[str, WeightPart], device: torch.device) -> tuple[Any, bytes]:
    """A copy of an engine's weights, and its pickled form: handles of its memory on a GPU, elsewhere the contents.

    The copy has to live until the engine has read it. A collective.
    """
    copy = {name: torch.empty(part.shape, dtype=writer.dtype, device=device) for name, part in layout.items()}
    writer.write([EngineWeights(copy, layout)], gather=True)
    dumps: Callable[..., Any] = ForkingPickler.dumps if device.type == "cuda" else pickle.dumps
    return copy, bytes(dumps(copy))
