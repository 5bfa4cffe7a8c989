"""torch's own CUDA builds without a GPU: its allocator, pools, expandable segments, streams and captures run.

``make test-torch VERSIONS="2.11.0 2.13.0"`` downloads the wheels (tools/torch_wheels.py) and runs the tests here with
each. Programs run in processes of their own: the driver is that of tests/gpus.py, the CUDA runtime is
tests/device/runtime.cpp over it, and each other function of NVIDIA's libraries refuses. Kernels do nothing, so programs
write and read contents by copies.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from memsaver.drop_in.startup import PACKAGES, PRELOAD
from tests import controls, gpus
from tests.support import GIB, ROOT, run_program
from tests.support import environment as with_paths
from tools.torch_wheels import folder

VERSIONS = os.environ.get("MEMSAVER_TEST_TORCH", "").split()
_FUNCTION = re.compile(r"(__)?(cu|nv|nccl)[a-zA-Z]")
_SYSTEM = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC|GOMP|OMP)_")


def release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def runtime(version: str) -> Path:
    """The folder with the libraries that a version of torch loads beside its own."""
    libraries = sorted((folder(version) / "torch" / "lib").glob("*.so*"))
    source = ROOT / "tests" / "device" / "runtime.cpp"
    text = source.read_bytes() + Path(__file__).read_bytes()
    target = ROOT / "build" / "torch_cuda" / f"{version}-{hashlib.sha256(text).hexdigest()[:16]}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    needed, wanted = _needed(libraries), _wanted(libraries)
    cudart = next(name for name in needed if name.startswith("libcudart.so."))
    number = {"12": 12080, "13": 13000}[cudart.rpartition(".")[2]]
    made = Path(tempfile.mkdtemp(dir=target.parent))  # several runs may build it at once
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    flags = ["-std=c++20", "-O1", "-fPIC", f"-DRUNTIME_VERSION={number}"]
    _run(compiler, *flags, "-c", str(source), "-o", str(made / "runtime.o"))
    defined = _run("nm", "--defined-only", "--extern-only", str(made / "runtime.o"))
    own = {name for name in (line.split()[-1] for line in defined) if _FUNCTION.match(name)}
    refused = sorted(wanted.keys() - own)
    (made / "refused.cpp").write_text('extern "C" {\n' + "".join(map(_refusal, refused)) + "}\n")
    nodes: dict[str, list[str]] = {}
    for name in [*refused, *sorted(own)]:
        nodes.setdefault(wanted.get(name) or (cudart if name in own else "FAKE"), []).append(name)
    local = {cudart: " local: *;"}
    (made / "versions").write_text(
        "".join(f"{node} {{ global: {'; '.join(names)};{local.get(node, '')} }};\n" for node, names in nodes.items())
    )
    link = ["-shared", f"-Wl,-soname,{cudart}", f"-Wl,--version-script={made / 'versions'}", "-ldl", "-pthread"]
    objects = [str(made / "runtime.o"), str(made / "refused.cpp")]
    _run(compiler, "-std=c++20", "-fPIC", "-w", *objects, *link, "-o", str(made / cudart))
    for name in needed - {cudart}:
        os.link(made / cudart, made / name)  # names of one file, which the loader then opens once
    try:
        made.rename(target)
    except OSError:  # another was first
        shutil.rmtree(made)
    return target


def _run(*command: str) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def _needed(libraries: list[Path]) -> set[str]:
    """The names of NVIDIA's libraries that these load, but for the driver's."""
    lines = [line for each in libraries for line in _run("readelf", "--dynamic", "--wide", str(each))]
    names = {line.partition("[")[2].partition("]")[0] for line in lines if "(NEEDED)" in line}
    return {name for name in names if re.match(r"lib(cu|nv|nccl)", name)} - {"libcuda.so.1"}


def _wanted(libraries: list[Path]) -> dict[str, str]:
    """The functions that these libraries call and neither have nor find in the system, and the version of each."""
    found: dict[str, str] = {}
    defined: set[str] = set()
    for each in libraries:
        for line in _run("nm", "--dynamic", "--with-symbol-versions", str(each)):
            kind, name = line.split()[-2:]
            if kind == "U" and not _SYSTEM.search(name) and _FUNCTION.match(name):
                found[name.partition("@")[0]] = name.partition("@")[2].lstrip("@")
            elif kind != "U":
                defined.add(name.partition("@")[0])
    driver = _run("nm", "--dynamic", "--defined-only", str(controls.folder() / "libcuda.so.1"))
    return {name: node for name, node in found.items() if name not in defined | {line.split()[-1] for line in driver}}


def _refusal(name: str) -> str:
    """A function that tells that it is not supported, or does nothing: cuBLAS launches kernels alone."""
    if re.search(r"(String|ErrorName)$|GetLastError$", name):
        return f'const char* {name}() {{ return "not made up"; }}\n'
    code = 0 if re.match(r"cublas|__cuda(Register|Unregister|InitModule)|cudaProfiler|cudaFuncSet", name) else 801
    return f"int {name}() {{ return {code}; }}\n"


def environment(version: str, count: int = 1, memory: int = 4 * GIB, preload: bool = False) -> dict[str, str]:
    """The environment of a process with this torch, on so many GPUs of this size.

    ``preload``: with the drop-in for torch_memory_saver, and the library to preload.
    """
    found = gpus.environment(gpus.entries(range(count), memory))
    libraries = os.pathsep.join([str(runtime(version)), found["LD_LIBRARY_PATH"]])
    packages = str(PACKAGES) if preload else ""
    paths = os.pathsep.join(filter(None, [packages, str(folder(version)), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found |= {"LD_LIBRARY_PATH": libraries, "CUDA_MODULE_LOADING": "LAZY"}
    found["LD_PRELOAD"] = str(PRELOAD) if preload else ""
    found["MEMSAVER_PATCHES"] = "captures"  # programs capture plain graphs
    found["PYTHONDONTWRITEBYTECODE"] = ""  # unset: torch has 2,000 files
    return {**with_paths(**found), "PYTHONPATH": paths}


BEGIN = """
import faulthandler, gc, sys, threading, time
faulthandler.enable()
faulthandler.dump_traceback_later(100, exit=True)
import torch, memsaver
from tests import controls, gpus
from tests.torch_cuda.programs import *
"""
LATE = "controls.copies_delay(0.001)\n"


def run(version: str, source: str, *, begin: str = BEGIN, late: bool = False, **options: Any) -> str:
    """Runs a program that must succeed. Returns its stdout. ``late``: its copies end late."""
    done = run_program(
        [sys.executable, "-W", "ignore", "-c", begin + LATE * late + textwrap.dedent(source)],
        env=environment(version, **options),
    )
    if done.returncode != 0:
        pytest.fail(f"it ended with {done.returncode}:\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout
