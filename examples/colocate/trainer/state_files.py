"""Parameters and optimizer state on disk: by torch.distributed.checkpoint, and initial ones of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule

from ..model import folder as folders
from .trainer_memory import own_rows

METADATA = ".metadata"  # the last file that is written


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or gone on from."""


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write this rank's shards, synced to disk. A collective; all ranks share the folder."""
    with _failing(f"written to {str(folder)!r}"):
        dcp.save(tensors(model, optimizer), storage_writer=FileSystemWriter(folder, sync_files=True))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Overwrite parameters and optimizer state, in place: their addresses stay. A collective."""
    if not (folder / METADATA).is_file():  # the same on all ranks, and clearer than the error of torch
        raise CheckpointError(f"{str(folder)!r} has no file {METADATA!r}; expected a folder that a trainer wrote")
    reshard(model)  # parameters that a failed call left gathered would be stale
    with _failing(f"read from {str(folder)!r}"):
        dcp.load(tensors(model, optimizer), storage_reader=FileSystemReader(folder))


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: Path) -> None:
    """Overwrite the parameters with those of a Hugging Face folder, in place. Each rank reads its rows of each tensor.

    Raises FolderError for files that cannot be read, and for parameters that are missing or have another shape.
    """
    with folders.parameters(folder) as stored:
        for name, parameter in model.named_parameters():
            shape, (rows, first) = stored[name].get_shape(), own_rows(parameter)
            if shape != list(parameter.shape):
                raise folders.FolderError(f"{folder}: {name} has shape {shape}; expected {list(parameter.shape)}")
            if len(rows):
                rows.copy_(stored[name][first : first + len(rows)])


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a checkpoint has, by name. Tied parameters come once."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        for key, tensor in optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = tensor
    return found


def reshard(model: nn.Module) -> None:
    """Free gathered parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """With each rank's reason in a line: torch's own error holds their stacks, and does not pickle."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        causes = error.failures if isinstance(error, CheckpointException) else {}
        said = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in causes.items()) or repr(error)
        raise CheckpointError(f"the trainer's state could not be {what}: {said}") from None
