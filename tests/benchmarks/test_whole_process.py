"""The benchmark of a trainer that leaves its GPUs whole, on the host driver: its figures of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MIB = 1 << 20


def result_of(*arguments: str) -> tuple[dict[str, Any], str]:
    """The line of JSON, and the text before it."""
    command = [sys.executable, str(BENCHMARKS / "whole_process.py"), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text, _, line = done.stdout.rstrip("\n").rpartition("\n")
    return json.loads(line), text


def regions_of(account: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["state"], row["bytes"]) for row in account["rows"] if row["kind"] == "region"]


def test_each_moment_of_a_rank_has_its_account() -> None:
    result, text = result_of("--steps", "2")
    assert regions_of(result["floor"]["account"]) == []
    for rank in result["ways"]["paused"]:
        moments = {name: rank[name]["account"] for name in ("before", "paused", "resumed")}
        assert [regions_of(each) for each in moments.values()] == [[("active", 2 * MIB)], [], [("active", 2 * MIB)]]
        for each in moments.values():
            beside = each["other_processes_bytes"] + each["unlisted_bytes"]
            assert each["used_bytes"] == sum(row["bytes"] for row in each["rows"]) + beside
    assert text.count("  MiB ") == text.count("  unknown ") == len(result["ways"]["paused"])


def test_stages_are_those_of_both_ranks() -> None:
    result, text = result_of("--stages")
    names = [[each["stage"] for each in stages] for stages in result["stages"]]
    assert names[0] == names[1] and len(names) == 2
    order = ["no context", "context made", "one collective of the world", "groups closed", "caches empty"]
    assert [name for name in names[0] if name in order] == order
    assert all(text.count(f"\n  {name} ") == 2 for name in order)


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from support import accounts

    return accounts


def account_with(rows: list[tuple[str, str, str, int]], listed: int | None) -> dict[str, Any]:
    return {
        "used_bytes": 9 * MIB, "listed_bytes": listed, "unlisted_bytes": 3 * MIB, "other_processes_bytes": 0,
        "rows": [dict(zip(("kind", "label", "state", "bytes"), row)) for row in rows],
    }  # fmt: skip


def test_the_unknown_memory_has_a_line_in_each_table(accounts: Any) -> None:
    columns = {
        "first": account_with([("region", "kv", "active", 2 * MIB), ("unknown", "", "", 4 * MIB)], 6 * MIB),
        "second": account_with([("region", "kv", "paused", MIB)], MIB),
        "third": account_with([("region", "kv", "active", MIB)], None),
    }
    lines = [line.split() for line in accounts.table(columns)]
    assert lines[0] == ["MiB", "first", "second", "third"]
    assert lines[1] == ["region", "kv", "2.0", "1.0", "1.0"]
    assert lines[2] == ["unknown", "4.0", "0.0", "-"]
    assert lines[-1] == ["in", "use", "9.0", "9.0", "9.0"]


def test_rows_of_this_process_are_apart_from_the_rest(accounts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from memsaver.ledger import Ledger, LedgerRow

    rows = [
        LedgerRow(os.getpid(), "me", "context", "", "", 3), LedgerRow(os.getpid(), "me", "unknown", "", "", -1),
        LedgerRow(1, "init", "process", "", "", 5), LedgerRow(None, "", "unlisted", "", "", 7),
    ]  # fmt: skip
    device = SimpleNamespace(own_bytes=2, ledger=Ledger(14, rows, False))
    monkeypatch.setattr(accounts.memsaver, "stats", lambda: SimpleNamespace(devices={"cuda:1": device}))
    found = accounts.account_of("cuda:1")
    assert [(row["kind"], row["bytes"]) for row in found["rows"]] == [("context", 3), ("unknown", -1)]
    assert (found["unlisted_bytes"], found["other_processes_bytes"], found["is_consistent"]) == (7, 5, False)
