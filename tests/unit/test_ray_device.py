"""The device of an actor, from Ray's assignment and CUDA_VISIBLE_DEVICES. Ray is replaced by a stub."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402

placement = import_module("memsaver.ray.placement")  # the package has a function of this name
Play = Callable[..., None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    def set_up(assigned: list[str], visible: str | None, part_of_ray: bool = True) -> None:
        context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned, "TPU": []})
        monkeypatch.setattr(placement.ray, "is_initialized", lambda: part_of_ray)
        monkeypatch.setattr(placement.ray, "get_runtime_context", lambda: context)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return set_up


@pytest.mark.parametrize(
    ("assigned", "visible", "expected"),
    [
        (["3"], "3", "cuda:0"),  # Ray shows one alone
        (["3"], None, "cuda:3"),  # NOSET: all are there
        (["6"], "4,5,6,7", "cuda:2"),  # NOSET on a node whose raylet was shown some
        (["6"], "4, 5, 6, 7", "cuda:2"),
        (["GPU-6a"], "GPU-5b,GPU-6a", "cuda:1"),
        ([], None, "cpu"),
        ([], "", "cpu"),
        ([], "0,1", "cpu"),  # there are some, and none for this actor
    ],
)
def test_the_device_is_the_assigned_gpu_as_cuda_counts(
    play: Play, assigned: list[str], visible: str | None, expected: str
) -> None:
    play(assigned, visible)
    assert placement.device() == expected


@pytest.mark.parametrize(
    ("assigned", "visible", "text"),
    [
        (["1", "0"], None, r"assigned 2 GPUs to this process \(cuda:0, cuda:1\), expected one"),
        (["3"], "0,1", "assigned the GPU '3', and CUDA_VISIBLE_DEVICES is '0,1'"),
        (["0"], "", "CUDA_VISIBLE_DEVICES is ''"),
        (["1"], "1,1", "CUDA_VISIBLE_DEVICES is '1,1'"),
        (["GPU-6a"], None, "assigned the GPU 'GPU-6a', and CUDA_VISIBLE_DEVICES is not set"),
    ],
)
def test_an_ambiguous_gpu_assignment_raises(play: Play, assigned: list[str], visible: str | None, text: str) -> None:
    play(assigned, visible)
    with pytest.raises(memsaver.Error, match=text):
        placement.device()


def test_outside_of_ray_there_is_no_device(play: Play) -> None:
    play([], None, part_of_ray=False)
    with pytest.raises(memsaver.Error, match="not part of a Ray cluster"):
        placement.device()
