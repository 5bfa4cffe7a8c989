"""Common parts of the command lines: wrong arguments are reported before the measurement begins."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable

from support.environment import need_cuda

CPU_HELP = "cpu: the host driver, with small sizes by default; figures mean nothing there"


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    """``doc``: the benchmark's, whose first line --help begins with."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0])


def add_device(parser: argparse.ArgumentParser, numbered: bool = True) -> None:
    """``numbered``: any one GPU can be chosen; otherwise it is the first, or as many as the benchmark needs."""
    if numbered:
        parser.add_argument("--device", type=_device, default="cuda:0", help=f"cuda:N; {CPU_HELP}")
    else:
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=CPU_HELP)


def add_small(parser: argparse.ArgumentParser) -> None:
    """On the CPU `parse` turns it on: the full measurement would take hours there."""
    parser.add_argument("--small", action="store_true", help="tiny shapes and loads, for a trial; --device cpu sets it")


def parse(parser: argparse.ArgumentParser, **sizes: tuple[float, float]) -> argparse.Namespace:
    """Ends with a word for arguments that are wrong, and where ``--device`` is not there.

    ``sizes``: the values of options without a default, on a GPU and on the CPU.
    """
    options = parser.parse_args()
    device = getattr(options, "device", "cuda")
    need_cuda(device)
    if device == "cpu" and "small" in options:
        options.small = True
    for name, by_device in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, by_device[device == "cpu"])
    return options


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of 1 or more")
    return int(text)


def positive(text: str) -> float:
    return _number(text, lambda value: value > 0, "above 0")


def not_negative(text: str) -> float:
    return _number(text, lambda value: value >= 0, "of 0 or more")


def directory(text: str) -> str:
    """One that files can be made in."""
    if not (os.path.isdir(text) and os.access(text, os.W_OK | os.X_OK)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a directory that can be written to")
    return text


def _number(text: str, fits: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (fits(value) and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number {what}")
    return value


def _device(text: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected cuda, cuda:N or cpu")
    return "cuda:0" if text == "cuda" else text
