"""Free extents of host memory, against a model."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT


def test_extents_are_joined_split_and_found_as_a_model_says(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("a C++ compiler is needed")
    program = tmp_path / "extents_model"
    sources = [Path(__file__).with_name("extents_model.cpp"), ROOT / "csrc" / "backup" / "extents.cpp"]
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-I", str(ROOT / "csrc")]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    assert subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout == ""
