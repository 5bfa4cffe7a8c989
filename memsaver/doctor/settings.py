"""Checks of variables that other libraries read: of torch's allocator and NCCL, in the shell and in each process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from memsaver.doctor import software, versions
from memsaver.doctor.findings import Finding, State
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


def _allocator(variables: Mapping[str, str]) -> tuple[str, bool, bool]:
    """The settings as text, whether the two variables differ, and whether a library that answers cudaMalloc is asked."""
    found = {name: variables[name] for name in _ALLOCATOR if variables.get(name)}
    is_managed = "hook_mode_preload" in variables.get("LD_PRELOAD", "") or bool(variables.get("TMS_INIT_ENABLE"))
    return ", ".join(map("=".join, found.items())), len(set(found.values())) > 1, is_managed


def allocator(machine: Machine) -> Iterator[Finding]:
    """Settings of torch's allocator."""
    torch = versions.release(software.version("torch") or "")
    for (conf, differ, is_managed), who in machine.by_value(_allocator).items():
        text = f"{conf or 'no settings'} in {who}"
        is_expandable = re.search(r"expandable_segments:\s*true", conf, re.IGNORECASE)
        state: State = "ok"
        remedy = ""
        if "cudaMallocAsync" in conf:
            state, remedy = "error", "remove the backend: it has no pools, so no region gets memory"
        elif is_expandable and is_managed:
            state, remedy = "error", "remove it: torch then calls no cudaMalloc, which the preloaded library answers"
        elif is_expandable and torch and torch < versions.TORCH_BESIDE_EXPANDABLE:
            state, remedy = "error", "remove expandable_segments:True, or use torch 2.10: no region can be entered"
        elif is_expandable:
            state, remedy = "note", "it has no effect in regions, but in that of memsaver.default_pool()"
        yield Finding("allocator", state, text, remedy)
        if differ:
            remedy = "versions of torch differ in which of the two counts: set one"
            yield Finding("allocator", "warning", text, remedy)
        if "per_process_memory_fraction" in conf:
            remedy = "remove it: torch counts paused regions as used, so allocations can fail with free memory"
            yield Finding("memory fraction", "warning", text, remedy)
    for name, (subject, state, remedy) in _UNWANTED.items():
        for value, who in machine.by_value(lambda variables, name=name: variables.get(name, "0")).items():
            if value not in ("", "0"):
                yield Finding(subject, state, f"{name}={value} in {who}", remedy)


def nccl(machine: Machine) -> Iterator[Finding]:
    """NCCL's variables that matter to graphs and regions."""
    names = ("NCCL_GRAPH_REGISTER", "NCCL_CUMEM_ENABLE", "WORLD_SIZE")
    groups = machine.by_value(lambda variables: tuple(variables.get(name) for name in names))
    for (register, cumem, ranks), who in groups.items():
        text = f"NCCL_GRAPH_REGISTER is {register or 'not set'}, NCCL_CUMEM_ENABLE {cumem or 'not set'} in {who}"
        if register == "0":
            yield Finding("NCCL", "ok", text)
        else:
            state: State = "note" if ranks in (None, "1") else "warning"
            remedy = "NCCL_GRAPH_REGISTER=0 before the first process group, if ranks capture graphs: replays hang else"
            yield Finding("NCCL", state, text, remedy)
