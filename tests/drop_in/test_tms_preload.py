"""The library that routes cudaMalloc to regions, over a CUDA runtime that is made up, on the host driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memsaver.drop_in.startup import LIBRARIES, PRELOAD, python_path
from tests.support import ROOT, environment, fresh_device, run_program, run_python

SOURCE = Path(__file__).with_name("cuda_runtime.c")
COMMON = """
import ctypes, os, sys, threading
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

def tag(address):
    return getattr(regions.owning(address), "tag", None)

def holds(address, value, nbytes=3 * MIB):
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes

class Tensor:
    "As torch has it for memory of a device."
    def __init__(self, address): self.data_ptr = lambda: address
    def is_contiguous(self): return True
    def numel(self): return 3 * MIB
    def element_size(self): return 1
    shape, dtype = (3 * MIB,), property(lambda self: sys.modules["torch"].uint8)
"""
SAVER = """
from torch_memory_saver import torch_memory_saver as saver
from memsaver import regions
"""
# A process with the library and torch, which forks one for each program. It makes no call of the library itself, so a
# fork begins like a new process.
NURSE = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    program, variables = json.loads(line)
    child = os.fork()
    if child == 0:
        for name, value in variables.items():
            os.environ[name] = value
            if not value:
                del os.environ[name]
        status = 0
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
WHOLE = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
DEFAULT = {"MEMSAVER_HOST_DEVICE": ""}  # for a device that is in use before Python reads the variable
Run = Callable[..., str]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the CUDA runtime that is made up needs a C compiler")
    folder = tmp_path_factory.mktemp("runtime")
    made = {"RUNTIME": folder / "libcudart.so.13", "CALLER": folder / "libcaller.so", "PROGRAM": folder / "program"}
    command = [compiler, str(SOURCE), f"-Wl,-rpath,{folder}", "-o"]
    subprocess.run([*command, str(made["RUNTIME"]), "-shared", "-fPIC"], check=True)
    linked = [str(made["RUNTIME"]), "-Wl,--no-as-needed"]
    subprocess.run([*command, str(made["CALLER"]), "-shared", "-fPIC", "-DCALLER", *linked], check=True)
    subprocess.run([*command, str(made["PROGRAM"]), "-DPROGRAM", *linked], check=True)
    return {name: str(path) for name, path in made.items()}


@pytest.fixture(scope="module")
def common(libraries: dict[str, str]) -> str:
    return "".join(f"{name} = {path!r}\n" for name, path in libraries.items()) + COMMON


@pytest.fixture(scope="module")
def nurse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, dict[str, str]], str]]:
    """Runs a program in a fork of a process with the library. Returns what it wrote to stderr."""
    settings = environment(LD_PRELOAD=str(PRELOAD), MEMSAVER_DROP_IN="tms", PYTHONPATH=python_path(str(ROOT)))
    said = tmp_path_factory.mktemp("nurse") / "stderr"
    with (
        said.open("a") as errors,
        subprocess.Popen(
            [sys.executable, "-c", NURSE],
            env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None and process.stdout is not None

        def run(program: str, variables: dict[str, str]) -> str:
            began = said.stat().st_size
            print(json.dumps([program, variables]), file=process.stdin, flush=True)
            status = process.stdout.readline().strip()  # type: ignore[union-attr]
            text = said.read_text()[began:]
            assert status == "0", text
            return text

        yield run
        process.stdin.close()


@pytest.fixture
def run(nurse: Callable[[str, dict[str, str]], str], common: str) -> Run:
    def run(program: str, saver: bool = True, **variables: str) -> str:
        text = common + (SAVER if saver else "") + textwrap.dedent(program)
        return nurse(text, {"MEMSAVER_HOST_DEVICE": fresh_device(), **variables})

    return run


def test_calls_pass_through_until_a_region_is_entered(run: Run) -> None:
    run("""
        address = allocate()
        assert seen() == (1, 0)
        release(address)
        assert seen() == (1, 1)
        release(None)
        assert seen() == (1, 2)
        assert "memsaver" not in sys.modules
        """, saver=False)  # fmt: skip


def test_allocations_of_the_thread_are_in_the_region(run: Run) -> None:
    run("""
        found = []
        with saver.region("weights", enable_cpu_backup=True):
            first = allocate()
            with saver.disable():
                outside = allocate()
            thread = threading.Thread(target=lambda: found.append(allocate()))
            thread.start(); thread.join()
            with saver.region("kv_cache"):
                cache = allocate()
            library = saver._impl._binary_wrapper.cdll  # callers suspend a region by it
            library.tms_set_interesting_region(False)
            found.append(allocate())
            with saver.region("kv_cache"):
                second = allocate()
            assert not library.tms_get_interesting_region()
            library.tms_set_interesting_region(True)
            third = allocate()
        assert not library.tms_get_interesting_region()
        inside, others = (first, cache, second, third), (outside, *found, allocate())
        assert [tag(each) for each in inside] == ["tms.weights", "tms.kv_cache", "tms.kv_cache", "tms.weights"]
        assert not any(map(tag, others)) and seen() == (4, 0)
        for address in (*inside, *others):
            release(address)
        assert seen() == (4, 4)
        assert all(each.allocated_bytes == 0 for each in regions.all_regions())
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
        assert holds(address, 7) and holds(later, 8)
        saver.pause()
        release(address)  # while it is paused
        saver.resume()
        assert holds(later, 8) and seen() == (0, 0)
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


def test_allocator_without_cuda_malloc_is_refused(run: Run) -> None:
    run("""
        import torch
        from memsaver.drop_in import DropInError
        def refused(text):
            try:
                with saver.region("weights"):
                    raise AssertionError("entered")
            except DropInError as error:
                assert text in str(error), error
        saver.pause()
        for name, value in ("CUDA_ALLOC_CONF", "expandable_segments:True"), ("ALLOC_CONF", "backend:cudaMallocAsync"):
            os.environ[f"PYTORCH_{name}"] = value
            refused(f"PYTORCH_{name} is {value!r}")
            del os.environ[f"PYTORCH_{name}"]
        torch._C._accelerator_getAllocatorSettings = lambda: "expandable_segments:True"  # as by default_pool()
        refused("torch's allocator settings is 'expandable_segments:True'")
        torch._C._accelerator_getAllocatorSettings = lambda: ""
        with saver.region("weights"):
            pass
        """)  # fmt: skip


def test_child_started_with_configure_subprocess_loads_the_library(run: Run) -> None:
    run("""
        import subprocess
        from torch_memory_saver import configure_subprocess
        import torch_memory_saver.utils as utils
        child = [sys.executable, "-c", "import ctypes; print(hasattr(ctypes.CDLL(None), 'memsaver_preload_calls'))"]
        assert subprocess.check_output(child) == b"False\\n"
        with configure_subprocess():
            assert subprocess.check_output(child) == b"True\\n"
        name = utils.get_binary_path_from_package("torch_memory_saver_hook_mode_preload").name
        assert name == "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
        """, saver=False, LD_PRELOAD="")  # fmt: skip


def test_call_without_a_runtime_is_an_error_with_one_line() -> None:
    program = "import ctypes; print(ctypes.CDLL(None).cudaFree(ctypes.c_void_p(8)))"
    done = run_python(program, LD_PRELOAD=str(PRELOAD))
    assert done.stdout.strip() == "999", done.stderr
    assert done.stderr.splitlines() == ["memsaver: cudaFree was called, and no CUDA runtime library is loaded"]


def test_library_needs_libc_alone() -> None:
    needed = subprocess.run(["ldd", str(PRELOAD)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].partition(".so")[0] for line in needed.splitlines()}
    assert {Path(name).name for name in names} <= {"linux-vdso", "libc", "libdl", "libpthread", "ld-linux-x86-64"}, (
        needed
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TMS_RETAIN_CPU_BACKUP", "maybe"),
        ("TMS_INIT_CPU_BACKUP_BACKEND", "paper"),
        ("TMS_INIT_ENABLE_DISK_BACKUP", "1"),
    ],
)
def test_wrong_variable_is_an_error_that_names_it(run: Run, name: str, value: str) -> None:
    said = run(f"""
        assert allocate() == allocate() == -1 and seen() == (0, 0)
        from memsaver.drop_in import DropInError
        try:
            from torch_memory_saver import torch_memory_saver as saver
        except DropInError as error:
            assert {name!r} in str(error) and "expected" in str(error)
        else:
            raise AssertionError("accepted")
        """, saver=False, **{**WHOLE, name: value})  # fmt: skip
    (line,) = said.splitlines()
    assert line.startswith(f"memsaver: {name} is '{value}', expected")


# Whole processes


def test_whole_process_is_managed_from_the_first_allocation(run: Run) -> None:
    run("""
    address = allocate()
    assert "memsaver" not in sys.modules and seen() == (0, 0)
    in_thread = []
    thread = threading.Thread(target=lambda: in_thread.append(allocate()))
    thread.start(); thread.join()
    ctypes.memset(address, 7, 3 * MIB)
    child = os.fork()  # its calls pass through: the regions are the parent's
    if child == 0:
        release(allocate())
        os._exit(0 if seen() == (1, 1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    from torch_memory_saver import torch_memory_saver as saver
    from memsaver import regions
    (default,) = regions.all_regions()
    assert (default.tag, default.backup) == ("tms.default", "host")
    assert default.owns(address) and default.owns(in_thread[0])
    for _ in range(3):
        saver.pause()
        assert default.mapped_bytes == 0
        later = allocate()  # while it is paused
        assert tag(later) == "tms.default.2"
        saver.resume()
        assert holds(address, 7)
        release(later)
        again = allocate()
        assert tag(again) == "tms.default"
        release(again)
    assert len(regions.all_regions()) == 2
    release(address)
    assert seen() == (0, 0)
    """, saver=False, **WHOLE, **DEFAULT)  # fmt: skip


def test_regions_nest_in_a_whole_process(run: Run) -> None:
    run("""
    saver._ensure_initialized()
    library = saver._impl._binary_wrapper.cdll
    def state():
        return (library.tms_get_interesting_region(), library.tms_get_current_tag(),
                library.tms_get_enable_cpu_backup(), library.tms_get_enable_disk_backup(),
                library.tms_get_cpu_backup_backend())
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
    assert [tag(each) for each in (grads, outside, allocate())] == ["tms.grads", None, "tms.default"]
    saver.pause("grads")
    assert seen() == (1, 0)
    release(outside)
    assert seen() == (1, 1)
    saver.resume("grads")
    """, **WHOLE)  # fmt: skip


def test_c_functions_pause_and_resume(run: Run) -> None:
    said = run("""
    library = ctypes.CDLL(None)
    library.tms_pause.argtypes = library.tms_resume.argtypes = [ctypes.c_char_p]
    address = allocate()
    ctypes.memset(address, 5, 3 * MIB)
    assert library.tms_pause(None) != 0
    from torch_memory_saver import torch_memory_saver as saver
    from memsaver import regions
    assert library.tms_pause(b"nobody made this") == 0
    assert library.tms_pause(None) == 0
    assert regions.owning(address).state == "paused"
    assert library.tms_resume(b"default") == 0
    assert holds(address, 5)
    assert not library.tms_get_retain_cpu_backup()
    library.tms_set_retain_cpu_backup(True)
    assert saver.retain_cpu_backup is True
    """, saver=False, **WHOLE, **DEFAULT)  # fmt: skip
    assert said == "memsaver: tms_pause was called before Python imported torch_memory_saver or torch\n"


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_retained_backups_outlive_a_resume_at_one_place(run: Run, lazy: str) -> None:
    run("""
    assert saver.retain_cpu_backup is True  # by the variable
    address = allocate()
    places = set()
    for value in range(1, 4):
        ctypes.memset(address, value, 3 * MIB)
        saver.pause()
        saver.resume()
        ctypes.memset(address, 99, 3 * MIB)
        found = saver.get_cpu_backup(Tensor(address), zero_copy=True)
        assert bool((found == value).all())
        assert saver.get_cpu_backup(Tensor(address)).data_ptr() != found.data_ptr()
        places.add(found.data_ptr())
        del found
    assert len(places) == 1
    saver.retain_cpu_backup = False
    saver.pause()
    saver.resume()
    assert saver.get_cpu_backup(Tensor(address)) is None
    """, TMS_RETAIN_CPU_BACKUP="yes", MEMSAVER_LAZY=lazy, **WHOLE)  # fmt: skip


def test_host_memory_of_the_kind_mmap_returns_after_a_resume(run: Run) -> None:
    run("""
    from memsaver import stats
    address = allocate()
    saver.pause()
    assert stats().devices["cpu"].host_held_bytes >= 3 * MIB
    saver.resume()
    assert stats().devices["cpu"].host_held_bytes == 0
    """, TMS_INIT_CPU_BACKUP_BACKEND="mmap", **WHOLE)  # fmt: skip


def test_two_copies_of_the_library_are_one(common: str, tmp_path: Path) -> None:
    """The file for another version of CUDA serves as well, and a folder may be named like one."""
    package = LIBRARIES.parents[2]
    (tmp_path / "torch_cu128[dev]").symlink_to(package)
    other = PRELOAD.with_name("torch_memory_saver_hook_mode_preload_cu12.abi3.so").relative_to(package)
    program = """
inside = allocate()
ctypes.CDLL(None).tms_set_interesting_region(False)
outside = allocate()
assert seen() == (1, 0), seen()
release(inside); release(outside)
assert seen() == (1, 1)
"""
    both = f"{tmp_path / 'torch_cu128[dev]' / other}:{PRELOAD}"
    done = run_python(common + program, LD_PRELOAD=both, **WHOLE)
    assert (done.returncode, done.stderr) == (0, "")


def test_whole_process_joins_the_shared_pool_at_its_first_pause(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket is short
        pool = {"MEMSAVER_POOL": "shared", "MEMSAVER_POOL_DIR": folder, "MEMSAVER_HOST_DEVICE": "64MiB"}
        run("""
    import subprocess
    import memsaver
    from memsaver import _core
    memsaver.configure(host_device="64MiB")  # before the device is in use
    address = allocate()
    ctypes.memset(address, 7, 3 * MIB)
    try:
        saver.pause()
        assert _core.in_pool("cpu")
        saver.resume()
        assert holds(address, 7)
    finally:
        stop = [sys.executable, "-m", "memsaver", "broker", "--stop"]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL)
    """, **{**WHOLE, **pool})  # fmt: skip


def test_error_leaves_no_region_aside(run: Run) -> None:
    run("""
    from memsaver import Error, _core, transitions
    address = allocate()
    _core.capture_begins()
    try:
        saver.pause()
    except Error as error:
        assert "captured" in str(error)
    else:
        raise AssertionError("paused")
    _core.capture_ends()
    assert regions.owning(address).state == "active" and tag(allocate()) == "tms.default"
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
    assert regions.owning(address).state == "active" and tag(allocate()) == "tms.default"
    """, **WHOLE)  # fmt: skip


def test_directory_for_backups_on_disk_is_that_of_memsaver(run: Run, tmp_path: Path) -> None:
    disk = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1"}
    directory = "from memsaver import config; directory = config.options()['disk_dir']; "
    run(f"{directory}assert directory == {str(tmp_path)!r}, directory", **disk, MEMSAVER_DISK_DIR=str(tmp_path))
    run(f"{directory}assert directory == '/tmp', directory", **disk)


def test_program_without_python_is_not_managed(libraries: dict[str, str]) -> None:
    settings = {"LD_PRELOAD": str(PRELOAD), **WHOLE}
    done = run_program([libraries["PROGRAM"]], env=settings)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "does not run Python, so its memory is not managed" in line
