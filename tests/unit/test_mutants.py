"""The table of mutants agrees with the core and with the tests. A normal build has no mutants."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from memsaver import _core
from tests.mutants import CPP, MUTANTS, ROOT, Mutant, in_sources


def test_every_mutant_is_in_the_core_and_in_the_table_once() -> None:
    assert sorted(in_sources()) == sorted(mutant.name for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_find_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    cases = re.findall(r'TEST_CASE\("([^"]+)"\)', "".join(path.read_text() for path in ROOT.glob("tests/cpp/*.cpp")))
    for test in mutant.tests:
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
