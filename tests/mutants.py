"""Small wrong changes, and the tests that must find each of them within a minute. ``make mutants``, or
``python -m tests.mutants [name ...]``.

tests/mutants.diff has the changes. Each rewrites one place of a copy of the sources: an old text, which is there
exactly once, becomes a new one. Each change of Python has a copy (tests/rewrites.py). Changes of the core are in one
copy and one build: MUTANT in the new text is true where the variable MEMSAVER_TEST_MUTANT has the name of the change.
Without a change all tests named there must pass: a failure comes from the change.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.rewrites import ROOT, UNCHANGED, Rewrite

BUILD = ROOT / "build" / "mutants"
LIMIT_S = 60.0
NONE = "none"  # selects no mutant
CPP = "cpp: "  # before the name of a test case of tests/cpp

# The mutants' core takes the place of memsaver._core, however memsaver was installed; in subprocesses too.
REDIRECT = """
import importlib.util
import sys


class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "memsaver._core":
            return importlib.util.spec_from_file_location(name, {core!r})
        return None


sys.meta_path.insert(0, Redirect)
"""


# A header that each changed file of the copy includes.
SELECTION = """\
#pragma once

#include <cstdlib>
#include <mutex>
#include <string_view>
namespace memsaver::tests {
inline bool is_selected(std::string_view name) {
  const char* selected = std::getenv("MEMSAVER_TEST_MUTANT");
  return selected != nullptr && name == selected;
}
}  // namespace memsaver::tests
"""


class Mutant(Rewrite):
    """A change of the core. Its tests are ids of pytest, below tests/, or "cpp: " and a test case."""

    def rewrite(self, text: str) -> str:
        # The variable is read once at each place.
        selected = f'([] {{ static const bool on = ::memsaver::tests::is_selected("{self.name}"); return on; }}())'
        return super().rewrite(text).replace("MUTANT", selected)

    @contextmanager
    def applied(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """The folder to run tests in, and the variables that select the change."""
        yield ROOT, {"MEMSAVER_TEST_MUTANT": self.name, "PYTHONPATH": str(BUILD / "site")}


def changes(text: str) -> Iterator[Rewrite]:
    """Of tests/mutants.diff: ``--- FILE``, then ``@@ NAME`` for each of its changes, with a sentence, the old lines
    after ``-``, the new ones after ``+``, and the tests.
    """
    for part in re.split(r"^--- ", text, flags=re.MULTILINE)[1:]:
        file, _, rest = part.partition("\n")
        for each in re.split(r"^@@ ", rest, flags=re.MULTILINE)[1:]:
            name, change, *lines = each.splitlines()
            old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            tests = [line for line in lines if line[0] not in "-+"]
            yield (Mutant if file.startswith("csrc/") else Rewrite)(name, change, file, old, new, tests)


CHANGES = list(changes((ROOT / "tests" / "mutants.diff").read_text()))
MUTANTS = [each for each in CHANGES if isinstance(each, Mutant)]
REWRITES = [each for each in CHANGES if not isinstance(each, Mutant)]


def write_sources() -> Path:
    """A copy of the sources of the core with all changes. A file that stays the same keeps its time, for the build."""
    folder = BUILD / "sources"
    texts = {path.relative_to(ROOT): path.read_text() for path in sources()}
    for each in MUTANTS:
        texts[Path(each.file)] = each.rewrite(texts[Path(each.file)])
    for path in {Path(each.file) for each in MUTANTS}:
        texts[path] = '#include "mutants.h"\n' + texts[path]
    texts[Path("csrc/mutants.h")] = SELECTION
    for old in folder.glob("*/**/*"):
        if old.is_file() and old.relative_to(folder) not in texts:
            old.unlink()
    for path, text in texts.items():
        copy = folder / path
        if not copy.exists() or copy.read_text() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
    return folder


def sources() -> Iterator[Path]:
    yield ROOT / "CMakeLists.txt"
    for folder in (ROOT / "csrc", ROOT / "tests" / "cpp", ROOT / "tests" / "device"):
        yield from (path for path in folder.rglob("*") if path.suffix in (".h", ".c", ".cpp"))


def build() -> None:
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], check=True, capture_output=True, text=True
    )
    cmake = os.environ.get("CMAKE", "cmake")
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS_DEBUG": "-O1",
        "MEMSAVER_TESTS": "ON",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.stdout.strip(),
    }
    defined = [f"-D{option}={value}" for option, value in options.items()]
    subprocess.run([cmake, "-S", write_sources(), "-B", BUILD, "--log-level=NOTICE", *defined], check=True)
    targets = ["_core", "memsaver_tests"]
    subprocess.run([cmake, "--build", BUILD, "--parallel", str(os.cpu_count()), "--target", *targets], check=True)
    (core,) = BUILD.glob("_core*.so")
    (BUILD / "site").mkdir(exist_ok=True)
    (BUILD / "site" / "sitecustomize.py").write_text(REDIRECT.format(core=str(core)))


def command_of(test: str) -> list[str]:
    if test.startswith(CPP):
        case = test.removeprefix(CPP).replace(",", "?")  # a comma separates filters
        return [str(BUILD / "memsaver_tests"), f"-tc={case}"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{test}"]


def run(test: str, change: Rewrite) -> tuple[str, float]:
    """Returns "passed", "failed" or another outcome, and the seconds that it took."""
    began = time.monotonic()
    with change.applied() as (folder, variables):
        path = os.pathsep.join(filter(None, [variables["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, **variables, "PYTHONPATH": path}
        try:
            done = subprocess.run(
                command_of(test), cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not over after {LIMIT_S:.0f} s", LIMIT_S
    return outcome(test, done), time.monotonic() - began


def outcome(test: str, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0 or done.returncode == 1:
        return "failed"  # by a signal, too
    if done.returncode != 0:
        return f"not run: {done.stdout}{done.stderr}"
    lines = [line for line in done.stdout.splitlines() if " passed" in line]
    counted = "test cases:" if test.startswith(CPP) else " passed"
    numbers = [re.findall(r"(\d+) (passed|skipped|xfailed|xpassed)", line) for line in lines if counted in line]
    counts = {outcome: int(number) for number, outcome in numbers[-1]} if numbers else {}
    if counts.pop("passed", 0) == 0:
        return "not run: no test of this name passed"
    if not test.startswith(CPP) and counts:
        return f"not run: {lines[-1]}"
    return "passed"


def check(chosen: Sequence[Rewrite]) -> int:
    missed = 0
    without: dict[type, Rewrite] = {Mutant: Mutant(NONE, "", "", "", "", ()), Rewrite: UNCHANGED}
    tests = sorted({(test, type(change)) for change in chosen for test in change.tests}, key=str)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (test, _), (found, _) in zip(tests, pool.map(lambda each: run(each[0], without[each[1]]), tests)):
            if found != "passed":
                missed += 1
                print(f"without a change, {test}: {found}", flush=True)
        if missed:
            return missed
        print(f"{len(tests)} tests pass without a change", flush=True)
        jobs = [(change, test) for change in chosen for test in change.tests]
        results = pool.map(lambda job: run(job[1], job[0]), jobs)
        for change, ends in [(change, [next(results) for _ in change.tests]) for change in chosen]:
            caught = [(test, took) for test, (how, took) in zip(change.tests, ends) if how == "failed"]
            for test, took in caught:
                print(f"found    {change.name} ({took:.1f} s): {test}", flush=True)
            if not caught:
                missed += 1
                how = "; ".join(f"{test}: {how}" for test, (how, _) in zip(change.tests, ends))
                print(f"MISSED   {change.name} ({change.change}): {how}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} changes found")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of changes, or 'core', or 'python'; all where none is named")
    names = set(parser.parse_args().names)
    groups: dict[str, Sequence[Rewrite]] = {"core": MUTANTS, "python": REWRITES}
    unknown = names - {change.name for change in CHANGES} - set(groups)
    if unknown:
        parser.error(f"no such change: {', '.join(sorted(unknown))}")
    of_groups = [change for name in names & set(groups) for change in groups[name]]
    chosen = [change for change in CHANGES if not names or change.name in names or change in of_groups]
    if any(isinstance(change, Mutant) for change in chosen):
        build()
    sys.exit(check(chosen) != 0)


if __name__ == "__main__":
    main()
