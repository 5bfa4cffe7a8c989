"""The built-in guest of cuBLAS's workspaces."""

from __future__ import annotations

import pytest
import torch

import memsaver
from memsaver.guests import Workspaces


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
