"""The phases of the benchmarks of a group's turn, and their figures: those of a turn beyond its slowest rank."""

from __future__ import annotations

import statistics
from typing import Any

PHASES = {"rollout": {"engine": ["engine"]}, "train": {"trainer": ["trainer"]}}
WARM_UP = 5  # turns that do not count
FIGURES = ("beyond_seconds", "turn_seconds", "slowest_rank_seconds")


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[max(0, -(-99 * len(ordered) // 100) - 1)]
    return {"median": statistics.median(ordered), "p99": p99, "largest": ordered[-1]}


def print_table(result: dict[str, Any]) -> None:
    """Prints the summaries of a result, a line each."""
    for name in FIGURES:
        print(f"  {name.removesuffix('_seconds').replace('_', ' '):14}", end="")
        print("".join(f"{key:>10} {seconds * 1e3:8.1f} ms" for key, seconds in result[name].items()))
