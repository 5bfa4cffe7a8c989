"""Checks of the driver, of what the GPUs offer, and of the processes that hold device memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memsaver import _core
from memsaver.doctor import versions
from memsaver.doctor.findings import Finding
from memsaver.doctor.machine import DeviceMemory, Machine
from memsaver.errors import DriverError, gib

_FULL = 10  # a device with less than a tenth free is full


def driver(machine: Machine) -> Iterator[Finding]:
    """The driver, its CUDA version, and what each GPU offers."""
    module = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", machine.text("/proc/driver/nvidia/version") or "")
    kernel = f"kernel module {module[1]}" if module else "no kernel module"
    visible = machine.variables.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible!r}"
    try:
        gpus = _core.gpu_facts()
    except DriverError as error:
        text = f"{kernel}, no usable CUDA driver: {error.message}"
        if module:
            remedy = "give the container libcuda (NVIDIA_DRIVER_CAPABILITIES=compute,utility), or upgrade the driver"
            yield Finding("driver", "error", f"{text}{shown}", remedy)
        else:
            yield Finding("driver", "note", f"{text}{shown}", "device='cpu', the host driver, needs none")
        return
    version = _core.cuda_version()
    text = f"CUDA {version // 1000}.{version % 1000 // 10}, {kernel}, {len(gpus)} GPUs{shown}"
    if version and version // 1000 < versions.CUDA_OLDEST:
        yield Finding("driver", "error", text, f"install a driver for CUDA {versions.CUDA_OLDEST} or newer")
    elif not gpus:
        yield Finding("driver", "note", f"{text}: no GPU is visible", "check CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("driver", "ok", text)
    for index, gpu in enumerate(gpus):
        handles = [each for each in ("posix", "fabric") if gpu[each]]
        text = f"cuda:{index} ({gpu['name']}): virtual memory, handles: {' and '.join(handles) or 'none'}"
        if not gpu["virtual_memory"]:
            text = f"cuda:{index} ({gpu['name']}) has no virtual memory management"
            yield Finding("GPU", "error", text, "memsaver cannot use it: vGPUs have to allow it")
        elif gpu["mps"]:
            remedy = "end MPS for a shared pool, which needs GPUs without its server, or leave pool='process'"
            yield Finding("GPU", "warning", f"{text}; under MPS", remedy)
        elif not gpu["posix"]:
            yield Finding("GPU", "warning", f"{text}: it has no shared pool", "leave pool='process'")
        else:
            yield Finding("GPU", "ok", f"{text}; a part of a GPU (MIG)" if "MIG" in gpu["name"] else text)


def holders(machine: Machine) -> Iterator[Finding]:
    """The processes that hold memory of a device, and those of them that memsaver cannot make return it."""
    if not machine.devices:
        yield Finding("device memory", "ok", "no process uses a host device")
    for device in machine.devices:
        yield from _holders(device)


def _holders(device: DeviceMemory) -> Iterator[Finding]:
    by_process: dict[str, int] = {}
    for row in device.account.rows:
        name = "no listed process" if row.pid is None else f"{row.name} (pid {row.pid})"
        by_process[name] = by_process.get(name, 0) + row.bytes
    silent = {row.pid for row in device.account.rows if row.kind == "process"}
    used, total = device.account.used_bytes or 0, device.total_bytes
    text = f"{device.name} ({device.uuid}): {gib(used)} of {gib(total)} in use"
    shown = sorted(by_process.items(), key=lambda each: -each[1])
    text += "".join(f", {name} {gib(nbytes)}" for name, nbytes in shown)
    remedy = "end the process, pause its regions, or run both with a shared pool (MEMSAVER_POOL=shared)"
    if device.pool is not None:
        beside = used - device.pool["total_bytes"]
        if silent and beside > total - device.pool["capacity_bytes"]:
            text += f"; the shared pool lends up to {gib(device.pool['capacity_bytes'])}, beside these {gib(beside)}"
            yield Finding("device memory", "warning", text, f"{remedy}, or give the broker a smaller capacity")
            return
    elif len(silent) > 1:
        text += "; several processes take memory from the driver: one may resume before another has paused"
        yield Finding("device memory", "warning", text, remedy)
        return
    elif silent and total - used < total // _FULL:
        yield Finding("device memory", "warning", f"{text}; the device is full", remedy)
        return
    if not silent and by_process.get("no listed process", 0) > total // _FULL:
        remedy = "in some containers the driver lists no processes: look from outside (nvidia-smi)"
        yield Finding("device memory", "note", text, remedy)
    else:
        yield Finding("device memory", "note" if silent else "ok", text)
