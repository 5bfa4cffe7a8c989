"""The built-in guest of cuBLAS's workspaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memsaver
from memsaver import _core
from memsaver.guests import Workspaces
from tests.support import ROOT

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
    return calls


def test_importing_guests_loads_no_torch() -> None:
    program = "import sys, memsaver; memsaver.guests.__all__; dir(memsaver.guests); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_unknown_guest_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
        memsaver.guests.Nobody  # noqa: B018


def test_workspaces_are_cleared_before_the_cache_in_a_pause(make: Make, registered: Any, cuda: list[str]) -> None:
    region = make()
    registered(Workspaces(region.tag))
    region.pause()
    region.resume()
    assert cuda == ["clear", "empty cache"]


def test_workspaces_refuse_a_pause_during_a_capture(tag: str, registered: Any, cuda: list[str]) -> None:
    registered(Workspaces(tag))
    with memsaver.capturing():
        with pytest.raises(memsaver.GuestError, match="a graph is being captured"):
            memsaver.pause(tag)
    assert cuda == []
    assert not _core.capturing()


def test_without_cuda_workspaces_do_nothing(tag: str, registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("called"))
    registered(Workspaces(tag))
    assert memsaver.pause(tag).paused == (tag,)
