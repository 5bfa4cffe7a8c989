"""Checks of variables that other libraries read: of torch's allocator and NCCL, in the shell and in each process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from memsaver import _core
from memsaver.doctor import software, versions
from memsaver.doctor.findings import Finding, State, judged
from memsaver.doctor.machine import Machine

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Variables that are wrong with any value but 0: the subject, the state, the remedy.
_UNWANTED: Final[dict[str, tuple[str, State, str]]] = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "allocator", "error", "unset it: torch then has no pools, and allocations lie outside of regions"
    ),
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": (
        "NCCL", "warning", "unset it beside memsaver.default_pool(): NCCL must not register buffers of that region"
    ),
}  # fmt: skip


def allocator(machine: Machine) -> Iterator[Finding]:
    """Settings of torch's allocator."""
    torch = versions.release(software.version("torch") or "")
    for (*values, preload, managed), who in machine.by_value(*_ALLOCATOR, "LD_PRELOAD", "TMS_INIT_ENABLE"):
        conf = ", ".join(f"{name}={value}" for name, value in zip(_ALLOCATOR, values) if value)
        text = f"{conf or 'no settings'} in {who}"
        is_managed = "hook_mode_preload" in preload or managed
        is_expandable = re.search(r"expandable_segments:\s*true", conf, re.IGNORECASE)
        is_old = () < torch < versions.TORCH_BESIDE_EXPANDABLE
        yield judged(
            "allocator",
            text,
            ("cudaMallocAsync" in conf, "error", "remove the backend: it has no pools, so no region gets memory"),
            (is_expandable and is_managed, "error", "remove it: the preloaded library answers cudaMalloc alone"),
            (is_expandable and is_old, "error", "remove it, or use torch 2.10: no region can be entered"),
            (is_expandable, "note", "it has no effect in regions, but in that of memsaver.default_pool()"),
            (len({*values} - {""}) > 1, "warning", "versions of torch differ in which of the two counts: set one"),
        )
        if "per_process_memory_fraction" in conf:
            remedy = "remove it: torch counts paused regions as used, so allocations can fail with free memory"
            yield Finding("memory fraction", "warning", text, remedy)
    for name, (subject, state, remedy) in _UNWANTED.items():
        for (value,), who in machine.by_value(name):
            if value not in ("", "0"):
                yield Finding(subject, state, f"{name}={value} in {who}", remedy)


def nccl(machine: Machine) -> Iterator[Finding]:
    """NCCL's variables that matter to graphs and regions."""
    for (register, cumem, ranks), who in machine.by_value("NCCL_GRAPH_REGISTER", "NCCL_CUMEM_ENABLE", "WORLD_SIZE"):
        text = f"NCCL_GRAPH_REGISTER is {register or 'not set'}, NCCL_CUMEM_ENABLE {cumem or 'not set'} in {who}"
        remedy = "NCCL_GRAPH_REGISTER=0 before the first process group, if ranks capture graphs: replays hang else"
        state: State = "note" if ranks in ("", "1") else "warning"
        yield judged("NCCL", text, (register != "0" and _core.cuda_device_count(), state, remedy))
