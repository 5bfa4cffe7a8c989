"""The wrong changes agree with the sources and with the tests."""

from __future__ import annotations

import ast
import re
from itertools import groupby

import pytest

from tests.mutants import CHANGES, CPP, MUTANTS, REWRITES
from tests.rewrites import ROOT, Rewrite


def test_every_mutant_changes_the_core_at_one_place() -> None:
    for each in MUTANTS:
        assert each.text().count(f'is_selected("{each.name}")') == 1


def test_every_rewrite_changes_the_code_at_one_place() -> None:
    for file, rewrites in groupby(REWRITES, key=lambda each: each.file):
        code = ast.dump(ast.parse((ROOT / file).read_text()))
        for each in rewrites:
            assert ast.dump(ast.parse(each.text())) != code, each.name  # raises unless the old text is there once
    with pytest.raises(ValueError, match="the old text is 0 times in tests/mutants.py, expected once"):
        Rewrite("wrong", "", "tests/mutants.py", "no such" + " text", "", ()).text()


def test_the_tests_that_find_a_change_exist() -> None:
    assert all(change.tests for change in CHANGES)
    cases = re.findall(r'TEST_CASE\("([^"]+)"\)', "".join(path.read_text() for path in ROOT.glob("tests/cpp/*.cpp")))
    for test in {test for change in CHANGES for test in change.tests}:
        if test.startswith(CPP):
            assert test.removeprefix(CPP) in cases
            continue
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / path).read_text(), test
