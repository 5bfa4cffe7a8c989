"""Parameters and optimizer state on disk: by torch.distributed.checkpoint, and initial ones of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule

from ..model import folder as folders
from .memory import own_rows

METADATA = ".metadata"  # the last file that is written


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or gone on from."""


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write this rank's shards, synced to disk. A collective; all ranks share the folder."""
    try:
        dcp.save(tensors(model, optimizer), storage_writer=FileSystemWriter(folder, sync_files=True))
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise _failure("written to", folder, error) from None


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Overwrite parameters and optimizer state, in place: their addresses stay. A collective."""
    if not (folder / METADATA).is_file():  # the same on all ranks, and clearer than the error of torch
        raise CheckpointError(f"{str(folder)!r} has no file {METADATA!r}; expected a folder that a trainer wrote")
    reshard(model)  # parameters that a failed call left gathered would be stale
    try:
        dcp.load(tensors(model, optimizer), storage_reader=FileSystemReader(folder))
    except (Exception, CheckpointException) as error:
        raise _failure("read from", folder, error) from None


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


def _failure(verb: str, folder: Path, error: BaseException) -> CheckpointError:
    """With each rank's reason in a line: torch's own error holds their stacks, and does not pickle."""
    causes = error.failures if isinstance(error, CheckpointException) else {}
    said = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in causes.items()) or repr(error)
    return CheckpointError(f"the trainer's state could not be {verb} {str(folder)!r}: {said}")
