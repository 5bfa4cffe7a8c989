"""Weights that go from a trainer's process into SGLang's schedulers by CUDA IPC, as ``update_weights_from_tensor``."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler

import torch

from support.host import MIB
from support.processes import Process, Sample, ask_all
from support.servers.sglang_server import Server
from support.servers.vllm_models import MODELS

BUCKET = 512 * MIB


def payload(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """As SGLang's ``MultiprocessingSerializer.serialize(..., output_str=True)``."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(named_tensors))
    return base64.b64encode(buffer.getvalue()).decode()


def trained(model: str, rank: int, repeats: int) -> Iterator[Sample]:
    """A trainer: each answer is the payload of one bucket, and whether it is the last of its version.

    ``repeats``: how often a version is sent, to another engine each time. The first answer is empty.
    """
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    yield {"last": True}
    version = 0
    while True:
        version += 1
        for _ in range(repeats):
            yield from _buckets(model, version)


def _buckets(model: str, version: int) -> Iterator[Sample]:
    # A bucket is new memory each time: the engine may still copy from the one before when it has answered. torch keeps
    # a tensor that another process has open.
    weights: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, weight in MODELS[model].weights(version, "cuda"):
        if weights and used + weight.nbytes > BUCKET:
            yield _packed(weights, last=False)
            weights, used = [], 0
        weights.append((name, weight))
        used += weight.nbytes
    yield _packed(weights, last=True)
    weights.clear()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def _packed(weights: Sequence[tuple[str, torch.Tensor]], last: bool) -> Sample:
    bucket = torch.cat([weight.view(-1) for _, weight in weights])
    parts = bucket.split([weight.numel() for _, weight in weights])
    named = [(name, part.view(weight.shape)) for (name, weight), part in zip(weights, parts, strict=True)]
    torch.cuda.synchronize()
    return {"last": last, "payload": payload(named)}


def update(server: Server, trainers: Sequence[Process]) -> float:
    """Sends a version of the weights to an engine, from one trainer for each rank. Milliseconds of the engine's calls.

    The trainers have to have been asked once before.
    """
    took = 0.0
    while True:
        found = ask_all(trainers)
        took += server.update([each["payload"] for each in found])
        if found[0]["last"]:
            return took
