"""The command ``memsaver``: starts a broker, shows who holds what, trims."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memsaver import _core, sockets
from memsaver.broker import Broker, raise_descriptor_limit
from memsaver.config import parse_size
from memsaver.errors import BrokerError, ConfigError, Error, gib
from memsaver.records import PAGE
from memsaver.visitor import Visitor

_REDRAW_S = 1.0
_CLEAR = "\x1b[H\x1b[J"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 1 with a message on stderr; wrong usage exits with 2."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except Error as error:
        print(f"memsaver: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memsaver", description="One GPU's memory, shared by several processes.")
    parser.add_argument("--version", action="version", version=f"memsaver {version('memsaver')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    broker = commands.add_parser("broker", help="own a device's memory and lend it to processes")
    broker.add_argument("--device", help="index, cuda:INDEX, UUID, or cpu (default: GPU 0, without one the cpu)")
    broker.add_argument("--capacity", type=_size, metavar="SIZE", help="most to lend (default: 90 %% of a GPU)")
    broker.add_argument(
        "--linger", type=_seconds, metavar="SECONDS", help="end after so long without clients; else never"
    )
    broker.add_argument("--detach", action="store_true", help="go on in the background once clients are accepted")
    broker.set_defaults(run=_broker)

    top = commands.add_parser("top", help="show processes, regions and free memory of the shared pools")
    top.add_argument("--device", help="that of one pool alone (default: all pools of this user)")
    top.add_argument("--json", action="store_true", help="print it once, as JSON")
    top.set_defaults(run=_top)

    trim = commands.add_parser("trim", help="give idle memory of the shared pools back to the driver")
    trim.add_argument("--device", help="that of one pool alone (default: all pools of this user)")
    trim.add_argument("--keep", type=_size, default=0, metavar="SIZE", help="idle memory to keep (default: 0)")
    trim.set_defaults(run=_trim)
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text, "SIZE")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected seconds of 0 or more")
    return seconds


def _broker(options: argparse.Namespace) -> int:
    if options.detach:
        return _detached(lambda told: _serve(options, told))
    return _serve(options, lambda: None)


def _serve(options: argparse.Namespace, told: Callable[[], None]) -> int:
    logging.basicConfig(format="%(asctime)s memsaver broker: %(message)s", level=logging.INFO)
    name = _device(options.device)
    memory = _core.open_host_memory() if name == "cpu" else _core.open_cuda_memory(_ordinal(name))
    total = memory.total_bytes()
    capacity = options.capacity
    if capacity is None:  # contexts, and what torch has outside of regions, are on a GPU as well
        capacity = total if name == "cpu" else total * 9 // 10
    if capacity > total:
        text = f"the capacity is {gib(capacity)} ({capacity} bytes), and {name} has {gib(total)} ({total} bytes)"
        raise ConfigError(text, option="capacity", value=capacity)
    if capacity < PAGE:
        text = f"the capacity is {capacity} bytes, expected at least {PAGE}"
        raise ConfigError(text, option="capacity", value=capacity)
    raise_descriptor_limit()
    broker = Broker(memory, name, capacity // PAGE * PAGE, sockets.Listener(memory.uuid()), options.linger)
    told()
    broker.run()
    return 0


def _detached(run: Callable[[Callable[[], None]], int]) -> int:
    """Runs in a child that outlives this process, which ends when the child has called what it is given, or failed.

    Before the core is in use: a fork copies none of its threads, and no driver's state.
    """
    ready, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        if os.read(ready, 1):
            return 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ready)
    os.setsid()

    def told() -> None:
        os.write(tell, b"1")
        os.close(tell)

    try:
        return run(told)
    except Exception as error:
        print(f"memsaver: {error}", file=sys.stderr)
        return 1


def _device(text: str | None) -> str:
    """``"cuda:INDEX"`` or ``"cpu"``, from what a user wrote."""
    count = _core.cuda_device_count()
    if text is None:
        return "cuda:0" if count else "cpu"
    if text == "cpu":
        return text
    uuids = {str(_core.cuda_uuid(index)).lower(): index for index in range(count)}
    number = text.removeprefix("cuda:")
    index = uuids.get(text.lower(), int(number) if number.isascii() and number.isdigit() else -1)
    if not 0 <= index < count:
        there = ", ".join(["cpu", *(f"cuda:{each} ({uuid})" for uuid, each in uuids.items())])
        raise ConfigError(f"there is no device {text!r}; there are {there}", option="device", value=text)
    return f"cuda:{index}"


def _ordinal(name: str) -> int:
    return int(name.removeprefix("cuda:"))


def _paths(device: str | None) -> list[Path]:
    """The sockets of the brokers that a command is about. Raises BrokerError where there is none."""
    if device is None:
        found = sockets.found()
        if not found:
            where = sockets.directory()
            raise BrokerError(f"no broker of a shared pool runs (looked in {where})", path=str(where))
        return found
    name = _device(device)
    uuid = _core.open_host_memory().uuid() if name == "cpu" else _core.cuda_uuid(_ordinal(name))
    return [sockets.socket_path(uuid)]


def _trim(options: argparse.Namespace) -> int:
    for path in _paths(options.device):
        with Visitor(path) as visitor:
            print(f"{visitor.status()['device']} ({path.stem}): {gib(visitor.trim(options.keep))} given back")
    return 0


def _top(options: argparse.Namespace) -> int:
    while True:
        pools = []
        for path in _paths(options.device):
            with Visitor(path) as visitor:
                pools.append(visitor.status())
        if options.json:
            print(json.dumps({"pools": pools}))
            return 0
        table = "\n\n".join("\n".join(_lines(pool)) for pool in pools) + "\n"
        if not sys.stdout.isatty():  # nobody watches: once
            sys.stdout.write(table)
            return 0
        sys.stdout.write(_CLEAR + table)
        sys.stdout.flush()
        time.sleep(_REDRAW_S)


def _lines(pool: dict[str, Any]) -> list[str]:
    """One pool, for people to read."""
    free = pool["capacity_bytes"] - pool["total_bytes"] + pool["idle_bytes"]
    lines = [
        f"{pool['device']} ({pool['uuid']})",
        f"  capacity {gib(pool['capacity_bytes'])}, free {gib(free)}, of that {gib(pool['idle_bytes'])} idle",
        "",
        f"  {'pid':>8}  {'process':<20} {'region':<24} {'state':<9} {'backup':<7}"
        f"{'allocated':>12} {'mapped':>12} {'backed up':>12}",
    ]
    for client in pool["clients"]:
        notes = [f"holds {gib(client['held_bytes'])}"]
        if client["attached_bytes"]:
            notes.append(f"attached to {gib(client['attached_bytes'])}")
        for each in client["waiting"]:
            notes.append(
                f"waits for {gib(each['needed_bytes'])} since {each['seconds']:.1f} s, has {gib(each['granted_bytes'])}"
            )
        if not client["connected"]:
            notes.append("not connected")
        age = client["report_age_s"]
        if age is None or age > _REDRAW_S:
            notes.append("no report" if age is None else f"does not answer since {age:.0f} s")
        lines.append(f"  {client['pid']:>8}  {client['name'][:20]:<20} {', '.join(notes)}")
        for region in client["regions"]:
            lines.append(
                f"  {'':>8}  {'':<20} {region['tag'][:24]:<24} {region['state']:<9} {region['backup']:<7}"
                + "".join(f"{gib(region[key]):>13}" for key in ("allocated_bytes", "mapped_bytes", "backup_bytes"))[1:]
            )
    return lines
