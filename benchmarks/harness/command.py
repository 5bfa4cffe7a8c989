"""The command line of a benchmark: its options, its tables and checks, and its JSON line."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from benchmarks.harness.machine import GIB, MIB, environment, visible_gpus
from benchmarks.harness.processes import Failed

T = TypeVar("T")
Rows = Mapping[str, Mapping[str, Any]]


class Options(argparse.ArgumentParser):
    """The options of a benchmark. Each has --device, --small and --save.

    The module has ``DEVICES``, of "cuda" and "cpu", and ``GPUS`` if it needs several.
    """

    def __init__(self, name: str, module: ModuleType) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m benchmarks {name}", description=module.__doc__, formatter_class=raw)
        self._gpus: int = getattr(module, "GPUS", 1)
        self._sizes: dict[str, tuple[Any, Any]] = {}
        about = "cuda: from the first visible GPU on; cpu: the host driver, small sizes, and times that mean nothing"
        self.add_argument("--device", choices=module.DEVICES, default=module.DEVICES[0], help=about)
        self.add_argument("--small", action="store_true", help="sizes of a trial; the CPU has them always")
        self.add_argument("--save", type=directory, metavar="DIR", help="append the JSON line to a file in DIR")

    def size(self, option: str, kind: Callable[[str], Any], full: Any, small: Any, help: str) -> None:
        """Adds an option with one default for a measurement, and one for ``--small``."""
        self.add_argument(option, type=kind, help=f"{help} (default: {full}, small: {small})")
        self._sizes[option.removeprefix("--").replace("-", "_")] = full, small

    def choice(self, option: str, of: Any, help: str) -> None:
        """Adds an option that takes some of several names. By default it has all."""
        self.add_argument(option, nargs="+", choices=tuple(of), default=tuple(of), help=help)

    def read(self, arguments: list[str]) -> argparse.Namespace:
        """Raises SystemExit for arguments that are wrong, and if the GPUs are missing."""
        options = self.parse_args(arguments)
        if options.device == "cpu":
            options.small = True
            # Processes with the same size share a host device: this run has a size of its own.
            os.environ.setdefault("MEMSAVER_HOST_DEVICE", str(4 * GIB + os.getpid() % 100 * 2 * MIB))
        elif (seen := visible_gpus()) < self._gpus:
            needs = f"{self._gpus} CUDA devices" if self._gpus > 1 else "a CUDA device"
            raise SystemExit(f"this benchmark needs {needs}, and torch sees {seen or 'none'}")
        for name, sizes in self._sizes.items():
            if getattr(options, name) is None:
                setattr(options, name, sizes[options.small])
        return options


class Run:
    """One run of a benchmark: prints figures as they come, and collects them for the JSON line."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.device: str = "cpu" if options.device == "cpu" else "cuda:0"
        self.small: bool = options.small
        self.failures: list[str] = []
        about = {key: value for key, value in vars(options).items() if key not in ("device", "save")}
        self._line: dict[str, Any] = {"benchmark": name, **environment(self.device), "options": about}
        self._line |= {"tables": {}, "checks": [], "failures": self.failures}

    def say(self, text: str) -> None:
        print(text, flush=True)

    def keep(self, **figures: Any) -> None:
        """Puts figures into the JSON line alone, such as all samples of a median."""
        self._line |= figures

    def table(self, title: str, rows: Rows) -> None:
        """Prints rows, and keeps them by title, row and column. A column names its unit; None is a missing figure."""
        self._line["tables"][title] = {name: dict(row) for name, row in rows.items()}
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines = [("", columns), *((name, [_text(row.get(column)) for column in columns]) for name, row in rows.items())]
        widths = [max(len(cells[at]) for _, cells in lines) for at in range(len(columns))]
        name_width = max(len(name) for name, _ in lines)
        self.say(f"\n{title}")
        for name, cells in lines:
            self.say(f"  {name:{name_width}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths)))

    def check(self, what: str, holds: bool, figure: Any = "", at_full_size: bool = False) -> None:
        """A condition of the run, which fails if it does not hold. ``at_full_size``: small sizes do not decide it."""
        decided = None if at_full_size and self.small else bool(holds)
        self._line["checks"].append({"check": what, "figure": figure, "holds": decided})
        word = {True: "holds", False: "FAILS", None: "not decided at this size"}[decided]
        self.say(f"  {word}: {what}" + (f": {_text(figure)}" if figure != "" else ""))
        if decided is False:
            self.failures.append(f"{what}: {figure}")

    def attempt(self, what: str, call: Callable[[], T]) -> T | None:
        """The result of a part, or None if it fails: the other parts continue, and the run has failed."""
        try:
            return call()
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            self.say(f"  FAILED: {self.failures[-1]}")
            print(error.details if isinstance(error, Failed) else traceback.format_exc(), file=sys.stderr)
            return None

    def parts(self, every: Mapping[str, Callable[..., object]], *given: Any) -> None:
        """Calls the parts that ``--only`` names, each with the run and ``given``."""
        for name in self.options.only:
            self.attempt(name, partial(every[name], self, *given))

    def end(self, seconds: float) -> int:
        """Prints the JSON line. Returns the exit status."""
        line = json.dumps({**self._line, "seconds": seconds})
        if self.options.save is not None:
            machine = re.sub(r"\W+", "-", self._line["device"].partition(",")[0].lower())
            path = Path(self.options.save, f"{self._line['date']}-{machine}-{self.name.replace('_', '-')}.jsonl")
            with path.open("a") as file:
                file.write(line + "\n")
        self.say(f"\ntook {seconds:.0f} s, {len(self.failures) or 'no'} failures\n{line}")
        return 1 if self.failures else 0


def run(name: str, module: ModuleType, arguments: list[str]) -> int:
    """Runs a benchmark's ``measure()`` with the options that its ``options()`` adds. Returns the exit status."""
    parser = Options(name, module)
    module.options(parser)
    begun, made = time.monotonic(), Run(name, parser.read(arguments))
    made.attempt(name, partial(module.measure, made))  # the figures until a failure are printed in any case
    return made.end(time.monotonic() - begun)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of 1 or more")
    return int(text)


def number(text: str) -> float:
    if (value := not_negative(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number above 0")
    return value


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number of 0 or more")
    return value


def directory(text: str) -> str:
    if not (os.path.isdir(text) and os.access(text, os.W_OK | os.X_OK)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a directory that can be written to")
    return text


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
