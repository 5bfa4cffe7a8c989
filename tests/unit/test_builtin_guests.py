"""The built-in guest of cuBLAS's workspaces."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import memsaver
from memsaver.guests import Workspaces
from tests.support import ROOT


@pytest.fixture
def workspaces(tag: str) -> str:
    """The tag of the guest."""
    memsaver.register(Workspaces(tag))
    return tag


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
    with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
        memsaver.guests.Nobody  # noqa: B018


def test_workspaces_are_cleared_before_the_cache_in_a_pause(workspaces: str, cuda: list[str]) -> None:
    with memsaver.capturing():
        with pytest.raises(memsaver.GuestError, match="a graph is being captured"):
            memsaver.pause(workspaces)
    assert cuda == []
    memsaver.pause(workspaces)
    memsaver.resume(workspaces)
    assert cuda == ["clear", "empty cache"]


def test_without_cuda_workspaces_do_nothing(workspaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("called"))
    assert memsaver.pause(workspaces).paused == (workspaces,)
