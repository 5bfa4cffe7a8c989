"""A CUDA driver without a GPU. ``run_on_fake()`` runs a program whose libcuda.so.1 and libnvidia-ml.so.1 are the fake.

Captures follow the rules of CUDA: marks and waits of a context break those of its streams, and unsafe calls fail by the
modes of captures and threads. ``control.broken()`` names the calls that broke one.

The library is compiled on first use and kept under build/, by the text of its sources. Programs control it with
:mod:`tests.fake_cuda.control`. Keyword arguments choose the behaviour of the devices. They become environment variables
(``devices=8``: FAKE_CUDA_DEVICES):

=================== ================================================================================================
devices             how many (1)
memory              of each ("80GiB"); costs nothing until contents are written
adjacent            1: a reservation of addresses begins where the one before ends
late                1: copies run when a thread waits for them, or when it has asked for their end once
active              "1,3": devices whose primary context another library of the process holds from the start
peers               "all", "none", or pairs such as "0-1,2>3": which devices can access each other's memory, or one
                    the other's
no_record_event     1: the driver is older than cuCtxRecordEvent
no_export           1: no POSIX descriptors: the attribute is 0, and cuMemCreate refuses the handle type with 801
export_refusal      a code: the attribute is 1, and cuMemCreate refuses the handle type with this code
fabric              1: cuMemCreate knows fabric handles
fabric_refusal      the code with which it refuses them otherwise (801)
no_virtual_memory   1: the device has no virtual memory management
pointers_by_version 1: cuGetProcAddress gives another pointer for another version of a call
dies_whole          1: with one context all of the process die, and calls that need none fail as well
granularity         of mappings, as the driver reports it ("2MiB")
mig                 1: NVML lists the devices only as MIG-...
numa                a number: the memory of device 0 is this NUMA node of the system, that of device 1 the next, ...
numa_first          the first device of which this is so (0)
no_nvml             1: NVML cannot be initialised
occupied            bytes of each device that other processes and the driver have ("0")
context             bytes of a context that this process has ("0"); without them it cannot be retained
page_table          bytes that mappings take in each GiB of addresses ("0")
freed_late          how many looks at free memory it takes until released memory is free (0)
own_pid             the number under which NVML lists this process, as in a container (its own)
processes           "0:4711:1024,...": device, pid and bytes that NVML lists beside this process
delays              "cuMemCreate=2000,...": microseconds that each call takes
=================== ================================================================================================
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, run_clean

HERE = Path(__file__).parent
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")  # names of one file, which the loader then opens once
SYSTEM = "libfakesystem.so"


@functools.cache
def folder() -> Path:
    """Where the libraries are."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("the fake driver needs a C++ compiler")
    api = ROOT / "csrc" / "driver" / "cuda_api.h"
    text = b"".join(source.read_bytes() for source in [*sorted(HERE.glob("fake_*")), api])
    target = ROOT / "build" / "fake_cuda" / hashlib.sha256(text).hexdigest()[:16]
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent))  # several runs may build it at once
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Wshadow", "-shared", "-fPIC", "-pthread"]
    for sources, name in ((("fake_cuda.cpp", "fake_streams.cpp"), DRIVER[0]), (("fake_system.cpp",), SYSTEM)):
        subprocess.run([compiler, *flags, *(str(HERE / each) for each in sources), "-o", str(made / name)], check=True)
    os.link(made / DRIVER[0], made / DRIVER[1])
    try:
        made.rename(target)
    except OSError:  # another was first
        shutil.rmtree(made)
    return target


def environment(
    *, system_files: Path | None = None, refused_calls: Sequence[int] = (), **options: object
) -> dict[str, str]:
    """The environment variables with which a process finds the fake, and of its behaviour.

    ``system_files``: a folder with files that take the place of the system's, each under its full path.
    ``refused_calls``: numbers of system calls that fail with EPERM, as in a container that forbids them.
    """
    path = os.pathsep.join(filter(None, [str(folder()), os.environ.get("LD_LIBRARY_PATH", "")]))
    variables = {"LD_LIBRARY_PATH": path}
    if system_files is not None or refused_calls:
        variables["LD_PRELOAD"] = str(folder() / SYSTEM)
        variables["FAKE_SYSTEM_REFUSED"] = ",".join(map(str, refused_calls))
    if system_files is not None:
        variables["FAKE_SYSTEM_FILES"] = str(system_files)
    return {**variables, **{f"FAKE_CUDA_{name.upper()}": str(value) for name, value in options.items()}}


def run_on_fake(source: str, /, **options: Any) -> str:
    """Runs a program that must succeed and print nothing to stderr. Returns its stdout."""
    return run_clean(source, **environment(**options))
