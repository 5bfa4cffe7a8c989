r"""Draws memory.svg, the memory of a device by owner over time, from samples of `memsaver top`.

    while sleep 0.2; do memsaver top --json | tr -d '\n'; date +' %s.%N'; done > samples.txt   # beside the program
    python docs/pictures/memory.py samples.txt --from 61 --to 87    # seconds after the first sample

memory.samples.txt, the default, has such samples, of which rows of the ledger alone were kept.
`memsaver trace plot` draws a trace.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from memsaver.trace.picture import Samples, draw
from memsaver.trace.writer import IDLE, OUTSIDE


def read(file: Path) -> Samples:
    found: Samples = []
    for line in file.read_text().splitlines():
        text, _, time = line.rpartition(" ")
        held: defaultdict[str, float] = defaultdict(float)
        for pool in json.loads(text)["pools"] if text else ():
            for row in pool["ledger"]["rows"]:
                owner = f"{row['name'].removeprefix('ray::Checked').partition('.')[0].lower()}: {row['label']}"
                kinds = {"region": owner, "pool idle": IDLE}
                held[kinds.get(row["kind"], OUTSIDE)] += row["bytes"]
        found.append((float(time), held))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, nargs="?", default=Path(__file__).with_suffix(".samples.txt"))
    parser.add_argument("--from", dest="first", type=float, default=0.0)
    parser.add_argument("--to", dest="last", type=float, default=float("inf"))
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".svg"))
    given = parser.parse_args()
    samples = read(given.samples)
    draw([each for each in samples if given.first <= each[0] - samples[0][0] <= given.last], given.output)


if __name__ == "__main__":
    main()
