"""memsaver/_core.pyi describes the core as it is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytest.importorskip("nanobind", reason="the generator of stubs is not installed")


def test_the_stub_of_the_core_is_up_to_date(tmp_path: Path) -> None:
    made = tmp_path / "_core.pyi"
    program = ["-m", "nanobind.stubgen", "-q", "-m", "memsaver._core", "-p", "csrc/bindings/stubs.txt", "-o", str(made)]
    subprocess.run([sys.executable, *program], cwd=ROOT, check=True)
    assert made.read_text() == (ROOT / "memsaver/_core.pyi").read_text(), "run `make stubs`"


def test_the_stub_of_the_core_names_types() -> None:
    text = (ROOT / "memsaver/_core.pyi").read_text()
    assert "def __getattr__" not in text
    assert "def region_at(address: int) -> Region | None" in text
