"""Weights that go from a trainer's process into vLLM's workers, in buckets by CUDA IPC, as verl sends them."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch

import memsaver
from support.host import GIB, MIB
from support.processes import Sample
from support.servers.vllm_models import MODELS

BUCKET = 256 * MIB
SPARE = GIB  # of the free memory that filled() leaves to other processes
FILLER = 0xA5


class Updated:
    """A worker extension: takes buckets from the trainer on the same GPU."""

    def take_bucket(self, path: str) -> None:
        """``path``: of the trainers' files, to be completed with the rank."""
        worker: Any = self
        with open(path.format(rank=worker.rank), "rb") as file:
            (rebuild, arguments), places = pickle.load(file)
        bucket = rebuild(*arguments)
        weights = []
        for name, offset, shape in places:
            nbytes = 2 * torch.Size(shape).numel()
            weights.append((name, bucket[offset : offset + nbytes].view(torch.bfloat16).view(shape)))
        worker.model_runner.model.load_weights(iter(weights))
        torch.cuda.synchronize()
        del bucket, weights
        gc.collect()

    def set_verify(self, wanted: str) -> None:
        """Turns the comparison of contents on ("1") or off ("")."""
        memsaver.configure(verify=bool(wanted))

    def flip_byte(self) -> None:
        """Changes one byte of the weights' contents in host memory, on rank 1."""
        worker: Any = self
        if worker.rank == 1:
            for parameter in worker.model_runner.model.parameters():
                copy = memsaver.cpu_backup(parameter.data).view(-1).view(torch.uint8)
                copy[copy.numel() // 2] ^= 1
                return


def trained(model: str, rank: int, path: str) -> Iterator[Sample]:
    """A trainer: each question gets one bucket written to ``path``, version by version, then ``{"last": True}``."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.set_device(rank)
    bucket = torch.empty(BUCKET, dtype=torch.uint8, device="cuda")
    handle = reduce_tensor(bucket)

    def written(places: list[tuple[str, int, tuple[int, ...]]], last: bool) -> Sample:
        torch.cuda.synchronize()
        whole = path.format(rank=rank)
        with open(f"{whole}.new", "wb") as file:
            pickle.dump((handle, places), file)
        os.replace(f"{whole}.new", whole)
        return {"last": last}

    version = 0
    yield {"last": True}
    while True:
        version += 1
        places: list[tuple[str, int, tuple[int, ...]]] = []
        used = 0

        for name, weight in MODELS[model].weights(version, "cuda"):
            if used + weight.nbytes > BUCKET:
                yield written(places, False)
                places, used = [], 0
            bucket[used : used + weight.nbytes].copy_(weight.view(-1).view(torch.uint8))
            places.append((name, used, tuple(weight.shape)))
            used += -(-weight.nbytes // 512) * 512
        yield written(places, True)


def filled(device: int) -> Iterator[Sample]:
    """Another process: by turns it fills free memory of the GPU, all but 1 GiB, with 0xA5, and releases it."""
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    yield {}
    while True:
        held = []
        while (room := torch.cuda.mem_get_info()[0] - SPARE) >= 2 * MIB:
            held.append(torch.full((min(room, 4 * GIB) // MIB * MIB,), FILLER, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        nbytes = sum(each.nbytes for each in held)
        yield {"bytes": nbytes}
        held.clear()
        torch.cuda.empty_cache()
        yield {"bytes": nbytes}
