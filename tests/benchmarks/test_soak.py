"""The verdict of the soak test: growth is found, fluctuation is not taken for growth."""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MIB = 1 << 20


@pytest.fixture(scope="module")
def footprint() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("support.footprint")
    finally:
        sys.path.remove(str(BENCHMARKS))


def run(samples: int, seed: int, leak: float = 0, begin: int = 180 * MIB) -> list[dict[str, dict[str, int]]]:
    """Samples of one call, with noise of 8 MiB."""
    choose = random.Random(seed)
    return [
        {"client": {"rss": begin + choose.randrange(8 * MIB) + int(leak * number), "descriptors": 12}}
        for number in range(samples)
    ]


def verdicts(footprint: ModuleType, runs: list[list[dict[str, dict[str, int]]]]) -> dict[str, bool]:
    return {growth.figure: growth.is_too_much for growth in footprint.growths(runs)}


def test_a_leak_is_found_and_noise_is_not(footprint: ModuleType) -> None:
    for seed in range(20):
        assert verdicts(footprint, [run(50, seed)]) == {"rss": False, "descriptors": False}
        assert verdicts(footprint, [run(50, seed, leak=0.8 * MIB)]) == {"rss": True, "descriptors": False}


def test_growth_is_summed_over_runs_of_different_levels(footprint: ModuleType) -> None:
    runs = [run(25, seed, leak=0.9 * MIB, begin=begin) for seed, begin in ((1, 300 * MIB), (2, 100 * MIB))]
    assert verdicts(footprint, runs)["rss"]
    assert not verdicts(footprint, [run(25, 1, begin=100 * MIB), run(25, 2, begin=300 * MIB)])["rss"]
    assert footprint.counted(runs) == 46


def test_short_runs_are_not_counted(footprint: ModuleType) -> None:
    short = run(footprint.FEWEST - 1, 0, leak=100 * MIB)
    assert footprint.growths([short]) == [] and footprint.counted([short]) == 0
    assert verdicts(footprint, [short, run(50, 1)]) == {"rss": False, "descriptors": False}


def test_every_figure_of_a_process_has_a_tolerance(footprint: ModuleType) -> None:
    assert set(footprint.of_process(os.getpid())) <= set(footprint.TOLERANCES)
