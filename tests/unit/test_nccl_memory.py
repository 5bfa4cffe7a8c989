"""The count of NCCL's memory: a library that takes memory as NCCL does, over a fake driver."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memsaver
from memsaver.guests import ProcessGroups, nccl_memory, process_groups
from tests.fake_cuda import DRIVER, folder, run_on_fake
from tests.support import ROOT

SOURCE = ROOT / "tests" / "fakes" / "fake_nccl_memory.c"
AS_NCCL, TWICE, MISSING, BY_MALLOC, FAILING, LINKED = range(6)

BEGIN = """
import ctypes, os, random
from contextlib import nullcontext
import memsaver
from memsaver import _core, ledger
from tests.fake_cuda import control

MIB, PAGE = 1 << 20, 2 << 20
library = ctypes.CDLL(PATH)
u64 = ctypes.c_uint64

def check(code):
    assert code == 0, code

def made(function, *arguments):
    value = u64()
    check(getattr(library, function)(ctypes.byref(value), *arguments))
    return value.value

def alloc(nbytes):
    return made("fake_alloc", ctypes.c_size_t(nbytes))

def free(address, nbytes):
    return library.fake_free(u64(address), ctypes.c_size_t(nbytes))

def create(nbytes):
    return made("fake_create", ctypes.c_size_t(nbytes))

def map_(handle, nbytes):
    return made("fake_map", u64(handle), ctypes.c_size_t(nbytes))

def unmap(address, nbytes):
    return library.fake_unmap(u64(address), ctypes.c_size_t(nbytes))

def release(handle):
    return library.fake_release(u64(handle))

def counted(device=0):
    return _core.nccl_bytes(device)

def count():
    free(alloc(PAGE), PAGE)  # looks the driver's functions up
    assert _core.count_nccl(PATH) == ""
"""


@functools.cache
def compiled(variant: int) -> str:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = ROOT / "build" / "fake_nccl" / f"{name}-{variant}" / "libnccl.so.2"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{os.getpid()}.so")  # several runs may build it at once
        flags = ["-O1", "-Wall", "-shared", "-fPIC", f"-DVARIANT={variant}"]
        libraries = ["-ldl", "-Wl,-z,relro,-z,now"]
        if variant == LINKED:
            libraries += [f"-L{folder()}", f"-l:{DRIVER[0]}"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(made), *libraries], check=True)
        made.rename(path)
    return str(path)


def run(source: str, variant: int = AS_NCCL, **options: Any) -> None:
    text = f"PATH = {compiled(variant)!r}\n" + BEGIN + textwrap.dedent(source)
    run_on_fake(text, memory="1GiB", **options)


def test_memory_counts_on_its_device_until_it_is_free() -> None:
    run(
        """
        count()
        first = alloc(6 * MIB)
        library.fake_device(1)
        second = alloc(10 * MIB)
        assert counted(0) == (6 * MIB, 0) and counted(1) == (10 * MIB, 0)
        check(free(first, 6 * MIB))
        assert counted(0) == (0, 0) and counted(1) == (10 * MIB, 0)
        check(free(second, 10 * MIB))
        assert counted(1) == (0, 0)
        """,
        devices=2,
    )


def test_memory_is_free_after_its_last_handle_and_its_last_mapping() -> None:
    run("""
    count()
    handle = create(PAGE)
    first, second = map_(handle, PAGE), map_(handle, PAGE)
    check(release(handle))
    check(unmap(first, PAGE))
    assert counted() == (PAGE, 0) and control.used_bytes() == PAGE
    again = made("fake_retain", u64(second))
    assert again != handle  # another number for the same memory
    check(unmap(second, PAGE))
    assert counted() == (PAGE, 0) and control.used_bytes() == PAGE
    check(release(again))
    assert counted() == (0, 0) and control.used_bytes() == 0
    """)


@pytest.mark.parametrize("seed", range(4))
def test_the_count_equals_the_drivers_after_any_calls(seed: int) -> None:
    """Calls that fail change nothing."""
    run(
        f"""
        count()
        choose = random.Random({seed})
        handles, mappings, sizes = [], [], {{}}
        for step in range(600):
            what = choose.choice(["create", "create", "map", "unmap", "retain", "release", "release"])
            fails = choose.random() < 0.1
            if fails:
                names = dict(create="Create", map="Map", unmap="Unmap", retain="RetainAllocationHandle",
                             release="Release")
                control.fail("cuMem" + names[what], 1)
            try:
                if what == "create":
                    library.fake_device(choose.randrange(2))
                    size = choose.randint(1, 3) * PAGE
                    handles.append((create(size), size))
                elif what == "map" and handles:
                    handle, size = choose.choice(handles)
                    mappings.append((map_(handle, size), size))
                elif what == "unmap" and mappings:
                    at = choose.randrange(len(mappings))
                    check(unmap(*mappings[at]))
                    del mappings[at]
                elif what == "retain" and mappings:
                    address, size = choose.choice(mappings)
                    handles.append((made("fake_retain", u64(address)), size))
                elif what == "release" and handles:
                    at = choose.randrange(len(handles))
                    check(release(handles[at][0]))
                    del handles[at]
            except AssertionError:
                assert fails
            for name in ("Create", "Map", "Unmap", "RetainAllocationHandle", "Release"):
                control.fail("cuMem" + name, 1, times=0)
            for device in range(2):
                assert counted(device) == (control.used_bytes(device), 0), (step, what, fails)
        assert len(handles) + len(mappings) > 5
        """,
        devices=2,
    )


def test_memory_of_the_host_and_imported_memory_do_not_count() -> None:
    run("""
    import subprocess, sys
    count()
    on_host = made("fake_create_on_host")
    assert counted() == (0, 0)
    check(release(on_host))
    driver = _core.open_driver("cuda:0")
    theirs = driver.create(PAGE)
    imported = made("fake_import", ctypes.c_size_t(driver.export_fd(theirs)))
    address = map_(imported, PAGE)
    assert counted() == (0, 0)
    check(unmap(address, PAGE))
    check(release(imported))
    assert counted() == (0, 0)
    """)


def test_memory_from_before_does_not_count() -> None:
    run("""
    before = alloc(4 * MIB)
    assert _core.count_nccl(PATH) == ""
    beside = alloc(PAGE)
    assert counted() == (PAGE, 0)
    check(free(before, 4 * MIB))
    assert counted() == (PAGE, 0)
    check(free(beside, PAGE))
    assert counted() == (0, 0) and control.used_bytes() == 0
    """)


def test_memory_for_callers_counts_apart() -> None:
    run("""
    count()
    own = alloc(PAGE)
    given = made("ncclMemAlloc", ctypes.c_size_t(1))
    assert counted() == (PAGE, PAGE)
    check(library.ncclMemFree(u64(given)))
    assert counted() == (PAGE, 0)
    """)


@pytest.mark.parametrize(
    ("variant", "reason"), [(TWICE, "has cuMemMap twice"), (MISSING, "has no cuMemUnmap"), (AS_NCCL, "has no cuMem")]
)
def test_a_library_with_other_pointers_is_left_as_it_is(variant: int, reason: str) -> None:
    """The last one has not looked its pointers up yet."""
    run(
        f"""
        if {variant} != {AS_NCCL}:
            alloc(PAGE)
        names = ("Create", "Release", "Map", "Unmap", "RetainAllocationHandle")
        pointers = [u64.in_dll(library, "pfn_cuMem" + name) for name in names]
        before = [each.value for each in pointers]
        found = _core.count_nccl(PATH)
        assert found.startswith(PATH + {" " + reason!r}), found
        assert [each.value for each in pointers] == before
        alloc(PAGE)
        assert counted() == (0, 0)
        """,
        variant,
    )


def test_pointers_that_the_loader_made_read_only_are_left_out() -> None:
    run(
        """
        linked, own = (u64.in_dll(library, name) for name in ("linked_pointer", "pfn_cuMemMap"))
        free(alloc(PAGE), PAGE)
        assert linked.value == own.value != 0
        count()
        assert linked.value != own.value
        assert free(alloc(PAGE), PAGE) == 0
        """,
        LINKED,
    )


def test_a_library_that_is_not_nccl_is_refused() -> None:
    run("""
    assert _core.count_nccl("libcuda.so.1") == "libcuda.so.1 has no function ncclMemAlloc"
    assert _core.count_nccl("/no/libnccl.so.2") == "/no/libnccl.so.2 is not loaded"
    """)


# The begin of the count

TORCH = """
import torch
from memsaver.guests import nccl, nccl_memory

def begin(groups=True, initialized=True, context=True, capturing=False):
    torch.cuda.is_initialized = lambda: initialized
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: capturing
    torch.cuda.device = lambda index: nullcontext()
    torch._C._cuda_hasPrimaryContext = lambda index: context
    nccl_memory._has_groups = lambda: groups
    return ledger.nccl_memory.begin("cuda:0")

def note():
    [*notes] = memsaver.stats().devices["cuda:0"].ledger.notes
    assert len(notes) < 2
    return "".join(notes)

def kinds():
    return {row.kind: row.bytes for row in memsaver.stats().devices["cuda:0"].ledger.rows}
"""


def test_the_count_begins_when_torch_has_groups_with_nccl() -> None:
    run(
        TORCH
        + """
import torch.distributed
for state in (dict(groups=False), dict(initialized=False), dict(context=False), dict(capturing=True)):
    assert not begin(**state) and ctypes.c_void_p.in_dll(library, "pfn_cuMemCreate").value is None
assert begin() and begin(groups=False)
memsaver.region("kv", device="cuda:0")
address = alloc(6 * MIB)
assert kinds() == {"context": 300 * MIB, "NCCL": 6 * MIB} and note() == ""
given = made("ncclMemAlloc", ctypes.c_size_t(1))
assert kinds() == {"context": 300 * MIB, "NCCL": 6 * MIB, "unknown": PAGE}
with ledger.measured("other", "", "cuda:0") as taken:
    beside = alloc(8 * MIB)
    control.take(0, 5 * MIB)
assert taken.bytes == 5 * MIB
check(free(address, 6 * MIB))
assert kinds() == {"context": 300 * MIB, "NCCL": 8 * MIB, "unknown": PAGE, "other": 5 * MIB}
""",
        context="300MiB",
    )


@pytest.mark.parametrize("first", ["region", "stats"])
def test_a_region_and_an_account_begin_the_count(first: str) -> None:
    run(
        TORCH
        + f"""
import torch.distributed
begin(groups=False)
memsaver.region("kv", device="cuda:0")
nccl_memory._has_groups = lambda: True
if {first!r} == "region":
    memsaver.region("other", device="cuda:0")
else:
    memsaver.stats()
alloc(6 * MIB)
assert kinds()["NCCL"] == 6 * MIB
"""
    )


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        (AS_NCCL, "NCCL was initialised before its memory was counted: that of earlier communicators is in 'unknown'"),
        (TWICE, "not counted, so that it may be in 'unknown': PATH has cuMemMap twice"),
        (BY_MALLOC, "not counted, so that it may be in 'unknown': NCCL takes it by cudaMalloc"),
        (FAILING, "ncclMemAlloc() of PATH failed: error 5, invalid usage"),
    ],
)
def test_a_note_tells_why_memory_of_nccl_may_be_unknown(variant: int, text: str) -> None:
    run(
        TORCH
        + f"""
import torch.distributed
memsaver.region("kv", device="cuda:0")
before = alloc(4 * MIB) if {variant} == {AS_NCCL} else None
assert begin()
assert {text!r}.replace("PATH", PATH) in note(), note()
assert any(note() in line for line in ledger.for_error("cuda:0")[1])
if before:
    alloc(6 * MIB)
    assert kinds()["NCCL"] == 6 * MIB and kinds()["unknown"] == 4 * MIB
""",
        variant,
    )


def test_bytes_of_communicators_count_once() -> None:
    """The guest's row has the bytes that are not in the row NCCL."""
    run(
        TORCH
        + """
class Communicators(memsaver.Guest):
    _is_nccl = True
    nbytes = 4 * MIB

memsaver.region("kv", device="cuda:0")
memsaver.register(Communicators("communicators", "kv"))
control.take(0, 4 * MIB)
assert kinds() == {"guest": 4 * MIB}
count()
alloc(2 * MIB)
assert kinds() == {"NCCL": 2 * MIB, "guest": 2 * MIB, "unknown": 2 * MIB}
alloc(6 * MIB)
assert kinds() == {"NCCL": 8 * MIB, "unknown": 4 * MIB}
"""
    )
    assert memsaver.guests.Communicators._is_nccl and not memsaver.guests.ProcessGroups._is_nccl


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tag: str) -> Iterator[ProcessGroups]:
    guest = ProcessGroups(tag, backends=["gloo"])
    yield guest
    if dist.is_initialized():
        dist.destroy_process_group()
    guest.unwrap()


def test_the_count_begins_before_a_group_is_made_and_before_its_first_use(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no context yet when the group is made."""
    seen: list[tuple[str | None, bool]] = []
    answers = [False, False, True]

    def begin(device: str | None = None) -> bool:
        seen.append((device, dist.is_initialized()))
        return answers.pop(0)

    monkeypatch.setattr(process_groups, "nccl_memory", SimpleNamespace(begin=begin))
    monkeypatch.setattr(process_groups, "_has_nccl", lambda args, options: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert seen[0] == (None, False)
    for _ in range(4):
        dist.all_reduce(torch.ones(1))
    assert len(seen) == 3 and not answers


def test_a_group_that_is_bound_to_a_device_has_a_context_before_the_count_begins(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    bound = torch.device("cuda", 3)

    def create(**options: Any) -> tuple[None, None]:
        seen.append("made")
        return None, None

    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    monkeypatch.setattr(process_groups, "nccl_memory", SimpleNamespace(begin=seen.append))
    monkeypatch.setattr(process_groups, "_has_nccl", lambda args, options: True)
    with monkeypatch.context() as until_here:  # the end of the guest puts torch's function back
        until_here.setattr(groups, "_create", create)
        groups._wrapped(device_id=bound)
    assert seen == [bound, "cuda:3", "made"]


def test_groups_without_nccl_do_not_begin_the_count(groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "nccl_memory", None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    assert not nccl_memory._has_groups()


@pytest.mark.parametrize(("backend", "expected"), [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("gloo", False)])
def test_a_group_with_nccl_is_known_by_its_backends(backend: str, expected: bool) -> None:
    assert process_groups._has_nccl((1, 0, [], backend), {}) is expected
    assert process_groups._has_nccl((), {"backend": backend}) is expected
