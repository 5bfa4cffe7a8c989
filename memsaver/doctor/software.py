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
from memsaver.doctor.findings import Finding, State
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
    minor = versions.minor(found)
    on_gpus, elsewhere = ", ".join(versions.TORCH_ON_GPUS), ", ".join(versions.TORCH_ON_TEST_DRIVER)
    if versions.release(found) < versions.TORCH_OLDEST:
        remedy = f"expected {'.'.join(map(str, versions.TORCH_OLDEST))} or newer"
        yield Finding("torch", "error", text, remedy)
    elif minor in versions.TORCH_ON_GPUS:
        yield Finding("torch", "ok", f"{text}: run on GPUs")
    elif minor in versions.TORCH_ON_TEST_DRIVER:
        yield Finding("torch", "note", f"{text}: run on a driver made for tests; on GPUs: {on_gpus}")
    else:
        yield Finding("torch", "note", f"{text}: not run; on GPUs: {on_gpus}; on a driver made for tests: {elsewhere}")
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
        savers = [each for each in preload.split(":") if "torch_memory_saver" in os.path.basename(each)]
        own = all(os.path.dirname(os.path.realpath(each)) == os.path.realpath(startup.LIBRARIES) for each in savers)
        text = f"MEMSAVER_DROP_IN={value}, preloaded: {', '.join(savers) or 'none'} in {who}"
        remedy = ""
        try:
            asked |= parse_drop_in(value)
        except ConfigError as error:
            text, remedy = f"{error} in {who}", "correct the variable"
        if "tms" in value and not own:
            remedy = f"preload {startup.PRELOAD} alone: two savers would answer cudaMalloc"
        elif savers and own and "tms" not in value:
            remedy = "set MEMSAVER_DROP_IN=tms beside memsaver's library, or unset LD_PRELOAD"
        elif "tms" in value and managed and not savers:
            remedy = "use memsaver run -- PROGRAM: TMS_INIT_ENABLE needs the library in LD_PRELOAD"
        yield Finding("drop-ins", "error" if remedy else "ok", text, remedy)
    yield from _vllm("vllm" in asked, machine.variables.get("VLLM_PLUGINS"))
    yield from _savers("tms" in asked, machine.variables.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true"))


def _vllm(is_asked: bool, plugins: str | None) -> Iterator[Finding]:
    found = version("vllm")
    if found is None:
        if is_asked:
            remedy = "memsaver and vLLM have to be in one environment"
            yield Finding("vLLM", "note", "not installed in this environment, but asked for", remedy)
        return
    library = import_module("memsaver.drop_in.vllm")  # by its name: parts of it use torch
    try:
        library.check(found)
    except DropInError as error:
        yield Finding("vLLM", "error" if is_asked else "note", str(error).partition("\n")[0])
        return
    first, last = versions.VLLM_ALLOCATOR
    run = "run on GPUs" if found in versions.VLLM_ON_GPUS else f"the allocators of {first} to {last} were run"
    yield Finding("vLLM", "ok", f"{found}: its sources are accepted; {run}")
    if is_asked and plugins is not None and "memsaver" not in plugins.split(","):
        yield Finding("vLLM", "error", f"VLLM_PLUGINS={plugins} leaves memsaver out", "add memsaver to it, or unset it")


def _savers(is_asked: bool, health: str) -> Iterator[Finding]:
    if (saver := version("torch_memory_saver")) is not None:
        yield Finding("torch_memory_saver", "ok", f"{saver}; the drop-in has the interface of {versions.SAVER}")
    if (sglang := version("sglang")) is not None:
        run = ", ".join(versions.SGLANG_ON_GPUS)
        state: State = "ok" if sglang in versions.SGLANG_ON_GPUS else "note"
        yield Finding("SGLang", state, f"{sglang}; run on GPUs: {run}")
        if is_asked and health.lower() not in ("false", "0"):
            remedy = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false"
            yield Finding("SGLang", "warning", "/health generates a token, also while memory is released", remedy)
