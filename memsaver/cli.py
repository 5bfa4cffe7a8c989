"""The command ``memsaver``: brokers and their status, idle memory, drop-ins, options, and the checks of the machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

from memsaver import __version__, _adapter, _core, doctor, ledger
from memsaver._adapter import TOUCHES
from memsaver.broker import caller, daemon, discovery
from memsaver.broker.clients import PAGE
from memsaver.broker.loop import BrokerLoop, raise_descriptor_limit
from memsaver.config import parse_drop_in, parse_seconds, parse_size, settings
from memsaver.drop_in import startup
from memsaver.errors import BrokerError, ConfigError, DriverError, Error, gib
from memsaver.policies import BACKUPS
from memsaver.trace.files import Events, merge, read
from memsaver.trace.picture import draw, samples

_T = TypeVar("_T")
_OLD_S = 1.0  # of a report
_WIDEST_NAME = 40  # characters of a process in the table of `top`


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, or 1 with a message on stderr. Exits with 2 on wrong usage.

    That of `doctor` depends on its findings. 130: Ctrl-C has ended the command.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # names may have letters that the encoding of a terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        _flush()
        return status
    except BrokenPipeError:  # the program that reads the output has ended, such as head
        return 1
    except (Error, OSError) as error:
        _say(error)
        return 1
    except KeyboardInterrupt:
        return 130


def _say(text: object) -> None:
    if sys.stderr is not None:  # it is closed: print() would write to stdout
        print(f"memsaver: {text}", file=sys.stderr)


def _flush() -> None:
    """Flushes stdout. Raises OSError: at the interpreter's exit the failed flush would print a message of Python."""
    if sys.stdout is None:  # it is closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())  # the interpreter flushes again at its exit
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memsaver", description="One GPU's memory, shared by several processes.")
    parser.add_argument("--version", action="version", version=f"memsaver {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    broker = commands.add_parser("broker", help="start the process that holds the shared pool of a device")
    broker.add_argument(
        "--device",
        help="index, cuda:INDEX, UUID, or cpu (default: GPU 0, or cpu on a machine without GPUs; with --stop: all)",
    )
    broker.add_argument(
        "--capacity",
        type=_parsed(parse_size, "SIZE"),
        metavar="SIZE",
        help="most to lend (default: 90 %% of a GPU, all of the host device)",
    )
    broker.add_argument(
        "--linger",
        type=_parsed(parse_seconds, "SECONDS"),
        metavar="SECONDS",
        help="end after so long without clients; else never",
    )
    broker.add_argument("--detach", action="store_true", help="run in the background, with a log beside the socket")
    broker.add_argument(
        "--stop", action="store_true", help="stop the running broker of --device; without --device all of this user"
    )
    broker.set_defaults(run=_broker)

    top = commands.add_parser(
        "top",
        help="show processes, regions and free memory of the shared pools",
        description="Each process, region, state and bytes of the shared pools. For a device without a pool: its"
        " processes, by the driver's list.",
    )
    top.add_argument("--device", help="only this one (default: all pools of this user, and all GPUs)")
    top.add_argument("--json", action="store_true", help="print it as JSON")
    top.set_defaults(run=_top)

    checks = commands.add_parser(
        "doctor",
        help="check driver, versions, variables, host memory, brokers and running processes",
        description="Prints a line for each finding, the worst first: its state, the value, and the remedy below it."
        " Exit status: 1 with warnings, 2 with errors.",
    )
    checks.add_argument("--json", action="store_true", help="print them as JSON")
    checks.set_defaults(run=_doctor)

    served = commands.add_parser(
        "serve-metrics",
        help="serve the figures of the shared pools to Prometheus",
        description="Serves /metrics until it is interrupted: bytes by process and kind, and demands, of all pools of"
        " this user. Needs pip install 'memsaver[metrics]'.",
    )
    served.add_argument("--port", required=True, metavar="PORT", help="0: any free port, which is printed")
    served.add_argument("--address", default="127.0.0.1", help="of this machine (default: 127.0.0.1)")
    served.set_defaults(run=_serve_metrics)

    trim = commands.add_parser("trim", help="give idle memory of the shared pools back to the driver")
    trim.add_argument("--device", help="that of one pool alone (default: all pools of this user)")
    trim.add_argument(
        "--keep", type=_parsed(parse_size, "SIZE"), default=0, metavar="SIZE", help="idle memory to keep (default: 0)"
    )
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
    drop_in.set_defaults(run=_drop_in)
    actions = drop_in.add_subparsers(required=True, metavar="ACTION", dest="action")
    install = actions.add_parser("install", help="write a file into this environment that turns drop-ins on")
    install.add_argument("names", nargs="+", metavar="NAME", help="vllm or tms")
    actions.add_parser("remove", help="remove this file")
    actions.add_parser("path", help="print a folder for PYTHONPATH, with MEMSAVER_DROP_IN, in place of the file")

    trace = commands.add_parser("trace", help="merge the traces of processes, or draw the memory in them")
    actions = trace.add_subparsers(required=True, metavar="ACTION")
    for name, run_action, text in (
        ("merge", _merge, "write one trace, for ui.perfetto.dev and chrome://tracing"),
        ("plot", _plot, "draw the memory of a device by owner over time, as SVG"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("files", nargs="+", metavar="FILE", help="a trace: see MEMSAVER_TRACE")
        action.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write")
        action.set_defaults(run=run_action)
    action.add_argument("--device", metavar="UUID", help="of the device (default: the only one of the traces)")

    config = commands.add_parser("config", help="show each option, its value, and the source of the value")
    config.add_argument("--json", action="store_true", help="print them as JSON")
    config.add_argument("--touched", action="store_true", help="show the changes of other libraries' state instead")
    config.set_defaults(run=_config)
    return parser


def _parsed(parse: Callable[[Any, str], Any], name: str) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text, name)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _broker(options: argparse.Namespace) -> int:
    if options.stop:
        return _stop(options)
    if options.detach:
        name = _device(options.device)
        uuid = _memory(name).uuid()
        path = discovery.socket_path(uuid)
        if discovery.is_locked(path) or discovery.accepts(path):
            discovery.Listener(uuid).close()  # raises an error with the pid of the broker, if it still runs
        pid, log = daemon.start(uuid, name, options.capacity, options.linger)
        print(f"the broker of {name} ({uuid}) runs with pid {pid}, its log is {log}")
        return 0
    return _serve(options)


def _stop(options: argparse.Namespace) -> int:
    def stop(path: Path) -> None:
        name = path.stem
        with suppress(BrokerError):  # it has another version
            name = f"{caller.status(path)['device']} ({name})"
        print(f"{name}: stopped the broker with pid {daemon.stop(path)}")

    return _for_each(_paths(options.device), stop)


def _for_each(subjects: Sequence[_T], act: Callable[[_T], None]) -> int:
    """Calls a function for each broker or device. One that does not answer does not keep it from the others."""
    status = 0
    for each in subjects:
        try:
            act(each)
        except (BrokerError, DriverError) as error:
            _say(error)
            status = 1
    return status


def _serve(options: argparse.Namespace) -> int:
    """Serves clients until the broker ends."""
    logging.basicConfig(format="%(asctime)s memsaver broker: %(message)s", level=logging.INFO)
    name = _device(options.device)
    memory = _memory(name)
    if memory.under_mps():
        raise daemon.mps_error(name)
    total = memory.total_bytes()
    capacity = options.capacity
    if capacity is None:  # the rest of a GPU is for contexts, and for torch's memory outside of regions
        capacity = total if name == "cpu" else total * 9 // 10
    if not PAGE <= capacity <= total:
        text = (
            f"the capacity is {gib(capacity)} ({capacity} bytes), expected {PAGE} to {total} bytes: {name} has no more"
        )
        raise ConfigError(text, option="capacity", value=capacity)
    raise_descriptor_limit()
    listener = discovery.Listener(memory.uuid())
    broker = BrokerLoop(memory, name, capacity // PAGE * PAGE, listener, options.linger)
    broker.stop_on_signals()
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


def _memory(name: str) -> Any:
    """The memory of a device, which needs no context."""
    return _core.open_host_memory() if name == "cpu" else _core.open_cuda_memory(int(name.removeprefix("cuda:")))


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
    uuid = _memory(name).uuid()
    path = discovery.socket_path(uuid)
    if path not in found:
        running = ", ".join(f"{'cpu' if each.stem.startswith('HOST') else 'GPU'} ({each.stem})" for each in found)
        hint = "; MEMSAVER_HOST_DEVICE determines which device cpu is" if name == "cpu" else ""
        text = f"no broker of {name} ({uuid}) runs{hint}; running: {running}. --device takes these UUIDs"
        raise BrokerError(text, path=str(path))
    return [path]


def _drop_in(options: argparse.Namespace) -> int:
    if options.action == "install":
        print(f"wrote {startup.install(options.names)}: each Python process of this environment uses these drop-ins")
    elif options.action == "remove":
        print(f"removed {startup.file()}" if startup.remove() else f"there is no {startup.file()}")
    else:
        print(startup.FOLDER)
    return 0


def _config(options: argparse.Namespace) -> int:
    if options.touched:
        return _touched(options.json)
    found = settings()
    if options.json:
        print(json.dumps({each.option.name: {"value": each.value, "source": each.source} for each in found}))
        return 0
    rows = [(each.option.name, each.option.shown(each.value), each.source) for each in found]
    longest, width, _ = (max(map(len, column)) for column in zip(*rows))
    for name, value, source in rows:
        print(f"{name:<{longest}} {value:<{width}}  {source}")
    return 0


def _touched(as_json: bool) -> int:
    """Each change that memsaver can make, and whether this process, with its environment, makes it."""
    asked = parse_drop_in(os.environ.get("MEMSAVER_DROP_IN", "")) | _adapter.wanted() | _adapter.touched()
    if as_json:
        print(json.dumps([{"name": name, "switch": by, "asked": name in asked} for name, by in TOUCHES.items()]))
        return 0
    for name, by in TOUCHES.items():
        print(f"{name}: {'asked for' if name in asked else 'not asked for'}, by {by}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    found = doctor.examine()
    if options.json:
        print(json.dumps(found, default=dataclasses.asdict))
    else:
        print("\n".join(doctor.lines(found)))
    return doctor.exit_status(found)


def _serve_metrics(options: argparse.Namespace) -> int:
    """Serves until it is interrupted."""
    text = options.port
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 1 << 16):
        raise ConfigError(f"the port is {text!r}, expected 0 to 65535", option="port", value=text)
    try:
        from memsaver import metrics
    except ModuleNotFoundError as error:
        _say(error)
        return 1
    port, thread = metrics.serve(options.address, int(text))
    host = f"[{options.address}]" if ":" in options.address else options.address
    print(f"serves http://{host}:{port}/metrics", flush=True)
    with suppress(KeyboardInterrupt):
        thread.join()
    return 0


def _trim(options: argparse.Namespace) -> int:
    def trim(path: Path) -> None:
        device = caller.status(path)["device"]
        print(f"{device} ({path.stem}): {gib(caller.release_idle(path, options.keep))} given back")

    return _for_each(_paths(options.device), trim)


def _merge(options: argparse.Namespace) -> int:
    _say_torn(merge(options.files, options.output))
    return 0


def _plot(options: argparse.Namespace) -> int:
    found = read(options.files)
    _say_torn(found)
    draw(samples(found.events, options.device), Path(options.output))
    return 0


def _say_torn(found: Events) -> None:
    if found.torn:
        _say(f"lines left out, which the end of a process has cut: {found.torn}")


def _run(options: argparse.Namespace) -> int:
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        _say("PROGRAM is missing, expected a command such as: memsaver run -- python train.py")
        return 2
    if not _core.cuda_device_count():
        _say(f"CUDA finds no GPU: no memory of {program[0]} is managed")
    try:
        startup.run(program, options.backup)
    except OSError as error:
        _say(f"{program[0]} cannot be started: {error.strerror}")
        return 1
    return 0


def _top(options: argparse.Namespace) -> int:
    note, paths = "", []
    try:
        paths = _paths(options.device)
    except BrokerError as error:
        note = str(error)
    pools: list[dict[str, Any]] = []

    def add(path: Path) -> None:
        found = caller.status(path)
        pools.append({**found, "ledger": ledger.of_pool(found)})

    status = _for_each(paths, add)
    devices: list[dict[str, Any]] = []
    status |= _for_each(
        _without_pool(options.device, {path.stem for path in paths}), lambda name: devices.append(_figures(name))
    )
    if status and not pools and not devices:
        return status
    if options.json:
        if note:
            _say(note)
        print(json.dumps({"pools": pools, "devices": devices}, default=dataclasses.asdict))
        return status
    parts = [*([[note]] if note else []), *map(_lines, [*pools, *devices])]
    print("\n\n".join("\n".join(part) for part in parts))
    return status


def _without_pool(device: str | None, uuids: Set[str]) -> list[str]:
    """The devices to show beside pools of these UUIDs: the chosen one; else all GPUs, or else the host device."""
    if device is not None:
        return [] if uuids else [_device(device)]
    count = _core.cuda_device_count()
    if not count:
        return [] if uuids else ["cpu"]
    return [f"cuda:{index}" for index in range(count) if _core.cuda_uuid(index) not in uuids]


def _figures(name: str) -> dict[str, Any]:
    """A device without a pool, by the driver's figures."""
    memory = _memory(name)
    account = ledger.of_device(memory.used_bytes(), memory.holdings(), memory.lists_all())
    return {"device": name, "uuid": memory.uuid(), "total_bytes": memory.total_bytes(), "ledger": account}


def _lines(found: dict[str, Any]) -> list[str]:
    """A shared pool, or a device without one."""
    head = f"{found['device']} ({found['uuid']})"
    if "clients" not in found:
        return [f"{head}, without a shared pool", *_table(found["ledger"], [], found["total_bytes"])]
    free = gib(caller.free_bytes(found))
    return [
        f"{head}, broker pid {found['pid']}",
        f"  capacity {gib(found['capacity_bytes'])}, free {free}, of that {gib(found['idle_bytes'])} idle",
        *_table(found["ledger"], found["clients"], found["device_bytes"]),
    ]


def _table(account: ledger.Ledger, clients: list[dict[str, Any]], total: int) -> list[str]:
    """The memory in use on a device, by process and kind. Regions of clients are shown with their backups."""
    parts: dict[tuple[int | None, str], list[tuple[str, str]]] = {}
    any_waits = any(client["waiting"] for client in clients)
    labels = {(row.pid, row.label) for row in account.rows if row.kind == "region"}
    joined = {row.pid for row in account.rows if row.kind == "other"}  # one row for all of their smallest regions
    shown = set()
    for client in clients:
        part = parts[client["pid"], client["name"]] = [(_notes(client, any_waits), "")]
        for region in client["regions"]:
            label = client["pid"], region["tag"]
            if client["pid"] in joined and region["mapped_bytes"] and label not in labels:
                continue
            shown.add(label)
            kept = f", {gib(region['backup_bytes'])} backed up" if region["backup_bytes"] else ""
            period = f" for {region['paused_s']} s" if region["state"] == "paused" else ""
            part.append((f"region {region['tag']} ({region['state']}{period}){kept}", gib(region["mapped_bytes"])))
    for row in account.rows:
        if row.kind != "region" or (row.pid, row.label) not in shown:
            parts.setdefault((row.pid, row.name), []).append((ledger.described(row), gib(row.bytes)))
    used = account.used_bytes
    width = max([20, *(min(len(name), _WIDEST_NAME) for _, name in parts)])
    free = "" if used is None else f", free {gib(max(0, total - used))}"
    lines = [f"  in use on the device: {'unknown' if used is None else gib(used)} of {gib(total)}{free}"]
    lines += ["", f"  {'pid':>8}  {'process':<{width}} {'memory':<56}{'bytes':>12}"] if parts else []
    for (pid, name), part in parts.items():
        for text, nbytes in part:
            lines.append(f"  {'' if pid is None else pid:>8}  {name[:width]:<{width}} {text:<56}{nbytes:>12}".rstrip())
            pid, name = None, ""
    return lines


def _notes(client: dict[str, Any], any_waits: bool) -> str:
    notes = [f"holds {gib(client['held_bytes'])}"]
    for each in client["waiting"]:
        notes.append(
            f"has waited {each['seconds']:.1f} s for {gib(each['needed_bytes'])}, has {gib(each['granted_bytes'])}"
        )
    if client.get("unused_bytes") and any_waits:
        notes.append(f"unused and not returned: {client['unused_why']}")
    age = client["report_age_s"]
    if client["exited"]:
        keepers = ", ".join(f"{each['name']} (pid {each['pid']})" for each in client["kept_by"])
        notes.append(f"has exited; its memory is kept by {keepers or 'the driver'}")
    else:
        if not client["connected"]:
            notes.append("not connected")
        if age is None or age > _OLD_S:
            notes.append("no report" if age is None else f"has not answered for {age:.0f} s")
    return ", ".join(notes)
