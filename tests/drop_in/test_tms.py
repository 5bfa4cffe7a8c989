"""torch_memory_saver's API over regions, on the host driver. The hook mode is "torch"."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import drop_in, regions
from memsaver.drop_in import DropInError, tms
from memsaver.drop_in.tms.saver import TorchMemorySaver
from tests.support import MIB

COUNT = 3 * MIB // 4  # floats in 3 MiB


@pytest.fixture
def saver() -> Iterator[TorchMemorySaver]:
    saver = TorchMemorySaver()
    saver.hook_mode = "torch"  # type: ignore[method-assign, assignment]
    yield saver
    for region in regions.all_regions():
        if region.tag.startswith("tms."):
            region.resume()
            region.close()


def full(saver: TorchMemorySaver, tag: str, value: float = 1.0, **options: Any) -> torch.Tensor:
    with saver.region(tag, **options):
        return torch.full((COUNT,), value)


def is_mapped(tensor: torch.Tensor) -> bool:
    region = regions.owning(tensor.data_ptr())
    assert region is not None
    return region.mapped_bytes > 0


@pytest.mark.parametrize("options", [{"enable_cpu_backup": True}, {"enable_disk_backup": True}, {}], ids=str)
def test_contents_survive_as_the_policy_says(saver: TorchMemorySaver, options: Any, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    tensor = full(saver, "weights", 3.0, **options)
    where = tensor.data_ptr()
    saver.pause("weights")
    assert not is_mapped(tensor)
    if not options:
        with pytest.raises(memsaver.BackupError):
            saver.get_cpu_backup(tensor)
    else:
        assert (saver.get_cpu_backup(tensor) is None) == ("enable_disk_backup" in options)
    with memsaver.region("other"):
        other = torch.full((COUNT,), 7.0)  # in the released memory
    saver.resume("weights")
    assert tensor.data_ptr() == where
    assert bool((tensor == (3 if options else 0)).all()) and bool((other == 7).all())


def test_pause_and_resume_of_one_tag_leave_others(saver: TorchMemorySaver) -> None:
    cache, weights = full(saver, "kv_cache"), full(saver, "weights", enable_cpu_backup=True)
    saver.pause("kv_cache")
    assert not is_mapped(cache) and bool((weights == 1).all())
    saver.pause()
    assert not is_mapped(weights)
    saver.resume("weights")
    assert not is_mapped(cache) and bool((weights == 1).all())
    saver.resume("")
    cache.fill_(2)


def test_calls_without_effect_are_no_ops(saver: TorchMemorySaver) -> None:
    saver.pause("nobody made this")
    saver.resume("nobody made this")
    weights = full(saver, "weights", enable_cpu_backup=True)
    saver.resume()
    for _ in range(2):
        saver.pause()
    for _ in range(2):
        saver.resume()
    assert bool((weights == 1).all())


def test_allocation_under_a_paused_tag_is_active(saver: TorchMemorySaver) -> None:
    first = full(saver, "weights", enable_cpu_backup=True)
    saver.pause("weights")
    second = full(saver, "weights", 2.0, enable_cpu_backup=True)
    assert bool((second == 2).all())
    saver.resume("weights")
    saver.pause("weights")
    assert not is_mapped(first) and not is_mapped(second)
    saver.resume("weights")
    assert bool((first == 1).all()) and bool((second == 2).all())


def test_one_tag_has_several_policies(saver: TorchMemorySaver) -> None:
    with saver.region("cuda_graph", enable_cpu_backup=True):
        kept, scratch = torch.ones(COUNT), full(saver, "cuda_graph")
        after = torch.full((COUNT,), 2.0)  # the outer region applies again
    saver.pause("cuda_graph")
    assert not is_mapped(scratch) and saver.get_cpu_backup(after) is not None
    saver.resume("cuda_graph")
    assert bool((kept == 1).all()) and bool((after == 2).all()) and not scratch.any()


def test_cpu_backup_is_a_view_or_a_copy(saver: TorchMemorySaver) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.arange(COUNT, dtype=torch.float32)
    assert saver.get_cpu_backup(weights) is None  # active
    assert saver.get_cpu_backup(torch.ones(4)) is None  # in no region
    saver.pause()
    copy, view = saver.get_cpu_backup(weights), saver.get_cpu_backup(weights, zero_copy=True)
    assert copy is not None and view is not None
    assert torch.equal(copy, view) and bool((copy == torch.arange(COUNT)).all())
    view[0] = 9
    assert copy[0] == 0
    with pytest.raises(AssertionError, match="expected a contiguous tensor"):
        saver.get_cpu_backup(weights[::2])
    del view
    saver.resume()
    assert weights[0] == 9


def test_directory_of_backups_is_made_and_comes_before_the_variable(
    saver: TorchMemorySaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path / "variable"))
    saver.set_disk_backup_dir(tmp_path / "call")
    assert memsaver.config.options()["disk_dir"] == str(tmp_path / "call")
    assert (tmp_path / "variable").is_dir()


@pytest.mark.parametrize("paused", [False, True])
def test_disable_allocates_outside_of_regions(saver: TorchMemorySaver, paused: bool) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.ones(COUNT)
        if not paused:
            with saver.disable():
                outside = torch.full((COUNT,), 5.0)
    saver.pause()
    if paused:
        with saver.disable():
            outside = torch.full((COUNT,), 5.0)
    assert regions.owning(outside.data_ptr()) is None and bool((outside == 5).all())
    saver.resume()
    assert bool((weights == 1).all())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tag": 3}, TypeError, "tag is 3, expected a string"),
        ({"enable_cpu_backup": True, "enable_disk_backup": True}, AssertionError, "are both set"),
        ({"cpu_backup_backend": "pinned"}, ValueError, "'pinned' requires enable_cpu_backup"),
        ({"enable_cpu_backup": True, "cpu_backup_backend": "shm"}, ValueError, "cpu_backup_backend is 'shm', expected"),
    ],
)
def test_wrong_options_of_a_region_are_named(
    saver: TorchMemorySaver, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text), saver.region(**options):
        pass


def test_settings_that_the_original_refuses_are_refused(saver: TorchMemorySaver) -> None:
    with pytest.raises(ValueError, match="hook_mode is 'vmm', expected one of 'preload', 'torch'"):
        saver.hook_mode = "vmm"  # type: ignore[method-assign, assignment]
    with pytest.raises(AttributeError):
        _ = saver.hook_mode
    with pytest.raises(NotImplementedError):
        _ = saver.memory_margin_bytes
    saver.pause()  # the first use
    with pytest.raises(AttributeError, match="set it before the first use"):
        saver.hook_mode = "torch"  # type: ignore[method-assign, assignment]
    with pytest.raises(AssertionError, match="pausable CUDA graphs need hook_mode = 'preload'"):
        with saver.cuda_graph(None):  # type: ignore[arg-type]
            pass
    with pytest.raises(TypeError, match="tag is 3, expected a string or None"):
        saver.pause(3)  # type: ignore[arg-type]
    for value in (-1, 1.5, True, "1GiB"):
        with pytest.raises(ValueError, match=f"memory_margin_bytes is {value!r}, expected a number of bytes"):
            saver.memory_margin_bytes = value  # type: ignore[assignment]
    with pytest.raises(DropInError, match="memory_margin_bytes needs the hook mode 'preload'"):
        saver.memory_margin_bytes = 1
    with pytest.raises(TypeError, match="retain_cpu_backup is 1, expected True or False"):
        saver.retain_cpu_backup = 1  # type: ignore[assignment]
    assert saver.enabled


def test_hook_mode_preload_without_the_library_is_refused() -> None:
    text = "needs memsaver's library in LD_PRELOAD, which is '': start the process within .*configure_subprocess"
    with pytest.raises(DropInError, match=text), TorchMemorySaver().region("weights"):
        pass


# The unpickler of SGLang 0.5.17, in short.
SGLANG = """
import pickle
class SafeUnpickler(pickle.Unpickler):
    ALLOWED_MODULE_PREFIXES = {"builtins.", "copyreg.", "torch."}
    def find_class(self, module, name):
        if any((module + ".").startswith(prefix) for prefix in self.ALLOWED_MODULE_PREFIXES):
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
"""


def test_unpickler_of_sglang_takes_handles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    common = types.ModuleType(tms.SGLANG)
    exec(SGLANG, common.__dict__)
    monkeypatch.setitem(sys.modules, tms.SGLANG, common)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    memsaver.configure(patches="multiprocessing")
    tensor = memsaver.region("sglang", device="cpu", backup="host").empty((4,)).fill_(2)
    sent = bytes(ForkingPickler.dumps({"weight": tensor}))
    with pytest.raises(RuntimeError, match="Blocked unsafe class loading .memsaver"):
        common.SafeUnpickler(io.BytesIO(sent)).load()
    monkeypatch.setenv("MEMSAVER_DROP_IN", "tms")
    monkeypatch.setattr(drop_in, "_states", {})
    drop_in.install("tms")
    assert common.SafeUnpickler(io.BytesIO(sent)).load()["weight"].data_ptr() == tensor.data_ptr()
    with pytest.raises(RuntimeError, match="Blocked unsafe class loading .memsaver.errors"):
        common.SafeUnpickler(io.BytesIO(pickle.dumps(memsaver.Error("text")))).load()
    del common.SafeUnpickler  # a version without the list
    drop_in._states.clear()
    drop_in.install("tms")
