"""Checks of installed libraries: torch, and those that drop-ins replace. No check imports them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from memsaver import _core
from memsaver.config import parse_drop_in
from memsaver.doctor import versions
from memsaver.doctor.findings import Finding, judged
from memsaver.doctor.machine import Machine
from memsaver.drop_in import DropInError, startup
from memsaver.errors import ConfigError, DriverError


def version(distribution: str) -> str | None:
    """The version of an installed distribution. None: it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """The CUDA version of the installed torch, as in ``torch.version.cuda``. None: a build without CUDA."""
    package = find_spec("torch")
    folders = list(package.submodule_search_locations or []) if package is not None else []
    text = Path(folders[0], "version.py").read_text() if folders else ""
    found = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else None


def torch(machine: Machine) -> Iterator[Finding]:
    """torch's version, against those that were run, and its CUDA version."""
    found = version("torch")
    if found is None:
        yield Finding("torch", "note", "not installed in this environment", "pip install 'memsaver[torch]'")
        return
    cuda = _cuda_of_torch()
    text = f"{found}, {'CUDA ' + cuda if cuda else 'a build without CUDA'}"
    release = versions.release(found)
    yield judged(
        "torch",
        text,
        (release < versions.TORCH_OLDEST, "error", f"expected {'.'.join(map(str, versions.TORCH_OLDEST))} or newer"),
        (
            ".".join(map(str, release[:2])) not in versions.TORCH_ON_GPUS, "note",
            f"it was run on GPUs with {', '.join(versions.TORCH_ON_GPUS)}, and on a driver made for tests with "
            f"{', '.join(versions.TORCH_ON_TEST_DRIVER)}",
        ),
    )  # fmt: skip
    try:
        gpus, driver = len(_core.gpu_facts()), _core.cuda_version() // 1000
    except DriverError:
        return
    if cuda and driver and versions.release(cuda)[0] > driver:
        remedy = "upgrade the driver, or install torch for an older CUDA"
        yield Finding("torch", "error", f"torch is for CUDA {cuda}, and the driver for CUDA {driver}", remedy)
    elif gpus and not cuda:
        yield Finding("torch", "error", f"{text}, on a machine with GPUs", "install torch's build for CUDA")


def drop_ins(machine: Machine) -> Iterator[Finding]:
    """The drop-ins that are asked for, the libraries that they replace, and the file that turns them on."""
    path = startup.file()
    written = re.search(r'"MEMSAVER_DROP_IN", \'([^\']*)\'', path.read_text() if path.is_file() else "")
    yield Finding("drop-ins", "ok", f"{path}: {written[1]}" if written else "no file in site-packages")
    if missing := [str(each) for each in (startup.PRELOAD, startup.PACKAGES) if not each.exists()]:
        yield Finding("drop-ins", "error", f"missing: {', '.join(missing)}", "install memsaver again")
    asked = parse_drop_in(written[1]) if written else set()
    for (value, preload, managed), who in machine.by_value("MEMSAVER_DROP_IN", "LD_PRELOAD", "TMS_INIT_ENABLE"):
        value = value or (written[1] if written else "")
        savers = [each for each in startup.preloaded(preload) if "torch_memory_saver" in os.path.basename(each)]
        own = all(os.path.dirname(os.path.realpath(each)) == os.path.realpath(startup.LIBRARIES) for each in savers)
        text = f"MEMSAVER_DROP_IN={value}, preloaded: {', '.join(savers) or 'none'} in {who}"
        wrong = ""
        try:
            asked |= parse_drop_in(value)
        except ConfigError as error:
            wrong = str(error)
        yield judged(
            "drop-ins",
            text,
            (wrong, "error", wrong),
            ("tms" in value and not own, "error", f"preload {startup.PRELOAD} alone: two would answer cudaMalloc"),
            (savers and own and "tms" not in value, "error", "set MEMSAVER_DROP_IN=tms too, or unset LD_PRELOAD"),
            ("tms" in value and managed and not savers, "error", "TMS_INIT_ENABLE needs LD_PRELOAD: use memsaver run"),
        )
    yield from _vllm("vllm" in asked, machine.variables.get("VLLM_PLUGINS"))
    yield from _savers("tms" in asked, machine.variables.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true"))


def _vllm(is_asked: bool, plugins: str | None) -> Iterator[Finding]:
    found = version("vllm")
    if found is None:
        if is_asked:
            yield Finding("vLLM", "note", "asked for, and not installed here", "install both in one environment")
        return
    library = import_module("memsaver.drop_in.vllm")  # by its name: parts of it use torch
    try:
        library.check(found)
    except DropInError as error:
        yield Finding("vLLM", "error" if is_asked else "note", str(error).partition("\n")[0])
        return
    first, last = versions.VLLM_ALLOCATOR
    yield judged(
        "vLLM",
        f"{found}: its sources are accepted; run on GPUs: {', '.join(versions.VLLM_ON_GPUS)}, "
        f"the allocator alone: {first} to {last}",
        (
            is_asked and plugins and "memsaver" not in plugins.split(","),
            "error",
            f"VLLM_PLUGINS={plugins} lacks memsaver",
        ),
    )


def _savers(is_asked: bool, health: str) -> Iterator[Finding]:
    if (saver := version("torch_memory_saver")) is not None:
        yield Finding("torch_memory_saver", "ok", f"{saver}; the drop-in has the interface of {versions.SAVER}")
    if (sglang := version("sglang")) is not None:
        run = ", ".join(versions.SGLANG_ON_GPUS)
        generates = is_asked and health.lower() not in ("false", "0")
        remedy = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false: /health generates, also while memory is released"
        yield judged("SGLang", f"{sglang}; run on GPUs: {run}", (generates, "warning", remedy))
