"""The allocator of vLLM's sleep mode over regions, on the host driver."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memsaver
from memsaver import drop_in
from memsaver.drop_in import DropInError
from memsaver.drop_in.vllm import sources
from tests.drop_in.fake_vllm import CUMEM, Load, load
from tests.support import MIB, Fill

__all__ = ["load"]  # a fixture

DEFERRABLE = 'DEFERRABLE_TAGS = ("weights", "kv_cache")\n'
COUNT = 3 * MIB // 4  # floats in 3 MiB


@pytest.fixture
def allocator(load: Load) -> Any:
    return load().CuMemAllocator.get_instance()


def full(allocator: Any, tag: str | None, value: float = 1.0) -> torch.Tensor:
    with allocator.use_memory_pool(tag):
        return torch.full((COUNT,), value)


def awake(allocator: Any) -> set[str]:
    """The tags with mapped memory, as vLLM's tests count it."""
    return {data.tag for data in allocator.pointer_to_data.values() if not data.is_asleep}


class TestInstallation:
    def test_importing_the_module_activates_the_drop_in(self, load: Load, caplog: pytest.LogCaptureFixture) -> None:
        assert drop_in.status() == {}
        with caplog.at_level(logging.INFO, "vllm"):
            module = load()
        status = drop_in.status()["vllm"]
        assert (status.state, status.version) == ("active", "9.9.9")
        assert status.replaced == tuple(f"{sources.MODULE}.{name}" for name in sources.REPLACED)
        assert [each.name for each in caplog.records if "replaces" in each.getMessage()] == ["vllm"]
        replaced = module.CuMemAllocator
        assert replaced.get_instance() is replaced.instance
        assert (replaced.__name__, replaced.__module__) == ("CuMemAllocator", sources.MODULE)
        with pytest.raises(AttributeError, match=r"memsaver has no vllm.*CuMemAllocator\.prefetch"):
            replaced.instance.prefetch()

    def test_unset_variable_changes_nothing(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MEMSAVER_DROP_IN")
        module = load()
        assert drop_in.status() == {}
        with pytest.raises(NotImplementedError):
            module.create_and_map((0, 0, 0, 0))

    def test_source_that_differs_is_refused(self, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / CUMEM
        path.write_text(path.read_text().replace("def wake_up(self, tags=None)", "def wake_up(self, tags, level)"))
        text = r"vLLM 9.9.9 differs .*cumem.py: CuMemAllocator has no line 'def wake_up.*MEMSAVER_DROP_IN=vllm:warn to"
        with pytest.raises(DropInError, match=text):
            load()
        assert drop_in.status() == {}
        monkeypatch.setenv("MEMSAVER_DROP_IN", "vllm:warn")
        with pytest.warns(RuntimeWarning, match="stepped aside: vLLM 9.9.9 differs"):
            module = load()
        assert drop_in.status()["vllm"].state == "stepped aside"
        with pytest.raises(NotImplementedError):
            module.create_and_map((0, 0, 0, 0))

    def test_allocator_in_use_is_refused(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        original = importlib.import_module(sources.MODULE)
        original.CuMemAllocator.instance = original.CuMemAllocator()
        for _ in range(2):
            with pytest.raises(DropInError, match="is in use already"):
                load()
        monkeypatch.setenv("MEMSAVER_DROP_IN", "vllm:warn")
        with pytest.warns(RuntimeWarning, match="is in use already"):
            assert load() is original
        assert drop_in.status()["vllm"].state == "stepped aside"

    @pytest.mark.parametrize("moment", ["installation", "sleep"])
    def test_other_patch_of_the_allocator_is_refused(
        self, load: Load, moment: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = "unsloth_zoo", ModuleType("unsloth_zoo")
        if moment == "installation":
            monkeypatch.setitem(sys.modules, *other)
        with pytest.raises(DropInError, match="unsloth_zoo patches"):
            allocator = load().CuMemAllocator.get_instance()
            weights = full(allocator, "weights")
            monkeypatch.setitem(sys.modules, *other)
            try:
                allocator.sleep()
            finally:
                assert bool((weights == 1).all())


def test_sleep_keeps_offloaded_tags_and_discards_others(allocator: Any) -> None:
    weights, cache = full(allocator, "weights", 3.0), full(allocator, "kv_cache", 4.0)
    addresses = weights.data_ptr(), cache.data_ptr()
    allocator.sleep(offload_tags=("weights",))
    assert awake(allocator) == set() and allocator.get_current_usage() == 6 * MIB
    assert memsaver.region("vllm.weights", "cpu").mapped_bytes == 0
    kept = allocator.pointer_to_data[addresses[0]]
    assert (kept.handle, kept.tag) == ((0, 3 * MIB, addresses[0], 0), "weights")
    allocator.wake_up()
    assert awake(allocator) == {"weights", "kv_cache"} and (weights.data_ptr(), cache.data_ptr()) == addresses
    assert bool((weights == 3).all()) and not cache.any()


def test_sleep_without_arguments_keeps_the_default_tag(allocator: Any) -> None:
    x = full(allocator, None, 5.0)
    allocator.sleep()
    assert [data.tag for data in allocator.pointer_to_data.values()] == ["default"]
    allocator.wake_up()
    assert bool((x == 5).all())


@pytest.mark.parametrize("more", ["", DEFERRABLE], ids=["older", "newer"])
def test_wake_up_by_tag(load: Load, more: str) -> None:
    """Newer versions wake the tags that cannot be deferred in any case."""
    allocator = load(more).CuMemAllocator.get_instance()
    weights, _cache, _scratch = (full(allocator, tag, 3.0) for tag in ("weights", "kv_cache", "workspace"))
    allocator.sleep(("weights",))
    for _ in range(2):  # again: no-op
        allocator.wake_up(["weights"])
        assert awake(allocator) == {"weights", "workspace"} - ({"workspace"} if not more else set())
        assert bool((weights == 3).all())
    allocator.wake_up(["kv_cache"])
    assert "kv_cache" in awake(allocator)
    allocator.wake_up()


def test_sleep_of_sleeping_tags_keeps_their_policy(allocator: Any, caplog: pytest.LogCaptureFixture) -> None:
    weights = full(allocator, "weights", 3.0)
    allocator.sleep(("weights",))
    with caplog.at_level(logging.WARNING, "vllm"):
        allocator.sleep(())
    assert "cannot change the policy" in caplog.text
    allocator.wake_up()
    assert bool((weights == 3).all())


def test_discard_releases_its_tags_alone(allocator: Any) -> None:
    weights, cache = full(allocator, "weights", 3.0), full(allocator, "kv_cache")
    allocator.discard("kv_cache")
    assert awake(allocator) == {"weights"} and bool((weights == 3).all())
    allocator.wake_up(["kv_cache"])
    assert not cache.any()


def test_nested_context_has_its_own_tag(allocator: Any) -> None:
    with allocator.use_memory_pool("runtime"):
        first, inner = torch.ones(COUNT), full(allocator, "kv_cache")
        second = torch.ones(COUNT)
        assert allocator.current_tag == "runtime"
    with pytest.raises(KeyError), allocator.use_memory_pool("weights"):
        raise KeyError
    assert allocator.current_tag == "default"
    tags = {address: data.tag for address, data in allocator.pointer_to_data.items()}
    assert tags == {first.data_ptr(): "runtime", inner.data_ptr(): "kv_cache", second.data_ptr(): "runtime"}


def test_tag_that_sleeps_can_be_allocated_in(allocator: Any) -> None:
    """Also one that looks like the name of the second region, which has a region of its own."""
    other, asleep = full(allocator, "runtime.2", 3.0), full(allocator, "runtime", 1.0)
    allocator.sleep(("runtime", "runtime.2"))
    new = full(allocator, "runtime", 2.0)
    assert awake(allocator) == {"runtime"}
    tags = {address: data.tag for address, data in allocator.pointer_to_data.items()}
    assert [tags[each.data_ptr()] for each in (other, asleep, new)] == ["runtime.2", "runtime", "runtime"]
    allocator.sleep(("runtime",))
    assert awake(allocator) == set()
    allocator.wake_up()
    assert bool((asleep == 1).all()) and bool((new == 2).all()) and bool((other == 3).all())


@pytest.mark.parametrize("is_asleep", [False, True])
def test_freed_tensors_leave_the_usage(allocator: Any, is_asleep: bool) -> None:
    kept, freed = full(allocator, "weights", 3.0), full(allocator, "weights")
    address = freed.data_ptr()
    if is_asleep:
        allocator.sleep(("weights",))
    del freed
    assert allocator.get_current_usage() == 3 * MIB
    assert list(allocator.pointer_to_data) == [kept.data_ptr()] and address != kept.data_ptr()
    allocator.wake_up()
    assert bool((kept == 3).all())


def test_lack_of_memory_at_wake_up_is_a_runtime_error_and_changes_nothing(allocator: Any) -> None:
    weights = full(allocator, "weights", 3.0)
    allocator.sleep(("weights",))
    with Fill(leave=2 * MIB):
        with pytest.raises(memsaver.OutOfMemoryError, match="out of memory on cpu"):
            allocator.wake_up()
        assert awake(allocator) == set()
    allocator.wake_up()
    assert bool((weights == 3).all())


def test_each_discarded_segment_passes_create_and_map_after_its_mapping(load: Load) -> None:
    module = load()
    allocator = module.CuMemAllocator.get_instance()
    weights, cache = full(allocator, "weights", 3.0), [full(allocator, "kv_cache") for _ in range(2)]
    original, seen = module.create_and_map, []

    def poison(handle: tuple[int, int, int, int]) -> None:
        original(handle)
        seen.append(handle[2])

    module.create_and_map = poison  # type: ignore[attr-defined]
    allocator.sleep(("weights",))
    allocator.wake_up()
    assert sorted(seen) == sorted(each.data_ptr() for each in cache)
    assert bool((weights == 3).all())
    allocator.sleep(("weights",))
    memsaver.resume("vllm.weights")  # not by the allocator
    allocator.sleep(())
    seen.clear()
    allocator.wake_up(["weights"])
    assert seen == [weights.data_ptr()]
    with pytest.raises(DropInError, match="releases whole tags"):
        module.unmap_and_release((0, 2 * MIB, 0x1000, 0))


def test_number_of_pools_by_tag(allocator: Any) -> None:
    tensors = [full(allocator, "workspace") for _ in range(2)]
    assert len(allocator.allocator_and_pools["workspace"]) == 2
    tensors.clear()
    allocator.close()
    assert allocator.allocator_and_pools == {}


@pytest.mark.parametrize("tags", [["weights"], 3])
def test_tags_of_another_type_raise(allocator: Any, tags: object) -> None:
    for act in (allocator.sleep, allocator.discard):
        with pytest.raises(TypeError, match="expected a string or a tuple"):
            act(tags)
    with pytest.raises(TypeError, match="tag is 3"), allocator.use_memory_pool(3):
        pass
