"""Built-in guests: cuBLAS's workspaces, torch's pinned host cache, stacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memsaver
from memsaver import _core
from memsaver.guests import HostCache, Workspaces
from tests.fake_cuda import run_on_fake
from tests.support import MIB, ROOT, Block, host_held_bytes, host_used_bytes

Make = Callable[..., memsaver.Region]


@pytest.fixture
def registered() -> Iterator[Callable[[memsaver.Guest], memsaver.Guest]]:
    made: list[memsaver.Guest] = []

    def register(guest: memsaver.Guest) -> memsaver.Guest:
        memsaver.register(guest)
        made.append(guest)
        return guest

    yield register
    for guest in made:
        memsaver.unregister(guest)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls to a torch with CUDA."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty cache"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("clear"), raising=False)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append("empty host cache"), raising=False)
    return calls


def test_importing_guests_loads_no_torch() -> None:
    program = "import sys, memsaver; memsaver.guests.Stacks; dir(memsaver.guests); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_unknown_guest_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
        memsaver.guests.Nobody  # noqa: B018


# Workspaces and the host cache


def test_workspaces_are_cleared_before_the_cache_in_a_pause(make: Make, registered: Any, cuda: list[str]) -> None:
    region = make()
    registered(Workspaces(region.tag))
    region.pause()
    region.resume()
    assert cuda == ["clear", "empty cache"]


def test_host_cache_is_released_before_host_memory_is_reserved(make: Make, registered: Any, cuda: list[str]) -> None:
    region = make("host")
    block = Block(region, host_held_bytes() - host_used_bytes() + 5 * MIB)
    registered(HostCache(region.tag))
    memsaver.configure(host_limit=0)
    with pytest.raises(memsaver.BackupError):
        region.pause()
    assert cuda == ["empty host cache"]
    block.check()


def test_host_cache_has_another_name_in_other_versions(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    monkeypatch.setattr(torch._C, "_accelerator_emptyHostCache", lambda: cuda.append("newer"), raising=False)
    HostCache("tag").prepare()
    assert cuda == ["newer"]


def test_workspaces_refuse_a_pause_during_a_capture(tag: str, registered: Any, cuda: list[str]) -> None:
    registered(Workspaces(tag))
    with memsaver.capturing():
        with pytest.raises(memsaver.GuestError, match="a graph is being captured"):
            memsaver.pause(tag)
    assert cuda == []
    assert not _core.capturing()


def test_without_cuda_neither_does_anything(tag: str, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("called"))
    registered(Workspaces(tag))
    registered(HostCache(tag))
    assert memsaver.pause(tag).paused == (tag,)


# Stacks


def test_stacks_shrink_with_the_pause_after_the_other_guests() -> None:
    run_on_fake(
        """
import memsaver
from memsaver import _core
from tests.fake_cuda import control
from tests.support import MIB

def stacks(device="cuda:0"):
    return _core.ledger_figures(device)["stack_bytes"]

class Connections(memsaver.Guest):
    def leave(self):
        control.set_stack_limit(0, 2048)  # its last kernel needs it
    def come_back(self):
        control.set_stack_limit(0, 1744)

regions = [memsaver.region("params", device=f"cuda:{number}") for number in (0, 1)]
memsaver.register(memsaver.guests.Stacks("params"))
memsaver.register(Connections("connections", "params"))
assert stacks() == 264 * MIB
control.set_stack_limit(0, 1744), control.set_stack_limit(1, 1744)
assert stacks() == stacks("cuda:1") == 450 * MIB
memsaver.pause("params")
assert stacks() == stacks("cuda:1") == 264 * MIB
memsaver.resume("params")
assert stacks() == 450 * MIB
control.fail("cuCtxSetLimit", 1)
try:
    memsaver.pause("params")
    raise AssertionError
except memsaver.errors.GuestError as error:
    assert error.guest == "stacks" and "cuCtxSetLimit" in str(error), error
assert regions[0].state == "active"
memsaver.pause("params")
assert stacks() == 264 * MIB
""",
        devices=2,
    )


def test_stacks_stay_if_a_capture_begins_between_the_halves_of_a_pause() -> None:
    run_on_fake("""
import memsaver
from memsaver import _core
from memsaver.transitions import prepare_pause
from tests.fake_cuda import control

def stacks():
    return _core.ledger_figures("cuda:0")["stack_bytes"]

region = memsaver.region("params", device="cuda:0")
memsaver.register(memsaver.guests.Stacks("params"))
control.set_stack_limit(0, 1744)
large = stacks()
prepared = prepare_pause("params")
with memsaver.capturing():
    prepared.commit()
    assert region.state == "paused" and stacks() == large
memsaver.resume("params")
memsaver.pause("params")
assert stacks() < large
""")
