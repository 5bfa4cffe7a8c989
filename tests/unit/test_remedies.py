"""Errors and warnings name the region, the unit, and a remedy."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import memsaver
from memsaver import _core, errors
from tests.support import MIB, blocks, host_held_bytes, host_used_bytes

Make = Callable[..., memsaver.Region]


@pytest.mark.parametrize("call", ["pause", "switch", "prepare"])
def test_a_backup_error_names_regions_units_and_a_remedy(make: Make, call: str) -> None:
    region, other = make("host"), make()
    held = blocks(region, [host_held_bytes() - host_used_bytes() + 5 * MIB])
    memsaver.configure(host_limit=0)
    with pytest.raises(memsaver.BackupError) as caught:
        if call == "pause":
            memsaver.pause([region, other])
        elif call == "switch":
            memsaver.switch(pause=[region, other])
        else:
            memsaver.transitions.prepare_pause([region, other])
    memsaver.configure(host_limit=None)
    assert caught.value.regions == (region.tag,)
    text = str(caught.value)
    assert text.startswith(f"no backup for {region.tag!r}: ")
    assert f"({errors.gib(caught.value.needed_bytes)} needed, " in text and " held, 0.0 MiB available)" in text
    assert "raise configure(host_limit=...), or pause with backup='disk' or 'none'; nothing has changed" in text
    assert pickle.loads(pickle.dumps(caught.value)).regions == (region.tag,)
    assert region.state == "active"
    held[0].check()


def test_a_backup_error_on_disk_names_the_directory_as_remedy(make: Make, tmp_path: Path) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make("disk")
    held = blocks(region, [MIB])
    tmp_path.rmdir()
    with pytest.raises(memsaver.BackupError, match=r"choose another configure\(disk_dir=\.\.\.\)") as caught:
        region.pause()
    assert caught.value.regions == (region.tag,)
    tmp_path.mkdir()
    region.pause()
    region.resume()
    held[0].check()


def test_a_disk_backup_without_host_memory_names_the_limit_of_host_memory_as_remedy(make: Make, tmp_path: Path) -> None:
    """Contents pass through pinned host memory: another directory would not help."""
    memsaver.configure(disk_dir=tmp_path)
    region = make("disk")
    held = blocks(region, [MIB])
    memsaver.release_host_memory()
    memsaver.configure(host_limit=0)
    with pytest.raises(memsaver.BackupError, match="pinned host memory") as caught:
        region.pause()
    memsaver.configure(host_limit=None)
    assert "raise configure(host_limit=...), or pause with backup='none'" in str(caught.value)
    assert "disk_dir" not in str(caught.value)
    region.pause()
    region.resume()
    held[0].check()


def test_the_error_for_a_missing_driver_names_a_remedy() -> None:
    error = errors.make("DriverError", "dlopen failed with code -1", {"call": "dlopen", "code": -1, "detail": "x"})
    assert str(error).startswith("there is no CUDA driver (dlopen failed with code -1")
    assert "use device='cpu', the host driver, or install NVIDIA's driver" in str(error)


@pytest.mark.skipif(_core.cuda_device_count() > 0, reason="there is a CUDA device")
def test_the_error_for_cuda_without_a_driver_names_a_remedy(tag: str) -> None:
    with pytest.raises(memsaver.DriverError, match="use device='cpu', the host driver, or install NVIDIA's driver"):
        memsaver.region(tag, device="cuda")


def test_an_inner_phase_that_pauses_the_outer_one_warns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memsaver.transitions, "_phases", {})
    one, two = make(), make()
    memsaver.define_phase("a", one)
    memsaver.define_phase("b", two)
    memsaver.define_phase("both", [one, two])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with memsaver.phase("a"):
            pass
        with memsaver.phase("b"):
            pass
        with memsaver.phase("a"), memsaver.phase("both"):
            pass
        with memsaver.phase("a"):
            with pytest.raises(RuntimeWarning), memsaver.phase("b"):
                pass
            assert (one.state, two.state) == ("active", "paused")  # the warning comes before the transition
    with memsaver.phase("a"):
        with pytest.warns(RuntimeWarning, match="phase 'b' is entered inside phase 'a' and pauses") as caught:
            with memsaver.phase("b"):
                pass
        assert repr(one.tag) in str(caught[0].message)
        assert caught[0].filename == __file__
        assert one.state == "paused"
    memsaver.resume()
