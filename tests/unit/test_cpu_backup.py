"""Reads and writes of the contents of paused tensors in their backups.

No assertion here names a paused tensor: pytest would print it, and the access would fault.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memsaver
from memsaver import cpu_backup
from tests.support import (
    MIB,
    Block,
    Make,
    Sweep,
    blocks,
    check,
    drop_backups,
    host_held_bytes,
    host_used_bytes,
    random_bytes,
    unnamed_files,
)

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(autouse=True)
def arena() -> None:
    """The arena is there, and empty."""
    memsaver.region("flush", device="cpu")
    gc.collect()
    drop_backups()


def counted(region: memsaver.Region, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the region whose elements all differ, as far as its dtype goes."""
    tensor: torch.Tensor = region.empty(shape, dtype)
    return tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(one, other)


def reads(block: Block, clone: bool = False) -> bool:
    """Whether the backup of the block has the block's expected contents."""
    return np.array_equal(cpu_backup(block.tensor, clone=clone).numpy(), block.expected)


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor.t(),
    lambda tensor: tensor[3:7],
    lambda tensor: tensor[1::2, ::3],
    lambda tensor: tensor[2, 3],
    lambda tensor: tensor[2, :1].expand(50),
    lambda tensor: tensor.diagonal(),
    lambda tensor: tensor.view(torch.int16),
    lambda tensor: tensor.as_strided((4, 6), (2, 1), 5),
]


@pytest.mark.parametrize("clone", [False, True])
def test_tensors_and_views_keep_their_values_shape_and_strides(make: Make, clone: bool) -> None:
    region = make("host")
    whole, numbers = counted(region, (20, 12)), counted(region, 8, torch.complex64)
    numbers.mul_(1 + 2j)
    views = [view(whole) for view in VIEWS] + [counted(region, (5, 7, 3), dtype) for dtype in DTYPES]
    lazy = [numbers.conj(), numbers.conj().imag]  # with the bits "conjugate" and "negative"
    expected = [view.clone() for view in [*views, *lazy]]
    kinds = [(view.shape, view.stride(), view.dtype) for view in views]
    region.pause()
    used = host_used_bytes()
    with make() as other:  # takes no memory
        found = [cpu_backup(view, clone=clone) for view in [*views, *lazy]]
    assert other.allocated_bytes == 0
    assert all(map(same, found, expected)) and host_used_bytes() == used and region.mapped_bytes == 0
    assert [(each.shape, each.stride(), each.dtype) for each in found[: len(views)]] == kinds
    written = cpu_backup(whole.t()[2], clone=clone)
    written.fill_(-1)
    cpu_backup(whole[4:6, ::2]).zero_()
    region.resume()
    if not clone:
        expected[0][2] = -1
    expected[0].t()[4:6, ::2] = 0
    assert torch.equal(whole.t(), expected[0])  # writes through views of the backup


def test_a_view_outlives_the_resume_and_its_tensor_and_changes_nothing(make: Make) -> None:
    region = make("host")
    tensor, freed = counted(region, MIB), counted(region, 1000)
    used = host_used_bytes()
    region.pause()
    view, part, array = cpu_backup(tensor), cpu_backup(tensor)[500:510].view(2, 5), cpu_backup(freed).numpy()
    del freed
    region.resume()
    assert host_used_bytes() - used >= 4 * MIB  # the views'
    assert memsaver.release_host_memory() == 0
    array.fill(5)
    region.pause()  # to another place
    assert part.tolist() == [[500, 501, 502, 503, 504], [505, 506, 507, 508, 509]]
    view.fill_(-1)
    assert bool((part == -1).all())
    region.resume()
    assert same(tensor, torch.arange(MIB, dtype=torch.float32)) and (array == 5).all()
    del view, part, array
    assert host_used_bytes() == used
    assert memsaver.release_host_memory() >= 8 * MIB


def test_contents_in_pieces_are_one_tensor(make: Make) -> None:
    """Elsewhere in host memory other contents were released, and left holes."""
    between = [Block(make("host"), MIB, seed) for seed in range(12)]
    memsaver.pause([block.region.tag for block in between])
    memsaver.resume([block.region.tag for block in between[::2]])
    assert host_held_bytes() - host_used_bytes() >= 6 * MIB  # in holes
    region = make("host")
    held = blocks(region, [5 * MIB, 3 * MIB, 513], seed=50)
    region.pause()
    memsaver.configure(host_limit=host_held_bytes())
    with pytest.raises(memsaver.BackupError, match="host_limit"):
        cpu_backup(held[0].tensor)
    assert reads(held[0], clone=True)
    memsaver.configure(host_limit=None)
    used = host_used_bytes()
    for seed, block in enumerate(held):
        view, again = cpu_backup(block.tensor), cpu_backup(block.tensor)
        assert view.is_contiguous() and view.data_ptr() == again.data_ptr()
        assert np.array_equal(view.numpy(), block.expected)
        block.expected = random_bytes(block.nbytes, 200 + seed)
        view.numpy()[:] = block.expected
        assert reads(block, clone=True)
    assert host_used_bytes() > used  # some was not in one piece
    del view, again
    region.resume()
    check(held)
    for block in between[1::2]:
        block.region.resume()
        block.check()
    assert host_used_bytes() == 0


@pytest.mark.parametrize("clone", [False, True])
def test_contents_without_a_backup_are_refused_with_the_state_of_their_region(make: Make, clone: bool) -> None:
    region, lost = make("host"), make("none")
    tensor, discarded = counted(region, 100), counted(lost, 100)

    def refused(state: str) -> None:
        with pytest.raises(memsaver.Error, match=f"is {state}") as caught:
            cpu_backup(tensor, clone=clone)
        assert type(caught.value) is memsaver.Error

    refused("active")
    prepared = memsaver.transitions.prepare_pause([region.tag, lost.tag])
    refused("pausing")
    prepared.commit()
    assert same(cpu_backup(tensor, clone=clone), torch.arange(100.0))
    memsaver.resume([region, lost])
    refused("active")
    memsaver.pause([region, lost], backup={region.tag: "none"})
    for each, owner in ((tensor, region), (discarded, lost)):
        with pytest.raises(memsaver.BackupError, match="no backup of these 400 bytes") as caught:
            cpu_backup(each, clone=clone)
        assert repr(owner.tag) in str(caught.value)
    memsaver.resume([region, lost])


FOREIGN: list[tuple[type[Exception], Any]] = [
    (ValueError, torch.zeros(3)), (ValueError, torch.zeros(0)), (ValueError, torch.empty(3, device="meta")),
    (TypeError, None), (TypeError, [1.0]), (TypeError, np.zeros(3)), (TypeError, 7),
    (TypeError, torch.eye(2).to_sparse()), (TypeError, torch.eye(2).to_sparse_csr()),
    (TypeError, torch.nn.LazyLinear(2).weight),
    (TypeError, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
]  # fmt: skip


def test_cpu_backup_of_a_foreign_value_raises(make: Make) -> None:
    region = make("host")

    class Two(torch.Tensor):
        @staticmethod
        def __new__(cls, part: torch.Tensor) -> Two:
            return torch.Tensor._make_wrapper_subclass(cls, part.shape)  # type: ignore[no-any-return,attr-defined]

        def __init__(self, part: torch.Tensor) -> None:
            self.part = part

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["part"], None

    tensor = counted(region, 10)
    region.pause()
    for clone in (False, True):
        for kind, value in FOREIGN:
            with pytest.raises(kind, match="tensor"):
                cpu_backup(value, clone=clone)
        with pytest.raises(TypeError, match="Two"):
            cpu_backup(Two(tensor), clone=clone)
        for none in (tensor[:0], tensor[10:], tensor.view(2, 5)[:, :0]):
            with pytest.raises(ValueError, match="no region"):
                cpu_backup(none, clone=clone)
    region.resume()


def test_contents_on_disk_can_be_cloned(make: Make, tmp_path: Path) -> None:
    memsaver.configure(disk_dir=tmp_path)
    region = make("disk")
    held = blocks(region, [100, 20 * MIB])
    part = held[1].tensor[5 * MIB + 3 : 17 * MIB : 7]
    expected = part.clone()
    region.pause()
    memsaver.release_host_memory()
    memsaver.configure(host_limit=host_held_bytes())  # no pinned memory is needed
    with pytest.raises(memsaver.BackupError, match="clone"):
        cpu_backup(part)
    found: torch.Tensor | None = None

    def read() -> None:
        nonlocal found
        found = cpu_backup(part, clone=True)

    for error in Sweep("error", read):
        assert error is None or isinstance(error, memsaver.BackupError)
        assert region.state == "paused"
    assert found is not None and torch.equal(found, expected)
    memsaver.configure(host_limit=None)
    region.resume()
    check(held)
    assert unnamed_files(tmp_path) == []
