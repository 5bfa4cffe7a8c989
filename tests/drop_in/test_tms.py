"""torch_memory_saver's API over regions, on the host driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import regions
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.startup import python_path
from memsaver.drop_in.tms.saver import TorchMemorySaver
from tests.drop_in.fake_vllm import before
from tests.support import MIB, run_python

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


def mapped(saver: TorchMemorySaver, tag: str) -> int:
    assert saver._impl is not None
    return sum(each.mapped_bytes for each in saver._impl.regions.of(tag))


@pytest.mark.parametrize("options", [{"enable_cpu_backup": True}, {"enable_disk_backup": True}, {}], ids=str)
def test_contents_survive_as_the_policy_says(saver: TorchMemorySaver, options: Any, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    with saver.region("weights", **options):
        tensor = torch.full((COUNT,), 3.0)
    where = tensor.data_ptr()
    saver.pause("weights")
    assert mapped(saver, "weights") == 0
    with memsaver.region("other"):
        other = torch.full((COUNT,), 7.0)  # in the released memory
    saver.resume("weights")
    assert tensor.data_ptr() == where
    if options:
        assert bool((tensor == 3).all())
    else:
        tensor.fill_(4)
    assert bool((other == 7).all())


def test_pause_and_resume_of_one_tag_leave_others(saver: TorchMemorySaver) -> None:
    with saver.region("kv_cache"):
        cache = torch.ones(COUNT)
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.ones(COUNT)
    saver.pause("kv_cache")
    assert mapped(saver, "kv_cache") == 0 and bool((weights == 1).all())
    saver.pause()
    assert mapped(saver, "weights") == 0
    saver.resume("weights")
    assert mapped(saver, "kv_cache") == 0 and bool((weights == 1).all())
    saver.resume("")
    assert mapped(saver, "kv_cache") > 0
    cache.fill_(2)


def test_calls_without_effect_are_no_ops(saver: TorchMemorySaver) -> None:
    saver.pause("nobody made this")
    saver.resume("nobody made this")
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.ones(COUNT)
    saver.resume()
    for _ in range(2):
        saver.pause()
    for _ in range(2):
        saver.resume()
    assert bool((weights == 1).all())


def test_allocation_under_a_paused_tag_is_active(saver: TorchMemorySaver) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        first = torch.ones(COUNT)
    saver.pause("weights")
    with saver.region("weights", enable_cpu_backup=True):
        second = torch.full((COUNT,), 2.0)
    assert bool((second == 2).all())
    saver.resume("weights")
    saver.pause("weights")
    assert mapped(saver, "weights") == 0
    saver.resume("weights")
    assert bool((first == 1).all()) and bool((second == 2).all())


def test_one_tag_has_several_policies(saver: TorchMemorySaver) -> None:
    with saver.region("cuda_graph", enable_cpu_backup=True):
        kept = torch.ones(COUNT)
        with saver.region("cuda_graph"):
            scratch = torch.ones(COUNT)
        after = torch.full((COUNT,), 2.0)
    saver.pause("cuda_graph")
    assert mapped(saver, "cuda_graph") == 0
    assert saver.get_cpu_backup(after) is not None  # the outer region applied again
    with pytest.raises(memsaver.BackupError):
        saver.get_cpu_backup(scratch)
    saver.resume("cuda_graph")
    assert bool((kept == 1).all()) and bool((after == 2).all())


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


def test_cpu_backup_on_disk_is_none(saver: TorchMemorySaver, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    with saver.region("weights", enable_disk_backup=True):
        weights = torch.ones(COUNT)
    saver.pause()
    assert saver.get_cpu_backup(weights) is None
    saver.resume()
    assert bool((weights == 1).all())


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
    if paused:
        saver.pause()
        with saver.disable():
            outside = torch.full((COUNT,), 5.0)
    assert regions.owning(outside.data_ptr()) is None
    saver.pause()
    assert bool((outside == 5).all())
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
    assert saver.enabled


def test_hook_mode_preload_without_the_library_is_refused() -> None:
    text = "needs memsaver's library in LD_PRELOAD, which is '': start the process within .*configure_subprocess"
    with pytest.raises(DropInError, match=text), TorchMemorySaver().region("weights"):
        pass


@pytest.mark.parametrize("value", [-1, 1.5, True, "1GiB"])
def test_margin_that_is_no_number_of_bytes_is_named(saver: TorchMemorySaver, value: Any) -> None:
    with pytest.raises(ValueError, match=f"memory_margin_bytes is {value!r}, expected a number of bytes"):
        saver.memory_margin_bytes = value


def test_margin_needs_the_hook_mode_preload(saver: TorchMemorySaver) -> None:
    with pytest.raises(DropInError, match="memory_margin_bytes needs the hook mode 'preload'"):
        saver.memory_margin_bytes = 1


class TestImport:
    """In new processes: the folder of ``memsaver drop-in path`` is in PYTHONPATH."""

    @pytest.fixture
    def original(self, tmp_path: Path) -> str:
        """PYTHONPATH with a package that stands for the original."""
        package = tmp_path / "torch_memory_saver"
        package.mkdir()
        package.joinpath("__init__.py").write_text("kind = 'original'\n")
        return python_path(before(tmp_path))

    def test_variable_puts_the_package_in_place_of_the_original(self, original: str) -> None:
        program = """
import torch_memory_saver, torch_memory_saver.utils
from torch_memory_saver import torch_memory_saver as saver, configure_subprocess
from memsaver import drop_in
with configure_subprocess(), torch_memory_saver.utils.change_env("ANY", "1"):
    pass
print(hasattr(torch_memory_saver, "kind"), type(saver).__mro__[1].__module__, drop_in.status()["tms"].state)
"""
        done = run_python(program, MEMSAVER_DROP_IN="tms", PYTHONPATH=original)
        assert done.stdout.split() == ["False", "memsaver.drop_in.tms.saver", "active"], done.stderr

    @pytest.mark.parametrize("value", ["", "vllm"])
    def test_without_the_variable_the_original_is_imported(self, original: str, value: str) -> None:
        program = "import sys, torch_memory_saver; print(torch_memory_saver.kind, 'memsaver' in sys.modules)"
        done = run_python(program, MEMSAVER_DROP_IN=value, PYTHONPATH=original)
        assert done.stdout.split() == ["original", "False"], done.stderr

    def test_look_up_of_the_package_before_its_import_changes_nothing(self, original: str) -> None:
        program = """
import importlib.util
assert importlib.util.find_spec("torch_memory_saver") is not None
import torch_memory_saver
from memsaver import drop_in
print(hasattr(torch_memory_saver, "kind"), drop_in.status()["tms"].state)
"""
        done = run_python(program, MEMSAVER_DROP_IN="tms", PYTHONPATH=original)
        assert done.stdout.split() == ["False", "active"], done.stderr

    def test_nothing_is_imported_before_the_package(self) -> None:
        program = "import sys; print([name for name in sys.modules if name in ('memsaver', 'torch')])"
        done = run_python(program, MEMSAVER_DROP_IN="tms", PYTHONPATH=python_path())
        assert done.stdout.strip() == "[]", done.stderr

    @pytest.mark.parametrize("value", ["tms,vlm", "TMS", "vllm,tsm"])
    def test_wrong_variable_fails_the_import(self, original: str, value: str) -> None:
        done = run_python("import torch_memory_saver", MEMSAVER_DROP_IN=value, PYTHONPATH=original)
        assert done.returncode != 0 and f"drop_in is '{value}', expected names of 'vllm', 'tms'" in done.stderr

    def test_original_that_is_imported_already_is_refused(self, original: str) -> None:
        program = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "memsaver_drop_in"]
import torch_memory_saver
from memsaver import drop_in
drop_in.install("tms")
"""
        done = run_python(program, MEMSAVER_DROP_IN="tms", PYTHONPATH=original)
        assert done.returncode != 0 and "is imported already: set MEMSAVER_DROP_IN before Python starts" in done.stderr
        done = run_python(program + "print(torch_memory_saver.kind)", MEMSAVER_DROP_IN="tms:warn", PYTHONPATH=original)
        assert done.stdout.strip() == "original" and "stepped aside" in done.stderr
