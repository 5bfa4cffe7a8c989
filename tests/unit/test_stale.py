"""``configure(stale=...)``: tensors that were not written since their memory came back are found, by name."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import memsaver
from memsaver._torch import stale
from tests.support import MIB, Make


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stale, "_names", {})
    memsaver.configure(stale="check")
    yield
    memsaver.configure(stale="off")


class Layer(nn.Module):
    """A layer of a model as engines have it, all of whose tensors lie in a region."""

    def __init__(self, region: memsaver.Region) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(self.new((96, 40)))
        self.scale = nn.Parameter(self.new(()), requires_grad=False)  # of fp8 weights
        self.lora = nn.ParameterList(nn.Parameter(self.new((4, 40))) for _ in range(3))  # slots
        self.cos: torch.Tensor
        self.state: torch.Tensor
        self.register_buffer("cos", self.new((33,)), persistent=False)  # a rotary cache
        self.register_buffer("state", self.new((5, 7), torch.float16))  # of a hybrid model

    def new(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.region:
            return torch.zeros(shape, dtype=dtype)


class Model(nn.Module):
    def __init__(self, region: memsaver.Region) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(region) for _ in range(3))

    def load(self, without: Callable[[str], bool] = lambda name: False) -> None:
        """Writes all tensors, but for some."""
        with torch.no_grad():
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
                if not without(name):
                    tensor.fill_(1)


FAULTS: dict[str, Callable[[str], bool]] = {
    "a draft model of which one parameter is loaded": lambda name: name != "layers.0.weight",
    "rotary caches": lambda name: name.endswith("cos"),
    "states of hybrid models": lambda name: name.endswith("state") and "layers.2" in name,
    "scales": lambda name: name == "layers.1.scale",
    "slots of LoRA": lambda name: name == "layers.2.lora.1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_were_not_written_are_named(make: Make, fault: str) -> None:
    region = make()
    model, missing = Model(region), FAULTS[fault]
    memsaver.name_tensors(model, prefix="draft.")
    for _ in range(2):
        region.pause()
        region.resume()
        model.load(missing)
        names = {f"draft.{name}" for name, _ in [*model.named_parameters(), *model.named_buffers()] if missing(name)}
        for _ in range(2):  # the error stays until the tensors are written
            with pytest.raises(memsaver.StaleError) as raised:
                memsaver.check_written(region)
            assert {name for name, *_ in raised.value.tensors} == names
            assert all(name in str(raised.value) for name in names) or len(names) > 20
        model.load()
        memsaver.check_written(region)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 128, 4096 + 3, MIB])
def test_one_piece_of_any_size_and_place_is_found(tag: str, count: int) -> None:
    """A tensor made of others has them as parts. The function of a derived region leaves it out."""
    region = memsaver.region(tag, "cpu", memsaver.Derived(lambda: [each[:9].fill_(0) for each in wholes], []))
    wholes = [region.empty(count + 64, torch.float32) for _ in range(2)]
    whole, data = wholes[0], wholes[1][9:][:count]
    part = nn.Parameter(whole[9:][:count], requires_grad=False)  # not at the beginning of an allocation
    module = nn.Module()
    module.register_parameter("part", part)
    module.weight = nn.Parameter(TwoTensor(part.data, data), requires_grad=False)
    memsaver.name_tensors(module)
    region.pause()
    region.resume()
    missing = min(count, 16)  # 64 bytes
    part[missing:] = 0
    data[missing:] = 0
    for tensor, name in ((part, "part"), (data, "weight.b")):
        with pytest.raises(memsaver.StaleError) as raised:
            memsaver.check_written(region)
        assert (name, 4 * count, min(64, 4 * count)) in raised.value.tensors
        tensor[0] = 0
    memsaver.check_written(region)
    region.backup = "none"


def test_random_correct_sequences_give_no_alarm(make: Make) -> None:
    draw = random.Random(0)
    region, other = make(), make("host")
    cache = make(written_in_use=True)
    held: list[torch.Tensor] = [cache.empty(1000)]
    for _ in range(400):
        held[1:] = [each for each in held[1:] if draw.random() < 0.7]
        for _ in range(draw.randrange(4)):
            size = draw.choice([1, 2, 3, 7, 60, 128, 129, 1000, 5000])
            dtype = draw.choice([torch.uint8, torch.bfloat16, torch.float32, torch.bool])
            held.append(draw.choice([region, other]).empty(size, dtype))
        chosen = draw.sample([region, other, cache], draw.randrange(1, 4))
        memsaver.pause(chosen)
        if draw.random() < 0.3:
            held[1:] = held[2:]  # freed while it is paused
        memsaver.resume(chosen, restore={other.tag: draw.random() < 0.5} if other in chosen else True)
        for at in range(1, len(held)):
            held[at].fill_(draw.randrange(256 if held[at].dtype == torch.uint8 else 2))
        if draw.random() < 0.5:  # scratch, in the place of what was freed
            scratch = region.empty(draw.choice([1, 128, 1000, 5000]))
            del scratch
            scratch = region.empty(draw.choice([129, 1000, 5000]))  # not written
            memsaver.check_written()
            del scratch
        memsaver.check_written()


def test_memory_between_the_rows_of_a_tensor_and_beside_it_is_not_its_own(make: Make) -> None:
    """Bytes beside a tensor are the padding of rows, which no kernel reads, or other tensors of the allocation."""
    region = make()
    module: Any = nn.Module()
    module.views = [
        region.empty((6, 512))[:, :-256],
        region.empty((3, 4, 512))[..., :-256],
        region.empty((6, 512))[:, 64:-64].t(),
        region.empty((3, 512), torch.uint8)[1:, 5:-5],  # at an odd address
        region.empty(4096)[1000:2024].view(32, 32).t(),
        region.empty(4096)[1000:2024].view(4, 16, 16).permute(1, 2, 0),
    ]
    memsaver.name_tensors(module)
    region.pause()
    region.resume()
    for at, view in enumerate(module.views):
        with pytest.raises(memsaver.StaleError) as raised:
            memsaver.check_written(region)
        # A row of 502 bytes has 7 pieces of 64.
        stale = view.nbytes if view.dtype == torch.float32 else 2 * 7 * 64
        assert raised.value.tensors[0] == (f"views.{at}", view.nbytes, stale)
        view.fill_(1)
        view[-1, -1] = 2
    memsaver.check_written(region)


def test_names_of_tensors_without_memory_of_their_own_are_left_out(make: Make) -> None:
    region = make()
    model: Any = Model(region)
    dense = torch.eye(8)
    model.others = [dense.to_sparse(), dense.to_sparse_csr(), dense.to("meta")]
    model.others += [dense.to_mkldnn()] if torch.backends.mkldnn.is_available() else []
    model.later = nn.LazyLinear(4)
    memsaver.name_tensors(model)
    region.pause()
    region.resume()
    with pytest.raises(memsaver.StaleError) as raised:
        memsaver.check_written(region)
    assert {name for name, *_ in raised.value.tensors} == {
        f"layers.{name}" for name, _ in [*model.layers.named_parameters(), *model.layers.named_buffers()]
    }


@pytest.mark.parametrize("lazy", [False, True])
def test_contents_that_came_back_and_regions_without_a_resume_are_not_stale(make: Make, lazy: bool) -> None:
    kept, untouched, blank = make("host"), make(), make()
    held = [kept.empty(1000).fill_(2), untouched.empty(1000), blank.empty(1000)]
    memsaver.pause([kept, blank], lazy=lazy)
    memsaver.resume([kept, blank])
    memsaver.check_written([kept, untouched])
    assert bool((held[0] == 2).all())
    with pytest.raises(memsaver.StaleError):
        memsaver.check_written(blank)
    blank.pause(lazy=lazy)  # the pattern is still stale
    memsaver.check_written()  # of active regions
    blank.resume()
    with pytest.raises(memsaver.StaleError):
        memsaver.check_written()
    for restore in (False, True):  # not restored; then the pattern comes back, as contents that were kept
        kept.pause()
        kept.resume(restore=restore)
        with pytest.raises(memsaver.StaleError):
            memsaver.check_written(kept)


def test_scratch_in_the_place_of_a_freed_tensor_is_not_stale(make: Make) -> None:
    region = make()
    kept, freed = region.empty(1000), region.empty(1000)  # the chunk stays
    region.pause()
    region.resume()
    address, _ = freed.data_ptr(), kept.fill_(0)
    del freed
    scratch = region.empty(1000)
    assert scratch.data_ptr() == address
    memsaver.check_written(region)


@pytest.mark.parametrize("mode", ["check", "warn", "raise"])
def test_the_first_use_is_checked_as_the_option_says(make: Make, mode: str) -> None:
    memsaver.configure(stale=mode)
    region = make()
    tensor = region.empty(200)
    region.pause()
    region.resume()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            if mode == "raise":
                with pytest.raises(memsaver.StaleError):
                    stale.check_first_use([region])
            else:
                stale.check_first_use([region])
    assert len(warned) == (mode == "warn")  # once
    tensor.fill_(0)
    stale.check_first_use([region])


def test_off_is_off(make: Make) -> None:
    region, zeros = make(fill="zero"), make(fill="zero", written_in_use=True)
    tensor, zero = region.empty(1000), zeros.empty(1000)
    memsaver.pause([region, zeros])
    memsaver.resume([region, zeros])
    assert bool((tensor != 0).all()) and not bool(zero.any())
    memsaver.configure(stale="off")
    with pytest.raises(memsaver.Error, match="stale is 'off'"):
        memsaver.check_written()
    region.pause()
    region.resume()
    memsaver.configure(stale="check")
    memsaver.check_written()
