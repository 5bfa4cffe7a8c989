"""The library that routes cudaMalloc to regions, over a CUDA runtime that is made up, on the host driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from memsaver.drop_in.startup import python_path
from memsaver.drop_in.tms.library import FOLDER
from tests.support import ROOT, run_python

LIBRARY = FOLDER / "torch_memory_saver_hook_mode_preload.abi3.so"
SOURCE = Path(__file__).with_name("cuda_runtime.c")
# Each test is a program of its own after this, since a library can only be preloaded when a process starts.
COMMON = """
import ctypes, threading
# As torch loads it: the runtime and its caller are not in the global scope of symbols.
runtime, caller = ctypes.CDLL(RUNTIME), ctypes.CDLL(CALLER)
caller.call_malloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
caller.call_free.argtypes = [ctypes.c_void_p]
runtime.set_free.argtypes = [ctypes.c_size_t]
MIB = 1 << 20

def allocate(nbytes=3 * MIB):
    data = ctypes.c_void_p()
    error = caller.call_malloc(ctypes.byref(data), nbytes)
    return data.value if error == 0 else -error

def release(address):
    assert caller.call_free(address) == 0

def seen():
    return runtime.seen_mallocs(), runtime.seen_frees()
"""
SAVER = """
from torch_memory_saver import torch_memory_saver as saver
from memsaver import regions
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the CUDA runtime that is made up needs a C compiler")
    folder = tmp_path_factory.mktemp("runtime")
    made = {"RUNTIME": folder / "libcudart.so.13", "CALLER": folder / "libcaller.so"}
    command = [compiler, "-shared", "-fPIC", str(SOURCE)]
    subprocess.run([*command, "-o", str(made["RUNTIME"])], check=True)
    linked = [str(made["RUNTIME"]), f"-Wl,-rpath,{folder}", "-Wl,--no-as-needed"]
    subprocess.run([*command, "-DCALLER", "-o", str(made["CALLER"]), *linked], check=True)
    return {name: str(path) for name, path in made.items()}


@pytest.fixture
def run(libraries: dict[str, str]) -> Run:
    def run(program: str, saver: bool = True, preload: bool = True, **variables: str) -> str:
        text = "".join(f"{name} = {path!r}\n" for name, path in libraries.items()) + COMMON
        variables = {
            "MEMSAVER_DROP_IN": "tms",
            "PYTHONPATH": python_path(str(ROOT)),
            "LD_PRELOAD": str(LIBRARY) if preload else "",
            **variables,
        }
        done = run_python(text + (SAVER if saver else "") + program, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_calls_pass_through_until_a_region_is_entered(run: Run) -> None:
    run("""
address = allocate()
assert seen() == (1, 0)
release(address)
assert seen() == (1, 1)
release(None)
assert seen() == (1, 2)
import sys
assert "memsaver" not in sys.modules
""", saver=False)  # fmt: skip


def test_allocations_of_the_thread_are_in_the_region(run: Run) -> None:
    run("""
with saver.region("weights", enable_cpu_backup=True):
    first = allocate()
    with saver.disable():
        outside = allocate()
    found = []
    thread = threading.Thread(target=lambda: found.append(allocate()))
    thread.start(); thread.join()
    with saver.region("kv_cache"):
        cache = allocate()
    second = allocate()
after = allocate()
tags = [getattr(regions.owning(each), "tag", None) for each in (first, outside, *found, cache, second, after)]
assert tags == ["tms.weights", None, None, "tms.kv_cache", "tms.weights", None], tags
assert seen() == (3, 0)
for address in (outside, *found, after):
    release(address)
assert seen() == (3, 3)
for address in (first, cache, second):
    release(address)
assert seen() == (3, 3)
assert all(each._core.await_frees(10) or each.allocated_bytes == 0 for each in regions.all_regions())
""")  # fmt: skip


def test_contents_survive_a_pause(run: Run) -> None:
    run("""
with saver.region("weights", enable_cpu_backup=True):
    address = allocate()
ctypes.memset(address, 7, 3 * MIB)
saver.pause("weights")
assert regions.owning(address).mapped_bytes == 0
with saver.region("weights", enable_cpu_backup=True):  # while it is paused
    later = allocate()
ctypes.memset(later, 8, 3 * MIB)
saver.resume()
assert ctypes.string_at(address, 3 * MIB) == bytes([7]) * (3 * MIB)
assert ctypes.string_at(later, 3 * MIB) == bytes([8]) * (3 * MIB)
saver.pause()
with saver.disable():
    release(address)  # while it is paused
saver.resume()
assert ctypes.string_at(later, 3 * MIB) == bytes([8]) * (3 * MIB)
assert seen() == (0, 0)
""")  # fmt: skip


def test_lack_of_memory_is_the_error_of_the_runtime(run: Run) -> None:
    run("""
with saver.region("weights"):
    assert allocate(1 << 50) == -2
    runtime.set_free(100 * MIB)
    saver.memory_margin_bytes = 98 * MIB
    assert allocate(3 * MIB) == -2
    assert allocate(2 * MIB) > 0
    saver.memory_margin_bytes = 1 << 40
    assert allocate(1) == -2
    saver.memory_margin_bytes = 0
    assert allocate(3 * MIB) > 0
assert seen() == (0, 0)
""")  # fmt: skip


def test_callers_of_the_library_suspend_a_region(run: Run) -> None:
    run("""
with saver.region("weights"):
    library = saver._impl._binary_wrapper.cdll
    assert library.tms_get_interesting_region()
    library.tms_set_interesting_region(False)
    assert not library.tms_get_interesting_region()
    outside = allocate()
    library.tms_set_interesting_region(True)
    inside = allocate()
    library.tms_set_interesting_region(False)
    with saver.region("kv_cache"):
        cache = allocate()
assert not library.tms_get_interesting_region()
tags = [getattr(regions.owning(each), "tag", None) for each in (outside, inside, cache)]
assert tags == [None, "tms.weights", "tms.kv_cache"] and seen() == (1, 0)
""")  # fmt: skip


def test_allocator_without_cuda_malloc_is_refused(run: Run) -> None:
    run("""
import os
from memsaver.drop_in.errors import DropInError
saver.pause()
refused = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
for name, value in refused.items():
    os.environ[name] = value
    try:
        with saver.region("weights"):
            raise AssertionError("entered")
    except DropInError as error:
        assert f"{name} is {value!r}" in str(error)
    del os.environ[name]
import torch
torch._C._accelerator_getAllocatorSettings = lambda: "expandable_segments:True"  # as after memsaver.default_pool()
try:
    with saver.region("weights"):
        raise AssertionError("entered")
except DropInError as error:
    assert "torch's allocator settings is 'expandable_segments:True'" in str(error)
torch._C._accelerator_getAllocatorSettings = lambda: ""
with saver.region("weights"):
    pass
""")  # fmt: skip


def test_forked_child_passes_all_calls_through(run: Run) -> None:
    run("""
import os
with saver.region("weights"):
    address = allocate()
    child = os.fork()
    if child == 0:
        made = allocate()
        release(made)
        release(address)  # the parent's
        os._exit(0 if seen() == (1, 1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert regions.owning(address).allocated_bytes == 3 * MIB
    assert regions.owning(allocate()) is not None
""")  # fmt: skip


def test_thousands_of_addresses_are_told_apart(run: Run) -> None:
    run("""
import random
random.seed(3)
held = {True: [], False: []}
counts = [0, 0]
for step in range(20_000):
    routed = random.random() < 0.5
    if random.random() < 0.55:
        if routed:
            with saver.region("weights"):
                held[routed].append(allocate(random.choice([4096, 65536])))
        else:
            held[routed].append(allocate(64))
            counts[0] += 1
    elif held[routed]:
        release(held[routed].pop(random.randrange(len(held[routed]))))
        counts[1] += not routed
    assert step % 1000 or seen() == tuple(counts)
assert seen() == tuple(counts) and len(held[True]) > 100
""")  # fmt: skip


def test_child_started_with_configure_subprocess_loads_the_library(run: Run) -> None:
    said = run("""
import subprocess, sys
from torch_memory_saver import configure_subprocess
import torch_memory_saver.utils as utils
program = '''
from torch_memory_saver import torch_memory_saver as saver
with saver.region("weights"):
    print("entered")
'''
with configure_subprocess():
    print(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
print(utils.get_binary_path_from_package("torch_memory_saver_hook_mode_preload").name)
""", preload=False)  # fmt: skip
    assert said.split() == ["entered", "torch_memory_saver_hook_mode_preload_cu13.abi3.so"]


def test_other_functions_of_the_runtime_are_found_in_the_library(run: Run) -> None:
    run("""
import os
library = ctypes.CDLL(os.environ["LD_PRELOAD"])
flags = ctypes.c_uint()
assert library.cudaGetLastError() == 77
assert library.cudaHostGetFlags(ctypes.byref(flags), 8) == 0 and flags.value == 1
""", saver=False)  # fmt: skip


def test_call_without_a_runtime_is_an_error_with_one_line() -> None:
    program = "import ctypes; print(ctypes.CDLL(None).cudaFree(ctypes.c_void_p(8)))"
    done = run_python(program, LD_PRELOAD=str(LIBRARY))
    assert done.stdout.strip() == "999", done.stderr
    assert done.stderr.splitlines() == ["memsaver: cudaFree was called, and no CUDA runtime library is loaded"]


def test_library_needs_libc_alone() -> None:
    needed = subprocess.run(["ldd", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].partition(".so")[0] for line in needed.splitlines()}
    assert {Path(name).name for name in names} <= {"linux-vdso", "libc", "libdl", "libpthread", "ld-linux-x86-64"}, (
        needed
    )


# Whole processes

# The host device has its default size: it is in use before Python reads the variable.
WHOLE = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", "MEMSAVER_HOST_DEVICE": ""}


def test_whole_process_is_managed_from_the_first_allocation(run: Run) -> None:
    run("""
import sys
address = allocate()
assert "memsaver" not in sys.modules and seen() == (0, 0)
in_thread = []
thread = threading.Thread(target=lambda: in_thread.append(allocate()))
thread.start(); thread.join()
ctypes.memset(address, 7, 3 * MIB)
from torch_memory_saver import torch_memory_saver as saver
from memsaver import regions
(default,) = regions.all_regions()
assert (default.tag, default.backup) == ("tms.default", "host")
assert default.owns(address) and default.owns(in_thread[0])
saver.pause()
assert default.mapped_bytes == 0
later = allocate()  # while it is paused
assert regions.owning(later).tag == "tms.default.2"
release(in_thread[0])
saver.resume()
assert ctypes.string_at(address, 3 * MIB) == bytes([7]) * (3 * MIB)
release(address); release(later)
assert seen() == (0, 0)
""", saver=False, **WHOLE)  # fmt: skip


def test_repeated_pauses_of_a_whole_process_make_no_more_regions(run: Run) -> None:
    run("""
import torch
first = allocate()
for _ in range(5):
    saver.pause()
    later = allocate()
    saver.resume()
    release(later)
    for each in regions.all_regions():
        each._core.await_frees(10)
    again = allocate()
    assert regions.owning(again).tag == "tms.default"
    release(again)
assert sorted(each.tag for each in regions.all_regions()) == ["tms.default", "tms.default.2"]
""", **WHOLE)  # fmt: skip


def test_regions_nest_in_a_whole_process(run: Run) -> None:
    run("""
saver._ensure_initialized()
library = saver._impl._binary_wrapper.cdll
def state():
    return (library.tms_get_interesting_region(), library.tms_get_current_tag(), library.tms_get_enable_cpu_backup(),
            library.tms_get_enable_disk_backup(), library.tms_get_cpu_backup_backend())
outer = (True, b"default", True, False, b"pinned")
assert state() == outer
with saver.region("grads"):
    assert state() == (True, b"grads", False, False, b"pinned")
    with saver.region("kept", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        assert state() == (True, b"kept", True, False, b"mmap")
    grads = allocate()
    with saver.disable():
        assert not library.tms_get_interesting_region()
        outside = allocate()
assert state() == outer
weights = allocate()
tags = [getattr(regions.owning(each), "tag", None) for each in (grads, outside, weights)]
assert tags == ["tms.grads", None, "tms.default"], tags
saver.pause("grads")
with saver.disable():
    assert seen() == (1, 0)
    release(outside)
saver.resume("grads")
""", **WHOLE)  # fmt: skip


def test_c_functions_pause_and_resume(run: Run) -> None:
    run("""
import torch  # Python is asked by the C functions
library = ctypes.CDLL(None)
for name in ("tms_pause", "tms_resume"):
    getattr(library, name).argtypes = [ctypes.c_char_p]
library.tms_get_cpu_backup_pointer.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
library.tms_get_cpu_backup_pointer.restype = ctypes.c_void_p
address = allocate()
ctypes.memset(address, 5, 3 * MIB)
assert not library.tms_get_cpu_backup_pointer(address, 3 * MIB)
assert library.tms_pause(b"nobody made this") == 0
assert library.tms_pause(None) == 0
from memsaver import regions
(default,) = regions.all_regions()
assert default.state == "paused"
where = library.tms_get_cpu_backup_pointer(address + MIB, MIB)
assert ctypes.string_at(where, MIB) == bytes([5]) * MIB
assert library.tms_resume(b"default") == 0
assert default.state == "active" and ctypes.string_at(address, MIB) == bytes([5]) * MIB
assert not library.tms_get_retain_cpu_backup()
library.tms_set_retain_cpu_backup(True)
from torch_memory_saver import torch_memory_saver
assert torch_memory_saver.retain_cpu_backup is True
""", saver=False, **WHOLE)  # fmt: skip


def test_c_functions_say_that_they_need_python(run: Run) -> None:
    run("""
library = ctypes.CDLL(None)
assert library.tms_pause(None) != 0
""", saver=False)  # fmt: skip


def test_retained_backups_outlive_a_resume_at_one_place(run: Run) -> None:
    run("""
import torch
assert saver.retain_cpu_backup is True  # by the variable
saver.hook_mode = "preload"
with saver.region("weights", enable_cpu_backup=True):
    address = allocate()
class Tensor:  # as torch has it for memory of a device
    def data_ptr(self): return address
    def is_contiguous(self): return True
    def numel(self): return 3 * MIB
    def element_size(self): return 1
    dtype, shape = torch.uint8, (3 * MIB,)
places = set()
for value in range(1, 4):
    ctypes.memset(address, value, 3 * MIB)
    saver.pause()
    saver.resume()
    ctypes.memset(address, 99, 3 * MIB)
    found = saver.get_cpu_backup(Tensor(), zero_copy=True)
    assert bool((found == value).all())
    places.add(found.data_ptr())
    del found
assert len(places) == 1
saver.retain_cpu_backup = False
saver.pause()
saver.resume()
assert saver.get_cpu_backup(Tensor()) is None
""", TMS_RETAIN_CPU_BACKUP="yes")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TMS_RETAIN_CPU_BACKUP", "maybe"),
        ("TMS_INIT_CPU_BACKUP_BACKEND", "paper"),
        ("TMS_INIT_ENABLE_DISK_BACKUP", "1"),
    ],
)
def test_wrong_variable_is_an_error_that_names_it(run: Run, name: str, value: str) -> None:
    run(f"""
from memsaver.drop_in.errors import DropInError
try:
    from torch_memory_saver import torch_memory_saver as saver
    saver.pause()
except DropInError as error:
    assert {name!r} in str(error) and "expected" in str(error)
else:
    raise AssertionError("accepted")
""", saver=False, **{"TMS_INIT_ENABLE_CPU_BACKUP": "1", name: value})  # fmt: skip


def test_wrong_variable_fails_allocations_with_one_line(libraries: dict[str, str]) -> None:
    text = "".join(f"{name} = {path!r}\n" for name, path in libraries.items()) + COMMON
    variables = {"LD_PRELOAD": str(LIBRARY), **WHOLE, "TMS_INIT_CPU_BACKUP_BACKEND": "paper"}
    done = run_python(text + "assert allocate() == -1 and allocate() == -1 and seen() == (0, 0)", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["memsaver: TMS_INIT_CPU_BACKUP_BACKEND is 'paper', expected pinned or mmap"]


def test_library_for_another_cuda_version_fails_allocations_with_one_line(libraries: dict[str, str]) -> None:
    text = "".join(f"{name} = {path!r}\n" for name, path in libraries.items()) + COMMON
    other = LIBRARY.with_name("torch_memory_saver_hook_mode_preload_cu12.abi3.so")
    done = run_python(text + "assert allocate() == -1 and allocate() == -1", LD_PRELOAD=str(other), **WHOLE)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("memsaver: the process has the runtime of CUDA 13, and LD_PRELOAD names ")


def test_folder_may_be_named_as_a_cuda_version(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "torch_cu128[dev]"
    folder.symlink_to(LIBRARY.parents[3])  # memsaver
    library = folder / LIBRARY.relative_to(LIBRARY.parents[3])
    run("assert allocate() > 0 and seen() == (0, 0)", saver=False, **{**WHOLE, "LD_PRELOAD": str(library)})


def test_two_copies_of_the_library_are_one(run: Run) -> None:
    both = f"{LIBRARY.with_name('torch_memory_saver_hook_mode_preload_cu13.abi3.so')}:{LIBRARY}"
    run("""
from memsaver import regions
inside = allocate()
from torch_memory_saver import torch_memory_saver as saver
with saver.disable():
    outside = allocate()
assert seen() == (1, 0), seen()
assert regions.owning(inside).tag == "tms.default" and regions.owning(outside) is None
release(inside); release(outside)
assert seen() == (1, 1)
""", saver=False, **{**WHOLE, "LD_PRELOAD": both})  # fmt: skip


def test_whole_process_joins_the_shared_pool_at_its_first_pause(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket is short
        pool = {"MEMSAVER_POOL": "shared", "MEMSAVER_POOL_DIR": folder, "MEMSAVER_HOST_DEVICE": "64MiB"}
        run(JOINS, **{**WHOLE, **pool})


JOINS = """
import os, subprocess, sys
from memsaver import _core
import memsaver
memsaver.configure(host_device="64MiB")  # before the device is in use
address = allocate()
ctypes.memset(address, 7, 3 * MIB)
try:
    saver.pause()
    assert _core.in_pool("cpu")
    saver.resume()
    assert ctypes.string_at(address, 3 * MIB) == bytes([7]) * (3 * MIB)
    mine = [row for row in memsaver.stats().devices["cpu"].ledger.rows if row.pid == os.getpid()]
    assert sum(row.bytes for row in mine) >= 3 * MIB
finally:
    subprocess.run([sys.executable, "-m", "memsaver", "broker", "--stop"], check=True, stdout=subprocess.DEVNULL)
"""


def test_whole_process_cannot_be_paused_during_a_capture(run: Run) -> None:
    run("""
from memsaver import Error, _core
address = allocate()
_core.capture_begins()
try:
    saver.pause()
except Error as error:
    assert "captured" in str(error)
else:
    raise AssertionError("paused")
_core.capture_ends()
assert regions.owning(address).state == "active"
assert regions.owning(allocate()).tag == "tms.default"
saver.pause()
""", **WHOLE)  # fmt: skip


def test_error_after_a_resume_leaves_no_region_aside(run: Run) -> None:
    run("""
from memsaver import transitions
address = allocate()
saver.pause()
original = transitions.resume

def fails(*arguments, **options):
    original(*arguments, **options)
    raise RuntimeError("after the commit")

transitions.resume = fails
try:
    saver.resume()
except RuntimeError:
    pass
assert regions.owning(address).state == "active"
assert regions.owning(allocate()).tag == "tms.default"
""", **WHOLE)  # fmt: skip


def test_directory_for_backups_on_disk_is_that_of_memsaver(run: Run, tmp_path: Path) -> None:
    disk = {"TMS_INIT_ENABLE_CPU_BACKUP": "0", "TMS_INIT_ENABLE_DISK_BACKUP": "1", "MEMSAVER_DISK_DIR": str(tmp_path)}
    run(f"""
import torch
from memsaver import config
(directory,) = [each.value for each in config.settings() if each.option.name == "disk_dir"]
assert str(directory) == {str(tmp_path)!r}, directory
""", saver=False, **{**WHOLE, **disk})  # fmt: skip


def test_retained_backup_is_found_by_the_c_function(run: Run) -> None:
    run("""
library = ctypes.CDLL(None)
library.tms_get_cpu_backup_pointer.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
library.tms_get_cpu_backup_pointer.restype = ctypes.c_void_p
address = allocate()
ctypes.memset(address, 5, 3 * MIB)
saver.pause()
saver.resume()
ctypes.memset(address, 6, 3 * MIB)
where = library.tms_get_cpu_backup_pointer(address + MIB, MIB)
assert ctypes.string_at(where, MIB) == bytes([5]) * MIB
""", TMS_RETAIN_CPU_BACKUP="1", **WHOLE)  # fmt: skip


def test_program_without_python_is_not_managed(libraries: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    source.write_text(
        "int call_malloc(void**, unsigned long); int seen_mallocs(void);\n"
        "int main(void) { void* data = 0; return !(call_malloc(&data, 64) == 0 && seen_mallocs() == 1); }\n"
    )
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    folder = Path(libraries["CALLER"]).parent
    linked = [libraries["CALLER"], libraries["RUNTIME"], f"-Wl,-rpath,{folder}"]
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "program"), *linked], check=True)
    done = subprocess.run(
        [str(tmp_path / "program")], env={"LD_PRELOAD": str(LIBRARY), **WHOLE}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "does not run Python, so its memory is not managed" in line


def test_child_that_was_forked_before_an_allocation_is_managed(run: Run) -> None:
    run("""
import os
child = os.fork()
if child == 0:
    address = allocate()
    os._exit(0 if seen() == (0, 0) and address > 0 else 1)
assert os.waitpid(child, 0)[1] == 0
""", saver=False, **WHOLE)  # fmt: skip
