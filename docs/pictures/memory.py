r"""Draws memory.svg, the memory of a device by owner over time, from samples of `memsaver top`. Needs matplotlib.

    while sleep 0.2; do memsaver top --json | tr -d '\n'; date +' %s.%N'; done > samples.txt   # beside the program
    python docs/pictures/memory.py samples.txt --from 61 --to 87    # seconds after the first sample

memory.samples.txt has such samples, of which rows of the ledger alone were kept.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

OTHER, IDLE = "outside of regions", "idle in the pool"  # the first: CUDA contexts, libraries, torch's own memory


def read(file: Path) -> list[tuple[float, dict[str, float]]]:
    """Of each sample: seconds after the first, and GiB by owner."""
    found: list[tuple[float, dict[str, float]]] = []
    first: float | None = None
    for line in file.read_text().splitlines():
        text, _, time = line.rpartition(" ")
        first = first or float(time)
        gib: defaultdict[str, float] = defaultdict(float)
        for pool in json.loads(text)["pools"] if text else ():
            for row in pool["ledger"]["rows"]:
                owner = f"{row['name'].removeprefix('ray::Checked').partition('.')[0].lower()}: {row['label']}"
                kinds = {"region": owner, "pool idle": IDLE}
                gib[kinds.get(row["kind"], OTHER)] += row["bytes"] / 2**30
        found.append((float(time) - first, gib))
    return found


def draw(samples: list[tuple[float, dict[str, float]]], file: Path) -> None:
    total: defaultdict[str, float] = defaultdict(float)
    for _, gib in samples:
        for owner, each in gib.items():
            total[owner] += each
    colors: dict[str, object] = {OTHER: "#888888"}
    for role, shades in (("engine", "Blues"), ("trainer", "Oranges")):
        group = sorted((each for each in total if each.startswith(role)), key=lambda each: -total[each])
        for at, owner in enumerate(group):
            colors[owner] = matplotlib.colormaps[shades](0.85 - 0.6 * at / len(group))
    colors[IDLE] = "#f2f2f2"
    pyplot.rcParams["svg.hashsalt"] = "memsaver"  # the same file from the same samples
    _, axes = pyplot.subplots(figsize=(9, 4))
    times = [time - samples[0][0] for time, _ in samples]
    rows = [[gib.get(owner, 0.0) for _, gib in samples] for owner in colors]
    axes.stackplot(times, rows, labels=list(colors), colors=list(colors.values()), step="post", linewidth=0)
    axes.set(xlabel="s", ylabel="GiB", xlim=(0, times[-1]), ylim=(0, None))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    pyplot.tight_layout()
    pyplot.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--from", dest="first", type=float, default=0.0)
    parser.add_argument("--to", dest="last", type=float, default=float("inf"))
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".svg"))
    given = parser.parse_args()
    draw([each for each in read(given.samples) if given.first <= each[0] <= given.last], given.output)


if __name__ == "__main__":
    main()
