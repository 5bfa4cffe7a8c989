"""The sampler, and the picture of samples from several devices. A run's own picture is tested in test_loop.py."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("ray", reason="needs ray")

from examples.colocate import picture, sampler  # noqa: E402
from examples.colocate.report import Span  # noqa: E402
from examples.colocate.sampler import Sample, Sampler  # noqa: E402
from examples.colocate.timeline import ProcessSamples, Timeline  # noqa: E402

GIB = 1 << 30


@pytest.fixture
def device() -> str:
    pytest.importorskip("torch")
    return "cpu"


def test_a_sampler_samples_by_itself_and_around_a_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "INTERVAL_S", 60.0)
    first = threading.Event()
    state = [{"weights": 7, "kv_cache": 3}]

    def read() -> dict[str, int]:
        if threading.current_thread() is not threading.main_thread():
            first.set()
        return state[0]

    monkeypatch.setattr(sampler, "mapped_bytes", read)
    found = Sampler()
    with found.around():  # no sample: it does not run
        pass
    begin = time.monotonic()
    found.start()
    found.start()
    assert first.wait(30)
    with found.around():
        state[0] = {"weights": 0}
    samples = found.stop()
    end = time.monotonic()
    # By start, by the thread, before and after the transition, and by the thread's end.
    assert [each.regions for each in samples] == [{"weights": 7, "kv_cache": 3}] * 3 + [{"weights": 0}] * 2
    times = [each.time for each in samples]
    assert begin <= times[0] and times == sorted(times) and times[-1] <= end
    assert found.stop() == []


def test_a_sample_that_fails_ends_the_sampling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "INTERVAL_S", 60.0)
    fails = False

    def read() -> dict[str, int]:
        if fails:
            raise RuntimeError("no figures")
        return {}

    monkeypatch.setattr(sampler, "mapped_bytes", read)
    found = Sampler()
    found.start()
    fails = True
    with found.around():
        pass
    assert 1 <= len(found.stop()) <= 2
    fails = False
    found.start()
    assert len(found.stop()) >= 2  # it works again


def two_devices() -> Timeline:
    """A step of two pairs on two devices of 79 GiB, from 100.0 to 104.0. A transition takes 0.3 s."""
    phases = [("rollout", 100.0, 101.5), ("train", 101.8, 103.2), ("sync", 103.3, 103.5), ("rollout", 103.8, 104.0)]
    held = {
        "engine": {"kv_cache": 43, "weights": 3, "cuda_graph": 2},
        "trainer": {"workspace": 39, "params": 6, "optimizer": 12, "grads": 6},
    }
    resident = {"rollout": {"engine": set(held["engine"])}, "train": {"trainer": set(held["trainer"])}}
    resident["sync"] = {"engine": {"weights"}, "trainer": {"params"}}
    processes = []
    for rank in (0, 1):
        for role, tags in held.items():
            samples = [
                Sample(at, {tag: size * GIB * (tag in resident[phase].get(role, ())) for tag, size in tags.items()})
                for phase, begin, end in phases
                for at in (begin, end)
            ]
            processes.append(ProcessSamples(role, rank, 10 + rank, f"GPU-{rank}", 79 * GIB, "boot", samples))
    spans = [Span(*each) for each in phases]
    return Timeline("NVIDIA H100", "2026-11-22", "0123456", spans, [Span("7", 100.0, 104.0)], processes, ["engine 2"])


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_each_device_has_its_own_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "two.svg"
    picture.write(two_devices(), path)
    found = texts(path)
    assert [text for text in found if "capacity" in text] == ["device 0: capacity 79 GiB", "device 1: capacity 79 GiB"]
    assert found.count("all processes resident at once: 111 GiB, does not fit") == 2
    assert found.count("engine: CUDA graphs") == 2 and found.count("trainer: gradients") == 2
    assert found.count("train") == 2 and found.count("rollout") == 4
    assert "Device memory of the regions, step 7: NVIDIA H100, 2026-11-22" in found
    assert "without engine 2 on other machines" in capsys.readouterr().out
    assert Timeline.load(tmp_path / "two.samples.json") == two_devices()


def test_the_last_steps_of_a_timeline_keep_their_phases() -> None:
    long = two_devices()
    steps = [Span("7", 100.0, 103.0), Span("8", 103.0, 104.0)]
    last = Timeline(**{**vars(long), "steps": steps}).last_steps(1)
    assert last.steps == steps[1:]
    assert last.phases == [Span("train", 103.0, 103.2), *long.phases[2:]]
