"""The command ``memsaver``: starts and stops brokers, shows their status, and releases idle memory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence, Set
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memsaver import _adapter, _core, ledger
from memsaver.broker import daemon, discovery, procfs
from memsaver.broker.admin import AdminClient
from memsaver.broker.clients import PAGE
from memsaver.broker.loop import BrokerLoop, raise_descriptor_limit
from memsaver.config import Setting, parse_drop_in, parse_size, settings
from memsaver.drop_in import startup
from memsaver.errors import BrokerError, ConfigError, Error, gib
from memsaver.policies import BACKUPS

_REDRAW_S = 1.0
_CLEAR = "\x1b[H\x1b[J"
_WIDEST_NAME = 40  # characters of a process in the table of `top`


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 1 with a message on stderr. Exits with 2 on wrong usage."""
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

    broker = commands.add_parser("broker", help="start the process that holds the shared pool of a device")
    broker.add_argument(
        "--device",
        help="index, cuda:INDEX, UUID, or cpu (default: GPU 0, or cpu on a machine without GPUs; with --stop: all)",
    )
    broker.add_argument(
        "--capacity", type=_size, metavar="SIZE", help="most to lend (default: 90 %% of a GPU, all of the host device)"
    )
    broker.add_argument(
        "--linger", type=_seconds, metavar="SECONDS", help="end after so long without clients; else never"
    )
    broker.add_argument("--detach", action="store_true", help="run in the background, with a log beside the socket")
    broker.add_argument(
        "--stop", action="store_true", help="stop the running broker of --device; without --device all of this user"
    )
    broker.set_defaults(run=_broker)

    top = commands.add_parser(
        "top",
        help="show processes, regions and free memory of the shared pools",
        description="Each process, region, state and bytes of the shared pools, live in a terminal, else once. For a"
        " device without a pool: its processes, by the driver's list.",
    )
    top.add_argument("--device", help="only this one (default: all pools of this user, and all GPUs)")
    top.add_argument("--once", action="store_true", help="print it once, also in a terminal")
    top.add_argument("--json", action="store_true", help="print it once, as JSON")
    top.set_defaults(run=_top)

    trim = commands.add_parser("trim", help="give idle memory of the shared pools back to the driver")
    trim.add_argument("--device", help="that of one pool alone (default: all pools of this user)")
    trim.add_argument("--keep", type=_size, default=0, metavar="SIZE", help="idle memory to keep (default: 0)")
    trim.set_defaults(run=_trim)

    run = commands.add_parser(
        "run",
        help="run a Python program with all of its GPU memory in regions",
        description="Each allocation by cudaMalloc lies in a region. torch_memory_saver's API pauses and resumes it.",
    )
    run.add_argument(
        "--backup", choices=BACKUPS, default="host", help="where a pause keeps the contents (default: host)"
    )
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="as in: -- python train.py")
    run.set_defaults(run=_run)

    drop_in = commands.add_parser("drop-in", help="let Python prepare drop-ins when it starts")
    actions = drop_in.add_subparsers(required=True, metavar="ACTION")
    install = actions.add_parser("install", help="write a file into this environment that turns drop-ins on")
    install.add_argument("names", nargs="+", metavar="NAME", help="vllm, tms, vllm:warn or tms:warn")
    install.set_defaults(run=_drop_in_install)
    remove = actions.add_parser("remove", help="remove this file")
    remove.set_defaults(run=_drop_in_remove)
    path = actions.add_parser("path", help="print a folder for PYTHONPATH, with MEMSAVER_DROP_IN, in place of the file")
    path.set_defaults(run=_drop_in_path)

    config = commands.add_parser("config", help="show each option, its value, and the source of the value")
    config.add_argument("--json", action="store_true", help="print them as JSON")
    config.add_argument("--touched", action="store_true", help="show the changes of other libraries' state instead")
    config.set_defaults(run=_config)
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
    if options.stop:
        return _stop(options)
    if options.detach:
        return daemon.detach(lambda on_ready: _serve(options, on_ready))
    return _serve(options, None)


def _stop(options: argparse.Namespace) -> int:
    for path in _paths(options.device):
        with AdminClient(path) as client:
            device = client.status()["device"]
        print(f"{device} ({path.stem}): stopped the broker with pid {daemon.stop(path)}")
    return 0


def _serve(options: argparse.Namespace, on_ready: Callable[[Path], None] | None) -> int:
    """Serves clients until the broker ends. ``on_ready``: called when clients are accepted, with the socket's path."""
    logging.basicConfig(format="%(asctime)s memsaver broker: %(message)s", level=logging.INFO)
    name = _device(options.device)
    memory = _core.open_host_memory() if name == "cpu" else _core.open_cuda_memory(_ordinal(name))
    if memory.under_mps():
        raise procfs.mps_error(name)
    total = memory.total_bytes()
    capacity = options.capacity
    if capacity is None:  # the rest of a GPU is for contexts, and for torch's memory outside of regions
        capacity = total if name == "cpu" else total * 9 // 10
    if capacity > total:
        text = f"the capacity is {gib(capacity)} ({capacity} bytes), and {name} has {gib(total)} ({total} bytes)"
        raise ConfigError(text, option="capacity", value=capacity)
    if capacity < PAGE:
        text = f"the capacity is {capacity} bytes, expected at least {PAGE}"
        raise ConfigError(text, option="capacity", value=capacity)
    raise_descriptor_limit()
    listener = discovery.Listener(memory.uuid())
    broker = BrokerLoop(memory, name, capacity // PAGE * PAGE, listener, options.linger)
    if on_ready is not None:
        log = listener.path.with_suffix(".log")
        print(f"the broker of {name} ({memory.uuid()}) runs with pid {os.getpid()}, its log is {log}")
        on_ready(listener.path)
    broker.run()
    return 0


def _device(text: str | None) -> str:
    """Parses an option: ``"cuda:INDEX"`` or ``"cpu"``."""
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
        raise ConfigError(f"there is no device {text!r}; the devices are: {there}", option="device", value=text)
    return f"cuda:{index}"


def _ordinal(name: str) -> int:
    return int(name.removeprefix("cuda:"))


def _paths(device: str | None) -> list[Path]:
    """The sockets of the running brokers that a command applies to. Raises BrokerError if there is none."""
    found = discovery.found()
    if not found:
        where = discovery.directory()
        others = len(discovery.elsewhere())
        hint = f"; other jobs of this user have brokers ({others}): MEMSAVER_JOB selects the job" if others else ""
        raise BrokerError(f"no broker of a shared pool runs (looked in {where}){hint}", path=str(where))
    if device is None:
        return found
    named = [path for path in found if path.stem == device]  # also the UUID of another shell's host device
    if named:
        return named
    name = _device(device)
    uuid = _core.open_host_memory().uuid() if name == "cpu" else _core.cuda_uuid(_ordinal(name))
    path = discovery.socket_path(uuid)
    if path not in found:
        running = ", ".join(f"{'cpu' if each.stem.startswith('HOST') else 'GPU'} ({each.stem})" for each in found)
        hint = "; MEMSAVER_HOST_DEVICE determines which device cpu is" if name == "cpu" else ""
        text = f"no broker of {name} ({uuid}) runs{hint}; running: {running}. --device takes these UUIDs"
        raise BrokerError(text, path=str(path))
    return [path]


def _drop_in_install(options: argparse.Namespace) -> int:
    try:
        print(f"wrote {startup.install(options.names)}: each Python process of this environment uses these drop-ins")
    except OSError as error:
        print(f"memsaver: {startup.file()} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _drop_in_remove(_: argparse.Namespace) -> int:
    try:
        print(f"removed {startup.file()}" if startup.remove() else f"there is no {startup.file()}")
    except OSError as error:
        print(f"memsaver: {startup.file()} cannot be removed: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _drop_in_path(_: argparse.Namespace) -> int:
    print(startup.FOLDER)
    return 0


def _config(options: argparse.Namespace) -> int:
    if options.touched:
        return _touched(options.json)
    found = settings()
    if options.json:
        print(json.dumps({each.option.name: {"value": each.value, "source": each.source} for each in found}))
        return 0
    values = [_shown(each) for each in found]
    width = max(map(len, values))
    longest = max(len(each.option.name) for each in found)
    for each, value in zip(found, values):
        print(f"{each.option.name:<{longest}} {value:<{width}}  {each.source}")
    return 0


def _touched(as_json: bool) -> int:
    """Each change that memsaver can make, and whether this process, with its environment, makes it."""
    asked = {"vllm", "tms"} & parse_drop_in(os.environ.get("MEMSAVER_DROP_IN", "")).keys() | _adapter.wanted()
    asked |= {each.name for each in _adapter.touched()}
    if as_json:
        print(json.dumps([{**dataclasses.asdict(each), "asked": each.name in asked} for each in _adapter.TOUCHES]))
        return 0
    for each in _adapter.TOUCHES:
        print(f"{each.name}: {'asked for' if each.name in asked else 'not asked for'}, by {each.switch}")
        print(f"  {each.what}")
    return 0


def _shown(setting: Setting) -> str:
    """The value of an option for readers, with the bytes of a default that depends on the machine alone."""
    if setting.option.name != "host_device" or setting.value is not None:
        return str(setting)
    # As in the core, which could return the size only by opening the device, and that makes its ledger's file.
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // PAGE * PAGE
    return f"{gib(nbytes)} ({nbytes} bytes), {setting}"


def _trim(options: argparse.Namespace) -> int:
    for path in _paths(options.device):
        with AdminClient(path) as client:
            print(f"{client.status()['device']} ({path.stem}): {gib(client.release_idle(options.keep))} given back")
    return 0


def _run(options: argparse.Namespace) -> int:
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        print(
            "memsaver: PROGRAM is missing, expected a command such as: memsaver run -- python train.py", file=sys.stderr
        )
        return 2
    if not _core.cuda_device_count():
        print(f"memsaver: CUDA finds no GPU: no memory of {program[0]} is managed", file=sys.stderr)
    try:
        startup.run(program, options.backup)
    except OSError as error:
        print(f"memsaver: {program[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _top(options: argparse.Namespace) -> int:
    opened: dict[str, Any] = {}  # memory by device, of devices without a pool
    while True:
        paths, pools, note = [], [], ""
        try:
            paths = _paths(options.device)
        except BrokerError as error:  # one that comes later is shown then
            note = str(error)
        for path in paths:
            with AdminClient(path) as client:
                pools.append(_status(client))
        devices = [_figures(name, opened) for name in _without_pool(options.device, {pool["uuid"] for pool in pools})]
        if options.json:
            if note:
                print(f"memsaver: {note}", file=sys.stderr)
            print(json.dumps({"pools": pools, "devices": devices}))
            return 0
        parts = [*([[note]] if note else []), *map(_lines, pools), *map(_lines_of_device, devices)]
        table = "\n\n".join("\n".join(part) for part in parts) + "\n"
        if options.once or not sys.stdout.isatty():
            sys.stdout.write(table)
            return 0
        sys.stdout.write(_CLEAR + table)
        sys.stdout.flush()
        time.sleep(_REDRAW_S)


def _without_pool(device: str | None, uuids: Set[str]) -> list[str]:
    """The devices to show beside pools of these UUIDs: the chosen one; else all GPUs, or else the host device."""
    if device is not None:
        return [] if uuids else [_device(device)]
    count = _core.cuda_device_count()
    if not count:
        return [] if uuids else ["cpu"]
    return [f"cuda:{index}" for index in range(count) if _core.cuda_uuid(index) not in uuids]


def _figures(name: str, opened: dict[str, Any]) -> dict[str, Any]:
    """A device without a pool, by the driver's figures."""
    if name not in opened:
        opened[name] = _core.open_host_memory() if name == "cpu" else _core.open_cuda_memory(_ordinal(name))
    memory = opened[name]
    account = ledger.of_device(memory.used_bytes(), memory.holdings(), memory.lists_all())
    return {
        "device": name,
        "uuid": memory.uuid(),
        "total_bytes": memory.total_bytes(),
        "ledger": dataclasses.asdict(account),
    }


def _lines_of_device(device: dict[str, Any]) -> list[str]:
    head = f"{device['device']} ({device['uuid']}), {gib(device['total_bytes'])}, without a shared pool"
    return [head, *_memory_lines(device["ledger"], _WIDEST_NAME)]


def _status(client: AdminClient) -> dict[str, Any]:
    """The status of a pool, and the ledger of its device. Read again once if the ledger is inconsistent."""
    status = client.status()
    account = ledger.of_pool(status)
    if not account.is_consistent:
        status = client.status()
        account = ledger.of_pool(status)
    return {**status, "ledger": dataclasses.asdict(account)}


def _lines(pool: dict[str, Any]) -> list[str]:
    """The table of one pool."""
    free = pool["capacity_bytes"] - pool["total_bytes"] + pool["idle_bytes"]
    width = max([20, *(min(len(client["name"]), _WIDEST_NAME) for client in pool["clients"])])
    lines = [
        f"{pool['device']} ({pool['uuid']}), broker pid {pool['pid']}",
        f"  capacity {gib(pool['capacity_bytes'])}, free {gib(free)}, of that {gib(pool['idle_bytes'])} idle",
        "",
        f"  {'pid':>8}  {'process':<{width}} {'region':<24} {'state':<9} {'backup':<7}"
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
        if client.get("unused_bytes") and any(each["waiting"] for each in pool["clients"]):
            notes.append(f"unused and not returned: {client['unused_why']}")
        if client["exited"]:
            keepers = ", ".join(f"{each['name']} (pid {each['pid']})" for each in client["kept_by"])
            notes.append(f"has exited; its memory is kept by {keepers or 'the driver'}")
        elif not client["connected"]:
            notes.append("not connected")
        age = client["report_age_s"]
        if not client["exited"] and (age is None or age > _REDRAW_S):
            notes.append("no report" if age is None else f"does not answer since {age:.0f} s")
        lines.append(f"  {client['pid']:>8}  {client['name'][:width]:<{width}} {', '.join(notes)}")
        for region in client["regions"]:
            lines.append(
                f"  {'':>8}  {'':<{width}} {region['tag'][:24]:<24} {region['state']:<9} {region['backup']:<7}"
                + "".join(f"{gib(region[key]):>13}" for key in ("allocated_bytes", "mapped_bytes", "backup_bytes"))[1:]
            )
    return lines + _memory_lines(pool["ledger"], width)


def _memory_lines(account: dict[str, Any], width: int) -> list[str]:
    """The table of the memory in use on the device of a pool, by process and kind."""
    used = account["used_bytes"]
    lines = [
        "",
        f"  in use on the device: {'unknown' if used is None else gib(used)}",
        "",
        f"  {'pid':>8}  {'process':<{width}} {'memory':<46}{'bytes':>12}",
    ]
    shown = None
    for row in (ledger.LedgerRow(**each) for each in account["rows"]):
        is_first, shown = row.pid != shown, row.pid
        pid, name = ("" if row.pid is None else row.pid, row.name[:width]) if is_first else ("", "")
        lines.append(f"  {pid:>8}  {name:<{width}} {ledger.described(row)[:46]:<46}{gib(row.bytes):>12}")
    return lines
