"""The trial of torch's default pool: its library over the fake driver, called as torch calls the driver's functions."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from tests import fake_cuda
from tests.support import ROOT, run_clean

BENCHMARKS = ROOT / "benchmarks"

# Segments as torch's ExpandableSegment makes them, over the entry points that it fetches.
SEGMENTS = """
import ctypes, random, sys, threading
sys.path.insert(0, {benchmarks!r})
from default_pool_trainer import Chunks
from tests.fake_cuda import control
MIB = 1 << 20
u64, size_t, address_of = ctypes.c_uint64, ctypes.c_size_t, ctypes.addressof
runtime = ctypes.CDLL({runtime!r}, mode=ctypes.RTLD_GLOBAL)
chunks = Chunks({library!r})

class Properties(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("where", ctypes.c_int), ("id", ctypes.c_int),
                ("meta", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8)]

def entry(name, *types):
    function = ctypes.c_void_p()
    taken = ctypes.CDLL({library!r}).cudaGetDriverEntryPointByVersion
    assert taken(name.encode(), ctypes.byref(function), 12000, u64(0), None) == 0, name
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(function.value)

create = entry("cuMemCreate", ctypes.POINTER(u64), size_t, ctypes.POINTER(Properties), u64)
release = entry("cuMemRelease", u64)
map_ = entry("cuMemMap", u64, size_t, size_t, u64, u64)
unmap = entry("cuMemUnmap", u64, size_t)
set_access = entry("cuMemSetAccess", u64, size_t, ctypes.c_void_p, size_t)
reserve = entry("cuMemAddressReserve", ctypes.POINTER(u64), size_t, size_t, u64, u64)
address_free = entry("cuMemAddressFree", u64, size_t)
export = entry("cuMemExportToShareableHandle", ctypes.POINTER(ctypes.c_int), u64, ctypes.c_int, u64)
retain = entry("cuMemRetainAllocationHandle", ctypes.POINTER(u64), u64)

OUT_OF_MEMORY = 2

class Segment:
    def __init__(self, piece, most):
        self.piece, self.most, self.handles = piece, most, {{}}
        address = u64()
        assert reserve(address, piece * most, 0, 0, 0) == 0
        self.address = address.value

    def map(self, begin, end):
        made = {{}}
        for i in range(begin, end):
            handle, properties = u64(), Properties(1, 1, 1, 0)
            code = create(handle, self.piece, properties, 0)
            if code != 0:
                for each in made.values():
                    assert release(each) == 0
                return code
            made[i] = handle.value
        self.handles |= made
        for i in range(begin, end):
            assert map_(self.address + i * self.piece, self.piece, 0, self.handles[i], 0) == 0
        access = (ctypes.c_int * 3)(1, 0, 3)
        assert set_access(self.address + begin * self.piece, (end - begin) * self.piece, address_of(access), 1) == 0
        return 0

    def unmap(self, begin, end):
        for i in range(begin, end):
            assert unmap(self.address + i * self.piece, self.piece) == 0
            assert release(self.handles.pop(i)) == 0

    def close(self):
        for i in list(self.handles):
            self.unmap(i, i + 1)
        assert address_free(self.address, self.piece * self.most) == 0

    def write(self, i, byte):
        ctypes.memset(self.address + i * self.piece, byte, self.piece)

    def read(self, i):
        data = ctypes.string_at(self.address + i * self.piece, self.piece)
        assert data == data[:1] * self.piece
        return data[0]
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the trial needs a C compiler")
    folder = tmp_path_factory.mktemp("default_pool")
    made = folder / "libdefault_pool.so", folder / "libcudart.so.13"
    flags = ["-O1", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    sources = BENCHMARKS / "default_pool.c", Path(__file__).with_name("default_pool_runtime.c")
    for source, library in zip(sources, made):
        subprocess.run([compiler, *flags, str(source), "-o", str(library), "-ldl"], check=True)
    return made


def run(libraries: tuple[Path, Path], source: str) -> None:
    library, runtime = map(str, libraries)
    begin = SEGMENTS.format(benchmarks=str(BENCHMARKS), library=library, runtime=runtime)
    run_clean(begin + textwrap.dedent(source), **fake_cuda.environment(), LD_PRELOAD=library)


def test_memory_leaves_and_returns_with_what_was_kept(libraries: tuple[Path, Path]) -> None:
    run(
        libraries,
        """
        small, large = Segment(2 * MIB, 64), Segment(20 * MIB, 64)
        assert small.map(0, 3) == 0 and large.map(0, 4) == 0 and large.map(6, 8) == 0
        for segment in (small, large):
            for i in segment.handles:
                segment.write(i, 10 + i)
        whole = 3 * 2 * MIB + 6 * 20 * MIB
        assert control.used_bytes() == whole == chunks.stats()["mapped_bytes"]
        assert chunks.stats()["chunks_by_mib"] == {"2": 3, "20": 6}
        for number in range(3):
            # A range within chunks 1 and 2 of the large segment, the last byte of 6, and the first of the small one.
            kept = [(large.address + 25 * MIB, 20 * MIB), (large.address + 7 * 20 * MIB - 1, 1), (small.address, 1)]
            report = chunks.pause(kept)
            assert report["bytes"] == whole and report["chunks"] == 9
            assert report["backed_up_bytes"] == 3 * 20 * MIB + 2 * MIB
            assert control.used_bytes() == 0 == control.mapped_bytes()
            assert chunks.stats()["paused_bytes"] == whole
            report = chunks.resume()
            assert report["bytes"] == whole and control.used_bytes() == whole == control.mapped_bytes()
            assert report["backed_up_bytes"] == 3 * 20 * MIB + 2 * MIB
            assert [large.read(i) for i in (1, 2, 6)] == [11, 12, 16] and small.read(0) == 10
            assert large.read(0) != 10 and small.read(1) != 11  # not kept: other memory
            for i in (0, 3, 7):
                large.write(i, 10 + i)
            small.write(1, 11)
        small.close(), large.close()
        assert control.used_bytes() == 0 == control.reserved_bytes()
        """,
    )


def test_torch_may_unmap_what_is_away_and_map_more(libraries: tuple[Path, Path]) -> None:
    run(
        libraries,
        """
        segment = Segment(20 * MIB, 64)
        assert segment.map(0, 6) == 0
        for i in range(6):
            segment.write(i, i + 1)
        chunks.pause([(segment.address, 6 * 20 * MIB)])
        segment.unmap(1, 3)
        assert segment.map(8, 10) == 0
        segment.write(8, 9)
        assert control.used_bytes() == 2 * 20 * MIB
        assert address_free(segment.address, segment.piece * segment.most) != 0
        report = chunks.resume()
        assert report["chunks"] == 4 and control.used_bytes() == 6 * 20 * MIB
        assert [segment.read(i) for i in (0, 3, 4, 5, 8)] == [1, 4, 5, 6, 9]
        assert segment.map(1, 3) == 0
        segment.close()
        assert control.used_bytes() == 0 == control.reserved_bytes()
        """,
    )


def test_addresses_and_handles_of_memory_that_is_away_stay_valid(libraries: tuple[Path, Path]) -> None:
    run(
        libraries,
        """
        segment = Segment(20 * MIB, 64)
        assert segment.map(0, 1) == 0
        segment.write(0, 1)
        chunks.pause([(segment.address, 1)])
        assert address_free(segment.address, segment.piece * segment.most) != 0
        assert unmap(segment.address, segment.piece) == 0  # and the handle is kept
        assert chunks.resume()["chunks"] == 0 == control.used_bytes()
        assert map_(segment.address, segment.piece, 0, segment.handles[0], 0) == 0
        access = (ctypes.c_int * 3)(1, 0, 3)
        assert set_access(segment.address, segment.piece, address_of(access), 1) == 0
        segment.write(0, 2)
        assert chunks.pause([(segment.address, 1)])["chunks"] == 1
        assert chunks.resume()["chunks"] == 1 and segment.read(0) == 2
        old = segment.handles[0]
        segment.unmap(0, 1)
        assert segment.map(0, 1) == 0 and release(old) != 0  # a new chunk in the place of the old one
        assert segment.handles[0] != old and control.used_bytes() == 20 * MIB
        segment.close()
        assert control.used_bytes() == 0 == control.reserved_bytes()
        """,
    )


def test_a_limit_refuses_as_a_full_device_does(libraries: tuple[Path, Path]) -> None:
    run(
        libraries,
        """
        segment = Segment(20 * MIB, 64)
        chunks.limit(100 * MIB)
        assert segment.map(0, 4) == 0 and segment.map(4, 6) == OUT_OF_MEMORY and control.used_bytes() == 80 * MIB
        segment.unmap(0, 2)  # torch's recovery
        assert segment.map(4, 6) == 0 and chunks.stats()["refused_by_limit"] == 1
        chunks.pause([(segment.address, 64 * 20 * MIB)])
        chunks.limit(60 * MIB)
        try:
            chunks.resume()
        except RuntimeError as error:
            assert "error 2" in str(error)
        else:
            raise AssertionError("resumed beyond the limit")
        chunks.limit(0)
        assert chunks.resume()["chunks"] == 4
        segment.close()
        assert control.used_bytes() == 0
        """,
    )


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemcpyDtoHAsync", "cuMemHostRegister", "cuCtxSynchronize", "cuStreamSynchronize"]
)
def test_a_call_that_fails_changes_nothing(libraries: tuple[Path, Path], call: str) -> None:
    run(
        libraries,
        f"""
        segment = Segment(20 * MIB, 64)
        assert segment.map(0, 4) == 0
        for i in range(4):
            segment.write(i, i + 1)
        everything = [(segment.address, 80 * MIB)]
        resumes = {call!r} == "cuMemCreate"
        if resumes:
            chunks.pause(everything)
        control.fail({call!r}, 2, 1, 2 if resumes else 0)
        try:
            chunks.resume() if resumes else chunks.pause(everything)
        except RuntimeError as error:
            assert "error 2" in str(error)
        else:
            raise AssertionError("no error")
        assert control.used_bytes() == (0 if resumes else 80 * MIB)
        if not resumes:
            assert [segment.read(i) for i in range(4)] == [1, 2, 3, 4]
            assert chunks.pause(everything)["chunks"] == 4
        assert chunks.resume()["chunks"] == 4
        assert [segment.read(i) for i in range(4)] == [1, 2, 3, 4]
        segment.close()
        """,
    )


def test_memory_that_another_may_hold_stays(libraries: tuple[Path, Path]) -> None:
    run(
        libraries,
        """
        import os
        segment = Segment(20 * MIB, 64)
        assert segment.map(0, 4) == 0
        for i in range(4):
            segment.write(i, i + 1)
        file, handle = ctypes.c_int(), u64()
        assert export(file, segment.handles[1], 1, 0) == 0
        assert retain(handle, segment.address + 2 * segment.piece) == 0
        report = chunks.pause([])
        assert report["chunks"] == 2 and report["staying_bytes"] == 40 * MIB
        assert [segment.read(i) for i in (1, 2)] == [2, 3]
        chunks.resume()
        assert release(handle.value) == 0  # a handle of the driver's
        os.close(file.value)
        segment.close()
        assert control.used_bytes() == 0
        """,
    )


def test_threads_map_and_unmap_while_memory_leaves_and_returns(libraries: tuple[Path, Path]) -> None:
    run(
        libraries,
        """
        errors = []

        def work(seed):
            try:
                choose, segment = random.Random(seed), Segment(2 * MIB * (1 + seed % 3), 32)
                for _ in range(150):
                    free = [i for i in range(32) if i not in segment.handles]
                    if choose.random() < 0.5 and free:
                        assert segment.map(free[0], free[0] + 1) == 0
                    elif segment.handles:
                        i = choose.choice(list(segment.handles))
                        segment.unmap(i, i + 1)
                segment.close()
            except BaseException as error:
                errors.append(error)

        still = Segment(20 * MIB, 4)
        assert still.map(0, 3) == 0
        for i in range(3):
            still.write(i, i + 1)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads):
            chunks.pause([(still.address, 60 * MIB)])
            chunks.resume()
        for each in threads:
            each.join()
        assert not errors, errors
        assert [still.read(i) for i in range(3)] == [1, 2, 3]
        still.close()
        assert control.used_bytes() == 0 == control.reserved_bytes()
        """,
    )


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("default_pool_trainer")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_trainers_of_one_seed_have_the_same_losses(trainer: ModuleType) -> None:
    shape = trainer.Shape(width=32, layers=2, heads=2, words=64, longest=16)
    one, other = trainer.Trainer(shape, "cpu"), trainer.Trainer(shape, "cpu")
    losses = one.steps(batch=2, count=4)
    assert losses == other.steps(batch=2, count=4) and len(set(losses)) == 4
    one.reset()
    assert one.steps(batch=2, count=4) == losses
