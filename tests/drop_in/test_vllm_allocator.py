"""The allocator of vLLM's sleep mode over regions, on the host driver."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memsaver
from memsaver import drop_in, regions
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.vllm import sources
from tests.drop_in import fake_vllm
from tests.support import MIB, Fill

DEFERRABLE = 'DEFERRABLE_TAGS = ("weights", "kv_cache")\n'
COUNT = 3 * MIB // 4  # floats in 3 MiB
Load = Callable[..., ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports the fake's module with the drop-in installed."""
    fake_vllm.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEMSAVER_DROP_IN", "vllm")
    finders = list(sys.meta_path)
    drop_in._states.clear()

    def load(more: str = "") -> ModuleType:
        """`more` stands at the end of the allocator's module."""
        path = tmp_path / fake_vllm.CUMEM
        path.write_text(path.read_text() + more)
        drop_in.install("vllm")
        return importlib.import_module(sources.MODULE)

    yield load
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    drop_in._states.clear()
    for region in regions.all_regions():
        if region.tag.startswith("vllm."):
            region.resume()
            region.close()


@pytest.fixture
def allocator(load: Load) -> Any:
    return load().CuMemAllocator.get_instance()


def mapped_usage(allocator: Any, tag: str | None = None) -> int:
    return sum(
        data.handle[1] for data in allocator.pointer_to_data.values() if not data.is_asleep and tag in (None, data.tag)
    )


def test_importing_the_module_activates_the_drop_in(load: Load) -> None:
    assert drop_in.status() == {}
    module = load()
    status = drop_in.status()["vllm"]
    assert status.state == "active"
    assert status.version == "9.9.9"
    assert status.replaced == tuple(f"{sources.MODULE}.{name}" for name in sources.REPLACED)
    assert module.CuMemAllocator.get_instance() is module.CuMemAllocator.instance
    assert module.CuMemAllocator.__name__ == "CuMemAllocator"
    assert module.CuMemAllocator.__module__ == sources.MODULE


def test_instance_of_the_replacement_is_one_of_the_original(load: Load) -> None:
    allocator = load().CuMemAllocator.get_instance()
    original = type(allocator).__mro__[2]
    assert original.__name__ == "CuMemAllocator" and original.__doc__ == type(allocator).__doc__


def test_unset_variable_changes_nothing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSAVER_DROP_IN")
    module = load()
    assert drop_in.status() == {}
    with pytest.raises(NotImplementedError):
        module.create_and_map((0, 0, 0, 0))


@pytest.fixture
def changed(load: Load, tmp_path: Path) -> None:
    """Makes the package another one than memsaver knows."""
    path = tmp_path / fake_vllm.CUMEM
    path.write_text(path.read_text().replace("def wake_up(self, tags=None)", "def wake_up(self, tags, level)"))


@pytest.mark.usefixtures("changed")
def test_source_that_differs_raises(load: Load) -> None:
    with pytest.raises(DropInError, match=r"vLLM 9.9.9 differs .*cumem.py: CuMemAllocator.wake_up\(self, tags, lev"):
        load()
    assert drop_in.status() == {}


@pytest.mark.usefixtures("changed")
def test_source_that_differs_with_warn_stays_as_it_is(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_DROP_IN", "vllm:warn")
    with pytest.warns(RuntimeWarning, match="differs from the versions that memsaver knows"):
        module = load()
    assert drop_in.status()["vllm"].state == "stepped aside"
    with pytest.raises(NotImplementedError):
        module.create_and_map((0, 0, 0, 0))


def test_method_that_memsaver_lacks_raises_when_it_is_called(load: Load) -> None:
    allocator = load(
        """
def prefetch(self, tags): return "done"
CuMemAllocator.prefetch = prefetch
CuMemAllocator.make = staticmethod(lambda: "made")
CuMemAllocator.free_bytes = property(lambda self: 7)
CuMemAllocator.granularity = 2 << 20
"""
    ).CuMemAllocator.get_instance()
    for call in (lambda: allocator.prefetch(["weights"]), lambda: allocator.make(), lambda: allocator.free_bytes):
        with pytest.raises(DropInError, match=r"memsaver has no vllm.*CuMemAllocator\.\w+, which this version of vLLM"):
            call()
    assert allocator.granularity == 2 << 20


def test_allocator_in_use_with_warn_stays_as_it_is(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_DROP_IN", "vllm:warn")
    original = importlib.import_module(sources.MODULE)
    original.CuMemAllocator.instance = original.CuMemAllocator()
    with pytest.warns(RuntimeWarning, match="is in use already"):
        assert load() is original
    assert drop_in.status()["vllm"].state == "stepped aside"


def test_allocator_in_use_raises_each_time(load: Load) -> None:
    original = importlib.import_module(sources.MODULE)
    original.CuMemAllocator.instance = original.CuMemAllocator()
    for _ in range(2):
        with pytest.raises(DropInError, match="is in use already"):
            load()


def test_activation_is_logged_by_vllm(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm"):
        load()
    assert [each.name for each in caplog.records if "replaces" in each.getMessage()] == ["vllm"]


def test_patch_that_comes_later_is_refused_at_the_sleep(allocator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(COUNT)
    monkeypatch.setitem(sys.modules, "unsloth_zoo", ModuleType("unsloth_zoo"))
    with pytest.raises(DropInError, match="unsloth_zoo patches"):
        allocator.sleep()
    assert bool((weights == 1).all())


def test_tags_like_the_names_of_second_regions_have_regions_of_their_own(allocator: Any) -> None:
    kept = []
    with allocator.use_memory_pool("weights.2"):
        kept.append(torch.full((COUNT,), 1.0))
    with allocator.use_memory_pool("weights"):
        kept.append(torch.full((COUNT,), 2.0))
    allocator.sleep(("weights",))
    with allocator.use_memory_pool("weights"):
        kept.append(torch.full((COUNT,), 3.0))
    tags = {address: data.tag for address, data in allocator.pointer_to_data.items()}
    assert [tags[each.data_ptr()] for each in kept] == ["weights.2", "weights", "weights"]
    allocator.wake_up()


def test_discard_after_a_resume_by_the_library_passes_create_and_map(load: Load) -> None:
    module = load()
    allocator = module.CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(COUNT)
    allocator.sleep(("weights",))
    memsaver.resume("vllm.weights")
    allocator.sleep(())
    seen = []
    module.create_and_map = lambda handle: seen.append(handle[2])  # type: ignore[attr-defined]
    allocator.wake_up()
    assert seen == [weights.data_ptr()]


def test_other_patch_of_the_allocator_raises(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "unsloth_zoo", ModuleType("unsloth_zoo"))
    with pytest.raises(DropInError, match="unsloth_zoo patches"):
        load()


def test_sleep_keeps_offloaded_tags_and_discards_others(allocator: Any) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.full((COUNT,), 3.0)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.full((COUNT,), 4.0)
    before = mapped_usage(allocator)
    assert before == allocator.get_current_usage() == 6 * MIB
    addresses = weights.data_ptr(), cache.data_ptr()
    allocator.sleep(offload_tags=("weights",))
    assert mapped_usage(allocator) == 0
    assert allocator.get_current_usage() == before
    assert memsaver.region("vllm.weights", "cpu").mapped_bytes == 0
    allocator.wake_up()
    assert mapped_usage(allocator) == before
    assert (weights.data_ptr(), cache.data_ptr()) == addresses
    assert bool((weights == 3).all())
    cache.zero_()


def test_sleep_without_arguments_keeps_the_default_tag(allocator: Any) -> None:
    with allocator.use_memory_pool():
        x = torch.full((COUNT,), 5.0)
    allocator.sleep()
    (data,) = allocator.pointer_to_data.values()
    assert data.tag == "default" and data.is_asleep
    assert data.cpu_backup_tensor.view(torch.float32).eq(5).all()
    assert data.handle == (0, 3 * MIB, x.data_ptr(), 0)
    allocator.wake_up()
    assert allocator.pointer_to_data[x.data_ptr()].cpu_backup_tensor is None
    assert bool((x == 5).all())


def test_discarded_segment_has_no_backup_tensor(allocator: Any) -> None:
    with allocator.use_memory_pool("workspace"):
        x = torch.ones(COUNT)
    allocator.sleep(())
    assert allocator.pointer_to_data[x.data_ptr()].cpu_backup_tensor is None
    allocator.wake_up()


def test_wake_up_by_tag_leaves_other_tags_asleep(allocator: Any) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.full((COUNT,), 3.0)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.ones(COUNT)
    allocator.sleep(("weights",))
    allocator.wake_up(["weights"])
    assert bool((weights == 3).all())
    assert mapped_usage(allocator, "weights") == 3 * MIB and mapped_usage(allocator, "kv_cache") == 0
    allocator.wake_up(["weights"])  # awake: no-op
    allocator.wake_up(["kv_cache"])
    cache.zero_()


def test_newer_wake_up_by_tag_wakes_tags_that_cannot_be_deferred(load: Load) -> None:
    allocator = load(DEFERRABLE).CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(COUNT)
    with allocator.use_memory_pool("workspace"):
        scratch = torch.ones(COUNT)
    allocator.sleep(("weights",))
    allocator.wake_up(["kv_cache"])
    assert mapped_usage(allocator, "workspace") == 3 * MIB and mapped_usage(allocator, "weights") == 0
    scratch.zero_()
    allocator.wake_up()
    assert bool((weights == 1).all())


def test_sleep_of_sleeping_tags_keeps_their_policy(allocator: Any, caplog: pytest.LogCaptureFixture) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.full((COUNT,), 3.0)
    allocator.sleep(("weights",))
    with caplog.at_level(logging.WARNING, "vllm"):
        allocator.sleep(())
    assert "cannot change the policy" in caplog.text
    allocator.wake_up()
    assert bool((weights == 3).all())


def test_discard_releases_its_tags_alone(allocator: Any) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.full((COUNT,), 3.0)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.ones(COUNT)
    allocator.discard("kv_cache")
    assert mapped_usage(allocator, "weights") == 3 * MIB and mapped_usage(allocator, "kv_cache") == 0
    assert bool((weights == 3).all())
    allocator.wake_up(["kv_cache"])
    cache.zero_()


def test_nested_context_has_its_own_tag(allocator: Any) -> None:
    with allocator.use_memory_pool("runtime"):
        first = torch.ones(COUNT)
        with allocator.use_memory_pool("kv_cache"):
            inner = torch.ones(COUNT)
        second = torch.ones(COUNT)
        assert allocator.current_tag == "runtime"
    assert allocator.current_tag == "default"
    tags = {address: data.tag for address, data in allocator.pointer_to_data.items()}
    assert tags == {first.data_ptr(): "runtime", inner.data_ptr(): "kv_cache", second.data_ptr(): "runtime"}


def test_tag_is_restored_after_an_error(allocator: Any) -> None:
    with pytest.raises(KeyError), allocator.use_memory_pool("weights"):
        raise KeyError
    assert allocator.current_tag == "default"


def test_tag_that_sleeps_can_be_allocated_in(allocator: Any) -> None:
    with allocator.use_memory_pool("runtime"):
        asleep = torch.full((COUNT,), 1.0)
    allocator.sleep(("runtime",))
    with allocator.use_memory_pool("runtime"):
        awake = torch.full((COUNT,), 2.0)
    assert mapped_usage(allocator, "runtime") == 3 * MIB
    allocator.sleep(("runtime",))
    assert mapped_usage(allocator) == 0
    allocator.wake_up(["runtime"])
    assert bool((asleep == 1).all()) and bool((awake == 2).all())


def test_freed_tensors_leave_the_usage(allocator: Any) -> None:
    with allocator.use_memory_pool("weights"):
        kept, freed = torch.ones(COUNT), torch.ones(COUNT)
    address = freed.data_ptr()
    del freed
    assert allocator.get_current_usage() == 3 * MIB
    assert address not in allocator.pointer_to_data and kept.data_ptr() in allocator.pointer_to_data
    with pytest.raises(KeyError):
        allocator.pointer_to_data[address]


def test_tensor_freed_asleep_returns_its_segment(allocator: Any) -> None:
    with allocator.use_memory_pool("weights"):
        kept, freed = torch.full((COUNT,), 3.0), torch.ones(COUNT)
    allocator.sleep(("weights",))
    del freed
    assert allocator.get_current_usage() == 3 * MIB
    allocator.wake_up()
    assert bool((kept == 3).all())


def test_lack_of_memory_at_wake_up_is_a_runtime_error_and_changes_nothing(allocator: Any) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.full((COUNT,), 3.0)
    allocator.sleep(("weights",))
    with Fill(leave=2 * MIB):
        with pytest.raises(memsaver.OutOfMemoryError, match="out of memory on cpu"):
            allocator.wake_up()
        assert mapped_usage(allocator) == 0
    allocator.wake_up()
    assert bool((weights == 3).all())


def test_each_discarded_segment_passes_create_and_map_after_its_mapping(load: Load) -> None:
    module = load()
    allocator = module.CuMemAllocator.get_instance()
    with allocator.use_memory_pool("weights"):
        weights = torch.full((COUNT,), 3.0)
    with allocator.use_memory_pool("kv_cache"):
        cache = [torch.ones(COUNT), torch.ones(COUNT)]
    original, seen = module.create_and_map, []

    def poison(handle: tuple[int, int, int, int]) -> None:
        original(handle)
        seen.append(handle[2])

    module.create_and_map = poison  # type: ignore[attr-defined]
    allocator.sleep(("weights",))
    allocator.wake_up()
    assert sorted(seen) == sorted(each.data_ptr() for each in cache)
    assert bool((weights == 3).all())


def test_release_of_one_segment_is_refused(load: Load) -> None:
    with pytest.raises(DropInError, match="releases whole tags"):
        load().unmap_and_release((0, 2 * MIB, 0x1000, 0))


def test_number_of_pools_by_tag(allocator: Any) -> None:
    for _ in range(2):
        with allocator.use_memory_pool("workspace"):
            pass
    assert len(allocator.allocator_and_pools["workspace"]) == 2
    allocator.close()
    assert allocator.allocator_and_pools == {}


@pytest.mark.parametrize("tags", [["weights"], 3])
def test_offload_tags_of_another_type_raise(allocator: Any, tags: object) -> None:
    with pytest.raises(TypeError, match="expected a string or a tuple"):
        allocator.sleep(tags)


def test_tag_of_another_type_raises(allocator: Any) -> None:
    with pytest.raises(TypeError, match="tag is 3"), allocator.use_memory_pool(3):
        pass
