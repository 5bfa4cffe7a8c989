"""`memsaver doctor`: each check on a machine that is made up, with one planted problem, and the command itself."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import memsaver
from memsaver import _core, cli, errors, ledger
from memsaver.broker import caller, discovery
from memsaver.broker.protocol import Message
from memsaver.doctor import (
    CHECKS,
    Finding,
    Machine,
    devices,
    exit_status,
    host,
    lines,
    pools,
    settings,
    software,
    versions,
)
from memsaver.doctor.findings import Check, run
from memsaver.doctor.machine import Broker, DeviceMemory, joined
from memsaver.drop_in import startup
from tests.broker_support import Local
from tests.support import GIB, MIB, ROOT, Fill, Peer, drop_backups, run_python

MEMINFO = f"MemTotal: {100 * 1024 * 1024} kB\nMemAvailable: {30 * 1024 * 1024} kB\n"  # 20 GiB can be taken
GPU = {"name": "Test GPU", "virtual_memory": True, "posix": True, "fabric": False, "mps": False}
CORE = "7f00-7f01 r-xp 0 00:00 0 /usr/lib/python3/site-packages/memsaver/_core.abi3.so\n"
WAIT = {"needed_bytes": GIB, "granted_bytes": 0}
PID = 4_000_001  # beyond the pids of Linux: no such process exists


class Fake:
    """A machine that is made up. ``driver``: its CUDA version, and its GPUs or the error of the driver."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self._patch, self._links = root, patch, 0
        (root / "dev/shm").mkdir(parents=True)
        self.write("/proc/meminfo", MEMINFO)
        self.write("/proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n")
        self.machine = Machine(str(root), {})
        self.machine.brokers = []
        self.machine.devices = []
        self.driver(13000, [])

    def write(self, path: str, text: str) -> None:
        file = self.root / path.removeprefix("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def driver(self, version: int, gpus: list[dict[str, Any]] | errors.DriverError) -> None:
        def facts() -> list[dict[str, Any]]:
            if isinstance(gpus, errors.DriverError):
                raise gpus
            return gpus

        self._patch.setattr(_core, "gpu_facts", facts)
        self._patch.setattr(_core, "cuda_version", lambda: version)
        self._patch.setattr(_core, "cuda_device_count", lambda: len(facts()) if isinstance(gpus, list) else 0)

    def process(
        self, variables: Mapping[str, str] = {}, pid: int = PID, maps: str = CORE, command: str = "python\0loop.py"
    ) -> None:
        text = "".join(f"{name}={value}\0" for name, value in {"MEMSAVER_NAME": "loop", **variables}.items())
        for name, content in {"maps": maps, "environ": text, "cmdline": command, "comm": "python\n"}.items():
            self.write(f"/proc/{pid}/{name}", content)
        self.machine.__dict__.pop("processes", None)  # which may have been read

    def pool(self, *clients: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Adds the pool of a host device of 8 GiB, with these clients."""
        status = {
            "device": "cpu", "uuid": f"HOST-0-{8 * GIB:x}", "pid": 77, "capacity_bytes": 8 * GIB,
            "total_bytes": sum(client["held_bytes"] for client in clients), "idle_bytes": 0, "leaving_bytes": 0,
            "device_memory": {"used_bytes": None, "holdings": [], "lists_all": True}, "clients": list(clients),
            **changes,
        }  # fmt: skip
        self.machine.brokers.append(Broker(Path("/run/a.sock"), status))
        return status

    def held_by(self, holdings: Mapping[int, int], total: int = 10 * GIB, pool: Any = None, unlisted: int = 0) -> None:
        """Adds a device whose memory these processes hold, by the driver's list."""
        used = sum(holdings.values()) + unlisted + (pool["total_bytes"] if pool else 0)
        found = ledger.of_device(used, [(pid, nbytes, 0) for pid, nbytes in holdings.items()], False)
        self.machine.devices.append(DeviceMemory("cuda:0", "GPU-1", total, found, pool))

    def find(self, check: Check) -> list[tuple[str, str]]:
        """The states and values of a check."""
        found = run([check], self.machine)
        assert not any("this check failed" in each.value for each in found), found
        return [(each.state, each.value) for each in found]

    def has(self, check: Check, state: str, *parts: str) -> bool:
        return any(each == state and all(part in value for part in parts) for each, value in self.find(check))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path / "root", monkeypatch)


def region(tag: str, state: str = "active", backup: str = "host", nbytes: int = GIB, kept: int = 0) -> dict[str, Any]:
    mapped = nbytes if state == "active" else 0
    sizes = {"allocated_bytes": nbytes, "mapped_bytes": mapped, "backup_bytes": kept}
    return {"tag": tag, "state": state, "backup": backup, **sizes}


def client(*regions: dict[str, Any], pid: int = PID, **changes: Any) -> dict[str, Any]:
    return {
        "pid": pid, "name": "loop", "held_bytes": sum(each["mapped_bytes"] for each in regions), "leaving_bytes": 0,
        "connected": True, "exited": False, "kept_by": [], "waiting": [], "unused_bytes": None, "unused_why": "",
        "report_age_s": 0.0, "is_current": True, "host_held_bytes": 0, "regions": list(regions), "ledger": None,
        **changes,
    }  # fmt: skip


# The command


def test_the_command_runs_without_torch_and_its_json_has_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    source = """
        import sys
        sys.modules["torch"] = None  # any import of it raises ImportError
        from memsaver import cli
        sys.exit(cli.main(["doctor", "--json"]))
    """
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = run_python(source, **variables)
    found = json.loads(done.stdout)
    assert all(set(each) == {"subject", "state", "value", "remedy"} for each in found)
    assert all(each["value"] and isinstance(each["remedy"], str) for each in found)
    assert {each["state"] for each in found} <= {"ok", "note", "warning", "error"}
    assert not [each for each in found if "this check failed" in each["value"]], done.stderr
    assert done.returncode == 2  # of the backend
    subjects = {each["subject"] for each in found}
    assert {"driver", "device memory", "torch", "allocator", "NCCL", "host memory", "locked memory"} <= subjects
    assert {"huge pages", "NUMA", "/dev/shm", "container", "pool directory", "broker", "region", "turns"} <= subjects
    assert cli.main(["doctor"]) in (0, 1, 2)
    assert re.search(r"^(?:\d+ \w+, )*\d+ ok$", capsys.readouterr().out, re.MULTILINE)


def test_a_check_that_fails_is_a_finding_and_the_others_run(tmp_path: Path) -> None:
    def fine(machine: Machine) -> list[Finding]:
        return [Finding("fine", "ok", "yes")]

    def broken_check(machine: Machine) -> list[Finding]:
        raise RuntimeError("no such thing\nand more")

    broken, good = run([broken_check, fine], Machine())
    assert (broken.subject, broken.state) == ("broken check", "warning")
    assert broken.value == "this check failed: RuntimeError: no such thing" and good.value == "yes"
    for check in CHECKS:  # on a machine without any file
        assert run([check], Machine(str(tmp_path), {}))


def test_the_worst_state_comes_first_and_determines_the_exit_status() -> None:
    states = ["ok", "note", "warning", "error"]
    findings = [Finding("x", state, state, "do it" if state == "error" else "") for state in states]  # type: ignore[arg-type]
    found = run([lambda machine: findings], Machine())
    assert [each.state for each in found] == states[::-1]
    assert [exit_status(findings[:count]) for count in range(5)] == [0, 0, 0, 1, 2]
    assert lines(found)[:2] == ["error    x  error", "            -> do it"]
    assert lines(found)[-1] == "1 error, 1 warning, 1 note, 1 ok"


# The device


@pytest.mark.parametrize(
    ("version", "gpus", "module", "state", "part"),
    [
        (13000, [GPU], "580.159.04", "ok", "CUDA 13.0, 1 GPUs, kernel module 580.159.04"),
        (13000, [GPU], "580.159.04", "ok", "cuda:0 (Test GPU): virtual memory: yes, POSIX handles: yes, fabric"),
        (11080, [GPU], "520.61.05", "error", "CUDA 11.8"),
        (13000, [], "580.159.04", "note", "0 GPUs"),
        (0, errors.DriverError(call="dlopen", code=-1, message="no libcuda"), "580.1", "error", "no libcuda"),
        (0, errors.DriverError(call="dlopen", code=-1, message="no libcuda"), "", "note", "no kernel module"),
        (13000, [{**GPU, "virtual_memory": False}], "", "error", "virtual memory: no"),
        (13000, [{**GPU, "mps": True}], "", "warning", "MPS: yes"),
        (13000, [{**GPU, "posix": False}], "", "warning", "POSIX handles: no"),
        (13000, [{**GPU, "fabric": True}], "", "ok", "fabric handles: yes"),
        (13000, [{**GPU, "name": "H100 MIG 1g.10gb"}], "", "ok", "a part of a GPU (MIG)"),
    ],
)  # fmt: skip
def test_the_driver_and_what_gpus_offer(
    fake: Fake, version: int, gpus: Any, module: str, state: str, part: str
) -> None:
    if module:
        fake.write("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {module}  Thu\n")
    fake.driver(version, gpus)
    assert fake.has(devices.driver, state, part)


def test_processes_that_hold_a_device_are_named_with_their_bytes(fake: Fake) -> None:
    fake.held_by({PID: 4 * GIB})
    assert fake.has(devices.holders, "note", f"(pid {PID}) 4.00 GiB")
    rows = [ledger.LedgerRow(PID, "loop", kind, "", "", GIB) for kind in ("region", "torch", "unknown")]
    fake.machine.devices = [DeviceMemory("cpu", "HOST-1", 8 * GIB, ledger.Ledger(3 * GIB, rows, True), fake.pool())]
    assert fake.has(devices.holders, "ok", "3.00 GiB of 8.00 GiB", f"loop (pid {PID}) 3.00 GiB")
    fake.machine.devices = [DeviceMemory("cuda:0", "GPU-1", 8 * GIB, ledger.Ledger(None, rows, True))]  # without NVML
    assert fake.has(devices.holders, "ok", "at least 3.00 GiB of 8.00 GiB")
    for holdings, part in (({PID: 3 * GIB, PID + 1: GIB}, "before another"), ({PID: 10 * GIB}, "the device is full")):
        fake.machine.devices.clear()
        fake.held_by(holdings)
        [found] = devices.holders(fake.machine)
        assert found.state == "warning" and str(PID) in found.value and part in found.remedy
    pool = fake.pool(capacity_bytes=8 * GIB, total_bytes=0)
    for nbytes, is_fine in ((GIB, True), (3 * GIB, False)):
        fake.machine.devices.clear()
        fake.held_by({PID: nbytes}, pool=pool)
        assert fake.has(devices.holders, "warning", "leaves 2.00 GiB to others", "3.00 GiB") is not is_fine


# Libraries


def test_versions_are_those_of_the_pages() -> None:
    pages = {name: (ROOT / name).read_text() for name in ("README.md", "docs/limits.md", "docs/frameworks.md")}
    joined = " and ".join([", ".join(versions.TORCH_ON_TEST_DRIVER[:-1]), versions.TORCH_ON_TEST_DRIVER[-1]])
    assert f"CUDA builds of torch {joined}" in " ".join(pages["README.md"].split())
    [on_gpus] = versions.TORCH_ON_GPUS
    oldest = ".".join(map(str, versions.TORCH_OLDEST))
    assert (
        f"with torch {on_gpus}," in pages["README.md"]
        and f"run on GPUs with torch {on_gpus} alone" in pages["docs/limits.md"]
    )
    assert f"- torch {oldest} or newer." in pages["docs/limits.md"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["torch"] == [f"torch>={oldest}"]
    assert f"CUDA {versions.CUDA_OLDEST} or newer" in pages["docs/limits.md"]
    [vllm], [sglang] = versions.VLLM_ON_GPUS, versions.SGLANG_ON_GPUS
    assert f"vLLM {vllm}, SGLang {sglang}," in pages["README.md"]
    assert f"vLLM {' to '.join(versions.VLLM_ALLOCATOR)}, the allocator alone" in pages["README.md"]
    assert f"interface of torch_memory_saver {versions.SAVER}" in pages["docs/frameworks.md"]
    assert __import__("memsaver.drop_in.tms", fromlist=["version"]).version() == versions.SAVER


@pytest.mark.parametrize(
    ("variables", "state", "part"),
    [
        ({}, "ok", "MEMSAVER_DROP_IN="),
        ({"MEMSAVER_DROP_IN": "vlm"}, "error", "=vlm"),
        ({"MEMSAVER_DROP_IN": "tms", "LD_PRELOAD": str(startup.PRELOAD), "TMS_INIT_ENABLE": "1"}, "ok", "preloaded"),
        ({"MEMSAVER_DROP_IN": "tms", "LD_PRELOAD": f"/lib/x.so {startup.PRELOAD}"}, "ok", "preloaded"),
        ({"MEMSAVER_DROP_IN": "tms", "LD_PRELOAD": "/x/torch_memory_saver_hook_mode_preload.so"}, "error", "/x/"),
        ({"LD_PRELOAD": str(startup.PRELOAD)}, "error", "preload"),
        ({"MEMSAVER_DROP_IN": "tms", "TMS_INIT_ENABLE": "1"}, "error", "preloaded: none"),
        ({"MEMSAVER_DROP_IN": "vllm"}, "note", "not installed"),
    ],
)  # fmt: skip
def test_variables_of_drop_ins(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], state: str, part: str
) -> None:
    monkeypatch.setattr(startup, "file", lambda: tmp_path / "none")
    monkeypatch.setattr(software, "version", lambda name: None)
    fake.process(variables)
    assert fake.has(software.drop_ins, state, part)
    assert (exit_status(run([software.drop_ins], fake.machine)) == 2) == (state == "error")


def test_versions_of_torch_and_vllm(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for version, state in (("2.7.1", "error"), ("2.11.0+cu128", "ok"), ("2.13.0", "note"), (None, "note")):
        monkeypatch.setattr(software, "version", lambda name: version)  # noqa: B023
        assert fake.has(software.torch, state, "not installed" if version is None else version.partition("+")[0])
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "version", lambda name: "9.9.9" if name == "vllm" else None)
    assert fake.has(software.drop_ins, "note", "vLLM 9.9.9 differs from the versions that memsaver knows")
    fake.machine.variables = {"MEMSAVER_DROP_IN": "vllm"}
    assert fake.has(software.drop_ins, "error", "vLLM 9.9.9 differs", "there is no")


# Variables


@pytest.mark.parametrize(
    ("variables", "torch", "subject", "state", "part"),
    [
        ({}, "2.11.0", "allocator", "ok", "no settings"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, "2.11.0", "allocator", "ok", "max_split"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, "2.11.0", "allocator", "note", "expandable"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "2.9.1", "allocator", "error", "expandable"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TMS_INIT_ENABLE": "1"}, "2.11", "allocator", "error", ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "2.11.0", "allocator", "error", "cudaMallocAsync"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"}, "2.11.0", "allocator", "warning", "a:1"),
        ({"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.5"}, "2.11.0", "memory fraction", "warning", "0.5"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "2.11.0", "allocator", "error", "CACHING=1"),
        ({"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, "2.11.0", "NCCL", "warning", "HOOK=1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["shell", "process"])
def test_settings_of_torchs_allocator(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, where: str, variables: dict[str, str], torch: str, subject: str,
    state: str, part: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(software, "version", lambda name: torch)
    if where == "shell":
        fake.machine.variables = variables
    else:
        fake.process(variables)
    found = run([settings.allocator], fake.machine)
    place = "this shell" if where == "shell" else f"loop (pid {PID})"
    [value] = {each.value for each in found if (each.subject, each.state) == (subject, state) and place in each.value}
    assert part in value
    assert exit_status(found) == {"warning": 1, "error": 2}.get(state, 0)


@pytest.mark.parametrize(
    ("variables", "state", "part"),
    [
        ({}, "note", "NCCL_GRAPH_REGISTER is not set"),
        ({"WORLD_SIZE": "8"}, "warning", "NCCL_GRAPH_REGISTER is not set"),
        ({"WORLD_SIZE": "8", "NCCL_GRAPH_REGISTER": "1"}, "warning", "NCCL_GRAPH_REGISTER is 1"),
        ({"WORLD_SIZE": "8", "NCCL_GRAPH_REGISTER": "0"}, "ok", "NCCL_GRAPH_REGISTER is 0"),
        ({"NCCL_CUMEM_ENABLE": "1"}, "note", "NCCL_CUMEM_ENABLE 1"),
    ],
)
def test_variables_of_nccl(fake: Fake, variables: dict[str, str], state: str, part: str) -> None:
    fake.machine.variables = variables
    assert fake.has(settings.nccl, "ok")  # no GPU, no NCCL
    fake.driver(13000, [GPU])
    assert fake.has(settings.nccl, state, part)
    assert exit_status(run([settings.nccl], fake.machine)) == (state == "warning")


# The host


def test_backups_that_do_not_fit_into_host_memory(fake: Fake) -> None:
    def has(state: str, *parts: str) -> bool:
        found = fake.has(host.host_memory, state, *parts)
        fake.machine.brokers.clear()
        return found

    fake.process()
    weights = region("weights", nbytes=12 * GIB)
    fake.pool(client(weights, region("kv", backup="none", nbytes=50 * GIB)))
    assert has("ok", "20.00 GiB can be taken", "need up to 12.00 GiB more")
    fake.pool(client(weights, region("optimizer", nbytes=12 * GIB)))
    assert has("warning", "24.00 GiB more", f"loop (pid {PID}) 24.00 GiB", "only 20.00 GiB")
    fake.pool(client(weights, region("optimizer", nbytes=12 * GIB), host_held_bytes=12 * GIB))  # serves next pauses
    assert has("ok", "12.00 GiB more")
    fake.pool(client(region("weights", nbytes=25 * GIB)))
    assert has("error", "25.00 GiB more")
    fake.write(f"/proc/{PID}/cgroup", "0::/job\n")
    fake.write("/sys/fs/cgroup/job/memory.max", f"{10 * GIB}\n")
    for used, expected in ((5, ("ok", "3.00 GiB more")), (8, ("error", "only 1.00 GiB"))):
        fake.write("/sys/fs/cgroup/job/memory.current", f"{used * GIB}\n")
        fake.pool(client(region("weights", nbytes=3 * GIB)))
        assert has(*expected)


def test_memory_of_the_host_and_its_container(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(list("abcdef")) == "a, b, c, d, 2 more"
    assert fake.has(host.locked_memory, "ok", "unlimited in this shell")
    fake.process()
    fake.write(f"/proc/{PID}/limits", "Max locked memory         8388608              8388608              bytes\n")
    assert fake.has(host.locked_memory, "ok", "8.0 MiB")  # the host driver pins nothing
    fake.driver(13000, [GPU])
    assert fake.has(host.locked_memory, "note", f"8.0 MiB in loop (pid {PID})")
    space = os.statvfs_result((4096, 4096, 16384, 9, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    assert fake.has(host.shared_memory, "warning", "0.4 MiB free")
    pages, nodes = "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/devices/system/node"
    fake.write(pages, "always [madvise] never\n")
    for name in ("has_memory", "has_cpu"):
        fake.write(f"{nodes}/{name}", "0-1\n")
    assert [state for state, _ in fake.find(host.pages)] == ["ok", "ok"]
    fake.write(pages, "always madvise [never]\n")
    assert fake.has(host.pages, "note", "[never]")
    fake.write(f"{nodes}/has_memory", "0-1,4\n")
    assert fake.has(host.pages, "warning", "numa_maps cannot be read")
    fake.write("/proc/self/numa_maps", "")
    assert fake.has(host.pages, "note", "nodes with memory: 0-1,4, with CPUs: 0-1")
    (fake.root / "proc/self/ns").mkdir()
    for namespace, rights, expected in (
        (4026531836, "00000000a80425fb", ("ok", "no CAP_SYS_PTRACE (not needed)")),
        (4026532999, "000001ffffffffff", ("note", "4026532999", ", CAP_SYS_PTRACE (not needed)")),
    ):
        fake.write("/proc/self/status", f"CapEff:\t{rights}\n")
        (fake.root / "proc/self/ns/pid").unlink(missing_ok=True)
        (fake.root / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
        assert fake.has(host.container, *expected)
    assert fake.find(host.ray) == []
    low = {"RAY_memory_usage_threshold": "0.8"}
    for variables, expected in (
        (low, ("warning", f"raylet (pid {PID + 5})", "is 0.8")),
        ({**low, "RAY_memory_monitor_refresh_ms": "0"}, ("ok", "monitor is off")),
        ({}, ("ok", "is 0.95")),
    ):
        fake.process(variables, PID + 5, "")
        fake.write(f"/proc/{PID + 5}/comm", "raylet\n")
        assert fake.has(host.ray, *expected)


# Pools


@pytest.mark.parametrize(
    ("name", "mode", "part"),
    [("pools", 0o777, "can be written by others"), ("x" * 90, 0o700, "a socket's may have 107")],
)
def test_a_pool_directory_that_cannot_be_used_is_an_error(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int, part: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name).chmod(mode)
    monkeypatch.setenv("MEMSAVER_POOL_DIR", str(tmp_path / name))
    assert fake.has(pools.pool_directory, "error", part)
    monkeypatch.setenv("MEMSAVER_POOL_DIR", "here")
    assert fake.has(pools.pool_directory, "error", "expected an absolute path")
    others = run([devices.holders, host.host_memory, pools.regions], Machine())  # they need no broker
    assert others and not [each for each in others if "failed" in each.value]
    fake.machine.brokers.append(Broker(Path("/run/a.sock"), None, "the broker at /run/a.sock did not answer"))
    assert fake.has(pools.brokers, "error", "did not answer")


def test_brokers_that_run_that_left_a_socket_and_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with Local() as broker, monkeypatch.context() as patch:
        patch.setenv("MEMSAVER_POOL_DIR", str(broker.directory))
        (broker.directory / "GPU-left.sock").touch()
        found = {each.state: each for each in pools.brokers(Machine())}
        assert set(found) == {"ok", "note"}
        assert broker.uuid in found["ok"].value and "capacity 1.00 GiB" in found["ok"].value
        assert "GPU-left.sock" in found["note"].value
        [device] = [each for each in Machine().devices if each.uuid == broker.uuid]
        assert device.total_bytes == broker.memory.total_bytes() > GIB
        own = _core.PROTOCOL_VERSION
        patch.setattr(caller, "Message", lambda kind, words, *more: Message(kind, (own + 1, *words[1:]), *more))
        [wrong] = [each for each in pools.brokers(Machine()) if each.state == "error"]
        assert re.search(f"process {os.getpid()} speaks version {own} .* version {own + 1}", wrong.value)
        assert "broker --stop" in wrong.remedy
        with pytest.raises(memsaver.BrokerError, match=f"\n{errors.CHECKED}$"):
            broker.status()


@pytest.mark.parametrize(
    ("clients", "state", "part"),
    [
        ([client(region("a"))], "ok", "1 regions"),
        ([client(region("a", "lost"))], "error", "region 'a' is lost"),
        ([client(region("a", "paused"))], "warning", "region 'a' is paused"),
        ([client(region("a", "paused")), client(region("b"), pid=PID + 1)], "note", "region 'a' is paused"),
        ([client(region("a", "paused", nbytes=9 * GIB)), client(region("b"), pid=PID + 1)], "ok", "2 regions"),
        ([client(exited=True, kept_by=[{"pid": 9, "name": "child"}], held_bytes=GIB)], "warning", "child (pid 9)"),
        ([client(is_current=False, report_age_s=60.0)], "warning", "no report for 60 s"),
        ([client(waiting=[{**WAIT, "seconds": 30.0}])], "warning", "has waited 30 s for 1.00 GiB"),
        ([client(region("a", "paused"), waiting=[{**WAIT, "seconds": 1.0}])], "ok", "1 regions"),
        ([client(waiting=[{**WAIT, "seconds": 0.1}])], "ok", "0 regions"),
    ],
)  # fmt: skip
def test_regions_and_clients_in_reports(fake: Fake, clients: list[dict[str, Any]], state: str, part: str) -> None:
    fake.pool(*clients)
    assert fake.has(pools.regions, state, part)
    assert {each for each, _ in fake.find(pools.regions)} == {state, "ok"}
    assert exit_status(run([pools.regions], fake.machine)) == {"warning": 1, "error": 2}.get(state, 0)


def test_the_report_of_a_turn_that_a_rank_did_not_reach(fake: Fake, tmp_path: Path) -> None:
    memsaver.configure(report_dir=tmp_path / "reports")
    try:
        assert fake.has(pools.turns, "ok", "no report")
        os.utime(memsaver.turns.reports.write("an earlier one"), (1, 1))
        path = memsaver.turns.reports.write("phase 'train' could not be entered: rank 1 has not entered\nmore\n")
        os.utime(memsaver.turns.reports.write("another earlier one"), (2, 2))
        assert fake.has(pools.turns, "note", "rank 1 has not entered", "has ended")
        fake.write(f"/proc/{os.getpid()}/stat", "")
        assert fake.has(pools.turns, "warning", "rank 1 has not entered", f"pid {os.getpid()}) runs")
        [found] = pools.turns(fake.machine)
        assert str(path) in found.remedy
    finally:
        memsaver.configure(report_dir=tmp_path)


# The line of errors


def test_errors_whose_cause_is_checked_end_with_a_line(
    make: Callable[..., memsaver.Region], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def last(error: BaseException) -> str:
        return str(error).splitlines()[-1].strip()

    held = make("host")
    kept = held._core.allocate_array(8 * MIB)
    drop_backups()
    memsaver.configure(host_limit=MIB)
    with pytest.raises(memsaver.BackupError) as own:
        held.pause()
    assert last(own.value) != errors.CHECKED  # the limit is an option of the process
    memsaver.configure(host_limit=None)
    del kept
    text = "a backup needs 9 bytes more; 1 bytes can be taken until nine tenths of the machine are in use"
    fields = {"needed_bytes": 9, "held_bytes": 0, "available_bytes": 1, "_of_pinned_memory": True}
    error = errors.make("BackupError", text, fields)
    assert last(error) == errors.CHECKED
    error._name_regions({"weights": "host"})  # type: ignore[attr-defined]
    assert last(error) == errors.CHECKED and "in use (0.0 MiB needed" in str(error)
    with Peer() as other:
        with Fill(leave=64 * MIB), pytest.raises(memsaver.OutOfMemoryError) as alone:
            make()._core.allocate_array(256 * MIB)
        assert last(alone.value) != errors.CHECKED  # all is this process's own
        other.run("held = memsaver.region('held', device='cpu'); a = held._core.allocate_array(64 << 20)")
        with Fill(leave=64 * MIB), pytest.raises(memsaver.OutOfMemoryError) as shared:
            make()._core.allocate_array(256 * MIB)
        assert last(shared.value) == errors.CHECKED
    monkeypatch.setenv("MEMSAVER_POOL_DIR", str(tmp_path / "pools"))
    (tmp_path / "pools").mkdir()
    (tmp_path / "pools").chmod(0o777)
    with pytest.raises(memsaver.ConfigError) as rights:
        discovery.directory()
    assert last(rights.value) == errors.CHECKED
