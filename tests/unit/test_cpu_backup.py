"""Reads and writes of the contents of paused tensors in their backups.

No assertion here names a paused tensor: pytest would print it, and the access would fault.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memsaver
from memsaver import _core, cpu_backup
from tests.support import (
    KIB,
    MIB,
    Block,
    Sweep,
    blocks,
    drop_backups,
    host_held_bytes,
    host_used_bytes,
    run_clean,
    unnamed_files,
)

Make = Callable[..., memsaver.Region]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(autouse=True)
def arena() -> Iterator[None]:
    """The arena is there, and empty."""
    memsaver.region("flush", device="cpu")
    gc.collect()
    drop_backups()
    yield


def counted(region: memsaver.Region, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the region whose elements all differ, as far as its dtype goes."""
    tensor: torch.Tensor = region.empty(shape, dtype)
    return tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same shape, dtype and bytes."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def reads(block: Block, clone: bool = False) -> bool:
    """Whether the backup of the block has the block's expected contents."""
    return np.array_equal(cpu_backup(block.tensor, clone=clone).numpy(), block.expected)


def rewrite(block: Block, seed: int) -> None:
    """Writes other contents through the backup."""
    block.expected = np.random.default_rng(seed).integers(0, 256, block.nbytes, np.uint8)
    cpu_backup(block.tensor).numpy()[:] = block.expected


# Values


@pytest.mark.parametrize("clone", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contents_are_read_while_the_region_is_paused(make: Make, dtype: torch.dtype, clone: bool) -> None:
    region = make("host")
    first, tensor = counted(region, 33), counted(region, (5, 7, 3), dtype)
    expected = tensor.clone()
    region.pause()
    found = cpu_backup(tensor, clone=clone)
    assert found.device.type == "cpu"
    assert found.stride() == expected.stride()
    assert same(found, expected)
    assert region.state == "paused" and region.mapped_bytes == 0
    region.resume()
    assert same(tensor, expected)
    del first


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda tensor: tensor.t(),
    "rows": lambda tensor: tensor[3:7],
    "every second": lambda tensor: tensor[1::2, ::3],
    "one element": lambda tensor: tensor[2, 3],
    "expanded": lambda tensor: tensor[2, :1].expand(50),
    "a diagonal": lambda tensor: tensor.diagonal(),
    "other numbers": lambda tensor: tensor.view(torch.int16),
    "overlapping": lambda tensor: tensor.as_strided((4, 6), (2, 1), 5),
}


@pytest.mark.parametrize("clone", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_keep_their_shape_and_strides(
    make: Make, view: Callable[[torch.Tensor], torch.Tensor], clone: bool
) -> None:
    region = make("host")
    whole = counted(region, (20, 12))
    tensor = view(whole)
    expected, shape, strides = tensor.clone(), tensor.shape, tensor.stride()
    region.pause()
    found = cpu_backup(tensor, clone=clone)
    assert (found.shape, found.stride(), found.dtype) == (shape, strides, expected.dtype)
    assert torch.equal(found, expected)
    region.resume()


@pytest.mark.parametrize("clone", [False, True])
@pytest.mark.parametrize("bit", ["conjugate", "negative"])
def test_cpu_backup_resolves_conjugate_and_negative_views(make: Make, bit: str, clone: bool) -> None:
    region = make("host")
    whole = counted(region, 8, torch.complex64)
    whole.mul_(1 + 2j)
    tensor = whole.conj() if bit == "conjugate" else whole.conj().imag
    assert tensor.is_conj() or tensor.is_neg()
    expected = tensor.clone()
    region.pause()
    found = cpu_backup(tensor, clone=clone)
    assert torch.equal(found, expected)
    region.resume()


def test_every_tensor_has_its_own_backup(make: Make) -> None:
    region = make("host")
    held = blocks(region, [100, 3 * MIB, 513, 700 * KIB] * 5)
    del held[::3]
    region.pause()
    for block in held:
        assert reads(block) and reads(block, clone=True)
    region.resume()


def test_a_view_takes_no_memory_and_a_clone_is_apart(make: Make) -> None:
    region = make("host")
    tensor = counted(region, MIB)
    region.pause()
    used = host_used_bytes()
    view, again, clone = cpu_backup(tensor), cpu_backup(tensor), cpu_backup(tensor, clone=True)
    assert host_used_bytes() == used
    assert view.data_ptr() == again.data_ptr() != clone.data_ptr()
    clone.zero_()
    assert same(view, torch.arange(MIB, dtype=torch.float32))
    view.fill_(3)
    assert bool((again == 3).all()) and not bool(clone.any())
    region.resume()


def test_a_clone_is_not_allocated_in_a_region(make: Make) -> None:
    region, other = make("host"), make()
    tensor = counted(region, 100)
    region.pause()
    with other:
        clone, view = cpu_backup(tensor, clone=True), cpu_backup(tensor)
    assert other.allocated_bytes == 0
    assert not other.owns(clone.data_ptr()) and not region.owns(view.data_ptr())
    region.resume()


# Writing


def test_writes_through_strided_views_of_a_backup_reach_the_tensor(make: Make) -> None:
    region = make("host")
    tensor = counted(region, (20, 12), torch.bfloat16)
    expected = tensor.clone()
    region.pause()
    cpu_backup(tensor.t()[2]).fill_(-1)
    cpu_backup(tensor[4:6, ::2]).zero_()
    region.resume()
    expected[:, 2] = -1
    expected[4:6, ::2] = 0
    assert torch.equal(tensor, expected)


def test_a_tensor_freed_while_paused_leaves_its_view(make: Make) -> None:
    region = make("host")
    tensor, other = counted(region, 1000), counted(region, 1000)
    region.pause()
    view = cpu_backup(tensor)
    del tensor
    view.fill_(5)
    region.resume()
    assert bool((view == 5).all())
    assert same(other, torch.arange(1000.0))


# Lifetime


def test_a_view_outlives_the_resume_and_changes_nothing(make: Make) -> None:
    region = make("host")
    tensor = counted(region, MIB)
    used = host_used_bytes()
    region.pause()
    view = cpu_backup(tensor)
    region.resume()
    assert host_used_bytes() - used >= 4 * MIB  # the view's
    assert memsaver.release_host_memory() == 0
    view.fill_(-1)
    assert same(tensor, torch.arange(MIB, dtype=torch.float32))
    region.pause()  # to another place
    other = cpu_backup(tensor)
    assert same(other, torch.arange(MIB, dtype=torch.float32))
    assert bool((view == -1).all())
    region.resume()
    del view, other
    assert host_used_bytes() == used
    assert memsaver.release_host_memory() >= 8 * MIB
    assert same(tensor, torch.arange(MIB, dtype=torch.float32))


def test_parts_of_a_view_keep_its_memory(make: Make) -> None:
    region = make("host")
    tensor = counted(region, MIB)
    region.pause()
    part = cpu_backup(tensor)[500:510].view(2, 5)
    array = cpu_backup(tensor).numpy()
    region.resume(restore=False)
    memsaver.release_host_memory()
    for seed in range(3):
        Block(region, 5 * MIB, seed)
        region.pause()
        region.resume()
    assert part.tolist() == [[500, 501, 502, 503, 504], [505, 506, 507, 508, 509]]
    assert array[MIB - 1] == MIB - 1


def test_the_process_ends_cleanly_with_views() -> None:
    run_clean("""
        import memsaver
        region = memsaver.region("a", device="cpu", backup="host")
        tensor = region.empty(1 << 20)
        region.pause()
        view = memsaver.cpu_backup(tensor)
        other = memsaver.region("b", device="cpu", backup="host")
        kept = other.empty(1000)
        other.pause()
        late = memsaver.cpu_backup(kept)
        region.resume()
        view.zero_()
    """)


# In pieces


def test_contents_in_pieces_are_one_tensor(make: Make) -> None:
    between = [Block(make("host"), MIB, seed) for seed in range(12)]
    memsaver.pause([block.region.tag for block in between])
    memsaver.resume([block.region.tag for block in between[::2]])
    holes = host_held_bytes() - host_used_bytes()
    assert holes >= 6 * MIB
    region = make("host")
    held = blocks(region, [5 * MIB, 3 * MIB, 513], seed=50)
    region.pause()
    used = host_used_bytes()
    moved = 0
    for block in held:
        before = host_used_bytes()
        view, again = cpu_backup(block.tensor), cpu_backup(block.tensor)
        moved += host_used_bytes() > before
        assert view.is_contiguous() and view.data_ptr() == again.data_ptr()
        assert np.array_equal(view.numpy(), block.expected)
    assert moved > 0 and host_used_bytes() > used  # some was not in one piece
    for seed, block in enumerate(held):
        rewrite(block, 200 + seed)
        assert reads(block, clone=True)
    region.resume()
    del view, again
    for block in held:
        block.check()
    for block in between[1::2]:
        block.region.resume()
        block.check()
    assert host_used_bytes() == 0


def test_a_tensor_in_pieces_needs_memory_to_become_one(make: Make) -> None:
    between = [Block(make("host"), MIB, seed) for seed in range(12)]
    memsaver.pause([block.region.tag for block in between])
    memsaver.resume([block.region.tag for block in between[::2]])
    region = make("host")
    block = Block(region, 20 * MIB, seed=50)
    region.pause()
    memsaver.configure(host_limit=host_held_bytes())
    with pytest.raises(memsaver.BackupError, match="host_limit"):
        cpu_backup(block.tensor)
    assert reads(block, clone=True)
    memsaver.configure(host_limit=None)
    assert reads(block)
    region.resume()
    block.check()
    for other in between[1::2]:
        other.region.resume()
        other.check()


# Tensors without a backup


def test_cpu_backup_without_a_backup_raises(make: Make) -> None:
    lost, given_up = make("none"), make("host")
    tensors = counted(lost, 100), counted(given_up, 100)
    lost.pause()
    given_up.pause(backup="none")
    for region, tensor in zip((lost, given_up), tensors):
        for clone in (False, True):
            with pytest.raises(memsaver.BackupError, match="no backup of these 400 bytes") as caught:
                cpu_backup(tensor, clone=clone)
            assert repr(region.tag) in str(caught.value)
        assert region.state == "paused"
        region.resume()


def test_cpu_backup_of_an_active_region_raises(make: Make) -> None:
    region = make("host")
    tensor = counted(region, 100)
    for _ in range(2):
        with pytest.raises(memsaver.Error, match="is active") as caught:
            cpu_backup(tensor)
        assert type(caught.value) is memsaver.Error
        region.pause()
        region.resume()


@pytest.mark.parametrize("clone", [False, True])
def test_cpu_backup_of_a_region_in_transition_raises(make: Make, clone: bool) -> None:
    region = make("host")
    tensor = counted(region, 100)
    assert _core.acquire([region._core]) is None
    pause = memsaver.start(pause=region)
    with pytest.raises(memsaver.Error, match="is active|is pausing"):
        cpu_backup(tensor, clone=clone)
    _core.release([region._core])
    pause.result()
    found = cpu_backup(tensor, clone=clone)
    assert same(found, torch.arange(100.0))
    region.resume()


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        (ValueError, torch.zeros(3)),
        (ValueError, torch.zeros(0)),
        (ValueError, torch.empty(3, device="meta")),
        (TypeError, None),
        (TypeError, [1.0]),
        (TypeError, np.zeros(3)),
        (TypeError, 7),
    ],
    ids=repr,
)
@pytest.mark.parametrize("clone", [False, True])
def test_cpu_backup_of_a_foreign_value_raises(kind: type[Exception], tensor: Any, clone: bool) -> None:
    with pytest.raises(kind, match="tensor"):
        cpu_backup(tensor, clone=clone)


def test_cpu_backup_of_a_wrapper_tensor_raises(make: Make) -> None:
    region = make("host")

    class Two(torch.Tensor):
        @staticmethod
        def __new__(cls, part: torch.Tensor) -> Two:
            return torch.Tensor._make_wrapper_subclass(cls, part.shape)  # type: ignore[no-any-return,attr-defined]

        def __init__(self, part: torch.Tensor) -> None:
            self.part = part

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["part"], None

    tensor = counted(region, 3)
    region.pause()
    with pytest.raises(TypeError, match="Two"):
        cpu_backup(Two(tensor))
    region.resume()


def test_cpu_backup_of_an_empty_tensor_raises(make: Make) -> None:
    region = make("host")
    tensor = counted(region, 10)
    region.pause()
    for none in (tensor[:0], tensor[10:], tensor.view(2, 5)[:, :0]):
        with pytest.raises(ValueError, match="no region"):
            cpu_backup(none)
    region.resume()


# On disk


def test_contents_on_disk_can_be_cloned(make: Make, tmp_path: Path) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make("disk")
    held = blocks(region, [100, 40 * MIB, 3 * MIB + 512, 700 * KIB])
    part = held[1].tensor[5 * MIB + 3 : 37 * MIB : 7]
    expected = part.clone()
    region.pause()
    used = host_used_bytes()
    for block in held:
        assert reads(block, clone=True)
    found = cpu_backup(part, clone=True)
    assert torch.equal(found, expected)
    with pytest.raises(memsaver.BackupError, match="clone"):
        cpu_backup(part)
    assert host_used_bytes() == used
    region.resume()
    for block in held:
        block.check()
    assert unnamed_files(tmp_path) == []


def test_a_read_from_disk_survives_a_failure_of_any_file_call(make: Make, tmp_path: Path) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make("disk")
    block = Block(region, 20 * MIB)
    region.pause()
    found: torch.Tensor | None = None

    def read() -> None:
        nonlocal found
        found = cpu_backup(block.tensor, clone=True)

    for error in Sweep("error", read):
        assert error is None or isinstance(error, memsaver.BackupError)
        assert region.state == "paused"
    assert found is not None and np.array_equal(found.numpy(), block.expected)
    region.resume()
    block.check()


def test_a_read_from_disk_needs_no_pinned_memory(make: Make, tmp_path: Path) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make("disk")
    block = Block(region, 20 * MIB)
    region.pause()
    memsaver.release_host_memory()
    memsaver.configure(host_limit=host_held_bytes())
    assert reads(block, clone=True)
    memsaver.configure(host_limit=None)
    region.resume()
