"""The tables of wrong changes agree with the sources and with the tests. A normal build has no mutants."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from memsaver import _core
from tests.mutants import CPP, MUTANTS, Mutant, in_sources
from tests.rewrites import REWRITES, ROOT, Rewrite


def test_every_mutant_is_in_the_core_and_in_the_table_once() -> None:
    assert sorted(in_sources()) == sorted(mutant.name for mutant in MUTANTS)


def test_every_rewrite_changes_the_code_at_one_place() -> None:
    for each in REWRITES:
        changed = each.text()  # raises unless the old text is there exactly once
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / each.file).read_text())), each.name
    with pytest.raises(ValueError, match="the old text is 0 times in tests/mutants.py, expected once"):
        Rewrite("wrong", "", "tests/mutants.py", "no such" + " text", "", ()).text()


@pytest.mark.parametrize("change", [*MUTANTS, *REWRITES], ids=lambda change: change.name)
def test_the_tests_that_find_a_change_exist(change: Mutant | Rewrite) -> None:
    assert change.tests
    cases = re.findall(r'TEST_CASE\("([^"]+)"\)', "".join(path.read_text() for path in ROOT.glob("tests/cpp/*.cpp")))
    for test in change.tests:
        if test.startswith(CPP):
            assert test.removeprefix(CPP) in cases
            continue
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / path).read_text()


@pytest.mark.skipif("MEMSAVER_TEST_MUTANT" in os.environ, reason="this is the build of the mutants")
def test_a_normal_build_has_no_mutants() -> None:
    core = Path(_core.__file__).read_bytes()
    assert not [mutant.name for mutant in MUTANTS if mutant.name.encode() in core]
    assert b"MEMSAVER_TEST_MUTANT" not in core
