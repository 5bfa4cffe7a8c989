"""Benchmarks as commands on the host driver, with contents that are spoiled, and on engines that are made up."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import sglang, vllm
from benchmarks.harness import faults
from benchmarks.harness.models import MODELS

ROOT = Path(__file__).resolve().parents[2]
# The smallest run of each benchmark that has a host device, and titles of its tables.
RUNS = {
    "pause_resume --scale 0.001 --cycles 1": ["with backup 'host'", "first pause", "out and in", "region to region"],
    "handover --scale 0.001 --cycles 1 --rounds 1": ["64 MiB without backup", "from process to process"],
    "together --gib 0.0625 --cycles 1": ["GB/s"],
    "scale --regions 5 --tensors 20 --holes 50 --cycles 1": ["5 regions", "in tensors", "an allocation", "600 tensors"],
    "disk --gib 0.01 --rounds 1": ["on disk"],
    "small --cycles 5 --rounds 1": ["us", "modules"],
    "turns --cycles 1": ["shared pool, 1 pairs", "driver: 3 turns", "weight sync"],
    "whole_process --steps 2": ["ledger of rank 1", "rank 1 killed"],
    "soak --turns 40 --every 2": ["growth"],
    "engine --only regions parallel": ["tokens/s of decode"],
}
LISTED = (ROOT / "docs/benchmarks.md").read_text().partition("fields of the line are ")[2].partition(".")[0]
FIELDS = re.findall(r"`(\w+)`", LISTED)

# Each resume changes one bit of one tensor in the regions that it resumes.
SPOILED = """
import gc, sys
import memsaver.transitions
real = memsaver.transitions.transition
def spoiled(pause=(), resume=(), *given, **options):
    done = real(pause, resume, *given, **options)
    import torch
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.numel() and any(region.owns(each.data_ptr()) for region in resume):
            each.view(-1)[each.numel() // 2] += 1
            break
    return done
for module in list(sys.modules.values()):
    if getattr(module, "transition", None) is real:
        module.transition = spoiled
"""


def ran(line: str, folder: Path, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, JSON line and everything that was printed."""
    environ = {**os.environ, "MEMSAVER_TEST_COMMIT": "abc1234", "OMP_NUM_THREADS": "1", **variables}
    environ.pop("MEMSAVER_HOST_DEVICE", None)  # a run has one of its own
    command = [sys.executable, "-m", "benchmarks", *line.split(), "--device", "cpu"]
    command += ["--disk-dir", str(folder)] if line.startswith("disk") else []
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.split(" ")[0])
def test_a_small_run_prints_its_tables_and_a_json_line(line: str, tmp_path: Path) -> None:
    code, found, text = ran(line, tmp_path)
    assert (code, found["failures"]) == (0, []), text
    assert len(FIELDS) == 13 and set(FIELDS) <= set(found) and found["commit"] == "abc1234"
    assert found["benchmark"] in line and found["device"].startswith("host, ") and found["options"]["small"]
    assert all(any(title in each for each in found["tables"]) for title in RUNS[line]), found["tables"]
    assert all(rows and all(rows.values()) for rows in found["tables"].values())


SPOILT = ["pause_resume --scale 0.001 --cycles 1 --only switch", "soak --turns 20", "turns --cycles 1 --only driver"]


@pytest.mark.parametrize("line", SPOILT, ids=lambda line: line.split(" ")[0])
def test_a_run_fails_if_a_resume_changes_a_bit(line: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOILED)
    code, found, text = ran(line, tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 1 and any("contents of" in each for each in found["failures"]), text


class Engine:
    """A server of SGLang: its tokens name the version of its weights, which a release loses without a backup."""

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.version, self.calls = keeps, "none", list[str]()

    def post(self, path: str, body: dict[str, Any]) -> float:
        if "update_weights" in path:
            self.version = body["serialized_named_tensors"][0]
            self.calls.append("update")
        else:
            [tag] = body["tags"]
            self.calls.append(f"{path[1:].partition('_')[0]} {tag}")
            if self.calls[-1] == "release weights" and not self.keeps:
                self.version = "lost"
        return 1.0

    def tokens(self) -> list[list[str]]:
        return [[self.version]]

    def flush(self) -> None: ...


def trainer(engines: int) -> Any:
    """Sends each version to each of the engines in two buckets."""
    buckets = ({"payload": f"version {at // 2 // engines}", "last": at % 2 == 1} for at in itertools.count())
    return SimpleNamespace(ask=itertools.chain([{}], buckets).__next__)


TAGS = ["release kv_cache", "release weights", "release cuda_graph", "resume cuda_graph", "resume weights"]


@pytest.mark.parametrize("backup", [False, True])
def test_rounds_of_sglang_compare_tokens_in_the_order_of_calls(backup: bool) -> None:
    servers: dict[str, Any] = {"reference": Engine(True), "tms": Engine(backup), "memsaver": Engine(backup)}
    rounds = sglang.Rounds(backup, servers, trainer(3), trainer(1), 0.0)
    rounds.run(1)
    update = ["update", "update"]  # a version has two buckets
    one = [*TAGS, "resume kv_cache", *update] if backup else [*TAGS, *update, "resume kv_cache"]
    assert servers["memsaver"].calls == [*update, *one * 3]
    assert rounds.different == [] and len(rounds.sequences) == 4 and rounds.found["tms"][0]["release, all"] == 3.0
    servers["memsaver"].keeps = False
    rounds.run(1)
    assert rounds.different == ([f"memsaver, round {number}" for number in (4, 5, 6)] if backup else [])


# A front end, and a worker that holds up a wake-up. The front end ends when the worker does, and at SIGTERM.
FRONT_END = """
import json, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "Worker_TP1"])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        time.sleep(0.5 * (self.path == "/wake_up"))
        print("rank 1 died unexpectedly" if worker.poll() is not None else "served", flush=True)
        self.send_response(200 if worker.poll() is None else 500)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"token_ids": (asked or {}).get("prompt")}]}).encode())
    do_POST = do_GET
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
def end(*_):
    worker.kill()
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, end)
threading.Thread(target=lambda: (worker.wait(), time.sleep(1), server.shutdown()), daemon=True).start()
server.serve_forever()
"""


@pytest.mark.parametrize("fault", ["killed-asleep", "killed-waking", "terminated"])
def test_a_drill_of_a_server_reports_its_answer_and_its_end(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    (package / "api_server.py").write_text(FRONT_END)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    MODELS["tiny"].write(str(tmp_path))
    server = vllm.start_server(f"{fault}-vllm", MODELS["tiny"], str(tmp_path), {})
    try:
        found = faults.Drill(fault, server, None).run()
    finally:
        server.close()
    assert found["left"] is None and 0 <= found["ended, s"] < 60
    assert ("answer" in found) == (fault != "killed-asleep")
    if fault == "killed-waking":
        assert found["answer"] == 500 and found["said"] == ["rank 1 died unexpectedly"]
