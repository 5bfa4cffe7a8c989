"""Parameters and optimizer state on disk, by torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.fsdp import FSDPModule

from ..model.folder import failing

METADATA = ".metadata"  # the last file that is written


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or gone on from."""


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write this rank's shards, synced to disk. A collective; all ranks share the folder."""
    with failing(CheckpointError, f"the trainer's state could not be written to {str(folder)!r}"):
        dcp.save(tensors(model, optimizer), storage_writer=FileSystemWriter(folder, sync_files=True))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Overwrite parameters and optimizer state, in place: their addresses stay. A collective."""
    if not (folder / METADATA).is_file():  # the same on all ranks, and clearer than the error of torch
        raise CheckpointError(f"{str(folder)!r} has no file {METADATA!r}; expected a folder that a trainer wrote")
    reshard(model)  # parameters that a failed call left gathered would be stale
    with failing(CheckpointError, f"the trainer's state could not be read from {str(folder)!r}"):
        dcp.load(tensors(model, optimizer), storage_reader=FileSystemReader(folder))


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
