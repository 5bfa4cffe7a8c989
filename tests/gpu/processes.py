"""Parts of tests that run in processes of their own: the context dies, or may die, or the device is busy for long.

Such a function raises if a check fails. in_process() runs it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

import memsaver
from tests.gpu.timing import cycles_per_second
from tests.support import GIB, MIB, run_python


def in_process(call: str) -> None:
    """Runs one of the functions below in a process of its own, within two minutes.

    The process prints that all checks hold: its exit status may be an error of torch where its context has died.
    """
    done = run_python(f"from tests.gpu.processes import *; {call}; print('whole', flush=True)")
    assert done.stdout.splitlines()[-1:] == ["whole"], f"status {done.returncode}: {done.stdout}{done.stderr}"
    print(done.stdout)


def raised(act: Callable[[], object], kind: type[BaseException]) -> Any:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was to be raised")


# Bounds


def pause_behind_a_kernel(kernel_s: float, timeout: float) -> None:
    """A pause with a bound raises while the kernel runs and changes nothing; without one it waits for the kernel."""
    region = memsaver.region("work", "cuda:0", "host")
    tensor = region.empty((256 * MIB // 8,), torch.int64).random_()
    tensor.add_(1)  # loads the kernel: CUDA loads lazily, and waits for running kernels then
    expected = tensor.cpu() + 1
    before = region.mapped_bytes, region.allocated_bytes, tensor.data_ptr()
    cycles = int(kernel_s * cycles_per_second())
    ended = torch.cuda.Event()
    torch.cuda._sleep(cycles)
    tensor.add_(1)
    ended.record()

    def check_nothing_changed(what: str) -> None:
        assert not ended.query(), f"{what} raised after the kernel had ended"
        assert (region.state, region.backup_bytes) == ("active", 0), (what, region)
        assert (region.mapped_bytes, region.allocated_bytes, tensor.data_ptr()) == before, what

    error = raised(lambda: memsaver.pause("work", timeout=timeout), memsaver.WaitTimeoutError)
    check_nothing_changed("the pause")
    assert (error.stage, error.waited_s >= timeout) == ("device", True), vars(error)
    print(f"pause(timeout={timeout}) raised after {error.waited_s:.3f} s: {error}")
    error = raised(lambda: memsaver.switch(pause="work", timeout=timeout / 4), memsaver.WaitTimeoutError)
    check_nothing_changed("the switch")
    assert error.stage == "device", vars(error)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C, on this thread
    signal.setitimer(signal.ITIMER_REAL, timeout / 4)
    raised(lambda: memsaver.pause("work"), KeyboardInterrupt)
    check_nothing_changed("the interrupted pause")

    done = memsaver.pause("work")
    assert ended.query(), "the pause did not wait for the kernel"
    assert done.paused == ("work",) and region.mapped_bytes == 0
    assert torch.equal(memsaver.cpu_backup(tensor), expected)
    memsaver.resume("work")
    assert torch.equal(tensor.cpu(), expected)


# A context that has died


def read_after_an_illegal_access(directory: str) -> None:
    """Contents in host memory and on disk are read whole, stats() works, and another device continues."""
    memsaver.configure(disk_dir=directory)
    weights = memsaver.region("weights", "cuda:0", "host")
    stored = memsaver.region("stored", "cuda:0", "disk")
    cache = memsaver.region("cache", "cuda:0")
    in_memory = weights.empty((GIB // 8,), torch.int64).random_()
    on_disk = stored.empty((64 * MIB // 8,), torch.int64).random_()
    unmapped = cache.empty((4 * MIB,), torch.float32)
    kept_in_memory, kept_on_disk = in_memory.cpu(), on_disk.cpu()
    elsewhere = Elsewhere() if torch.cuda.device_count() > 1 else None
    memsaver.pause(["weights", "stored", "cache"])

    unmapped.fill_(1)
    error = raised(torch.cuda.synchronize, RuntimeError)
    assert "illegal memory access" in str(error), error

    def check() -> None:
        assert torch.equal(memsaver.cpu_backup(in_memory), kept_in_memory)
        assert torch.equal(memsaver.cpu_backup(in_memory, clone=True), kept_in_memory)
        assert torch.equal(memsaver.cpu_backup(on_disk, clone=True), kept_on_disk)
        rows = {row["tag"]: row for row in memsaver.stats().asdict()["devices"]["cuda:0"]["regions"]}
        assert rows["weights"]["backup_bytes"] == GIB, rows
        assert rows["stored"]["backup_bytes"] == 64 * MIB, rows
        print({tag: row["state"] for tag, row in rows.items()})

    check()
    refused = raised(lambda: memsaver.resume("weights"), memsaver.Error)
    print(f"resume raised {type(refused).__name__}: {refused}")
    check()
    if elsewhere is not None:
        elsewhere.check()
        check()


class Elsewhere:
    """Regions on cuda:1, one of them paused. Their contents are read in the backup: torch may fail for that device.

    The driver may end the contexts of all devices of the process (580.159 does on H100s). Then the region is lost, and
    backups are readable all the same.
    """

    def __init__(self) -> None:
        self.regions = [memsaver.region(f"elsewhere {number}", "cuda:1", "host") for number in range(2)]
        self.tensors = [region.empty((64 * MIB // 8,), torch.int64).random_() for region in self.regions]
        self.kept = [tensor.cpu() for tensor in self.tensors]
        self.regions[1].pause()

    def check(self) -> None:
        active, _ = self.regions
        try:
            memsaver._core.open_driver("cuda:1").synchronize()
        except memsaver.DriverError:
            error = raised(active.pause, memsaver.DriverError)
            assert active.state == "lost", (active, error)
            print(f"the driver ended the context of cuda:1 too: {error}")
        else:
            for _ in range(2):
                active.pause()
                assert torch.equal(memsaver.cpu_backup(self.tensors[0]), self.kept[0])
                active.resume()
            print("the region on cuda:1 went on")
        assert torch.equal(memsaver.cpu_backup(self.tensors[1]), self.kept[1])


# Several devices


def copies_between_devices(first: int) -> None:
    """Copies and kernels between regions of two devices, which are made in either order, also after transitions."""
    count = 1 << 24
    regions, tensors = {}, {}
    for device in (first, 1 - first):  # the first has its memory before anything uses the second
        regions[device] = memsaver.region("several", f"cuda:{device}", "host")
        tensors[device] = regions[device].empty((count // 1024, 1024), torch.float32)

    def check(when: str) -> None:
        for source, target in ((0, 1), (1, 0)):
            x, y = tensors[source], tensors[target]
            expected = torch.arange(count, dtype=torch.float32).remainder_(1000 + source).view(x.shape)
            x.copy_(expected)
            ways: dict[str, Callable[[], object]] = {
                "as it is": lambda: y.copy_(x),  # noqa: B023
                "from half": lambda: y.copy_(x.half()),  # noqa: B023
                "transposed": lambda: y.view(1024, -1).copy_(x.t()),  # noqa: B023
            }
            if torch.cuda.can_device_access_peer(target, source) and find_spec("triton"):
                ways["by a kernel"] = lambda: read_by_a_kernel(x, y)  # noqa: B023
            for way, copy in ways.items():
                y.fill_(-1)
                copy()
                for device in range(2):
                    torch.cuda.synchronize(device)
                found = y.view(1024, -1).t() if way == "transposed" else y
                assert torch.equal(found.cpu(), expected), f"{when}, cuda:{source} to cuda:{target}, {way}"

    check("at first")
    regions[0].pause()
    regions[0].resume()
    check("after a pause of cuda:0")
    memsaver.pause("several")
    memsaver.resume("several")
    check("after a pause of both")
    for device in range(2):
        tensors[device] = regions[device].empty((count // 1024, 1024), torch.float32)
    check("in chunks that came later")


def read_by_a_kernel(source: torch.Tensor, target: torch.Tensor) -> None:
    """A kernel on the target's device reads the source's memory."""
    from tests.gpu.peer_kernel import read_from

    block = 1024
    with torch.cuda.device(target.device):
        torch.cuda.synchronize(source.device)
        read_from[(source.numel() // block,)](source.data_ptr(), target, BLOCK=block)
