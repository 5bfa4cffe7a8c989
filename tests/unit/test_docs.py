"""The documents: links, snippets, commands, names of tests and files, and the origin of figures."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memsaver
from benchmarks import __main__ as benchmarks
from benchmarks.harness.command import Options
from tests.support import ROOT

PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md")
    for page in sorted(ROOT.glob(pattern))
}
PAST = ("CHANGELOG.md", "docs/log.md")  # history names files and commands of its time
TESTS = {
    name
    for path in ROOT.glob("tests/**/test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
}
SOURCES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("memsaver", "csrc", "examples", "benchmarks", "tests", "tools")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".h", ".cpp", ".sh")
]
MODULES = ("memsaver", "memsaver.ray", "memsaver.guests", "memsaver.distributed", "memsaver.metrics")
# Pages with figures that are measured here; each section names its origin.
MEASURED = ["README.md", "docs/benchmarks.md"]
# Pages with figures in their text; the page names hardware and date once.
REPORTING = [
    *(f"docs/{name}.md" for name in ("design", "frameworks", "log", "shared-pool")),
    "examples/colocate/README.md",
]
# Pages without figures.
EXPLAINING = ["docs/index.md", "docs/limits.md"]
FIGURE = re.compile(r"\d (?:ms|us|s|GB/s|tokens/s|%|times)\b|\d %")
HARDWARE, DATE = r"\bH[12]00s?\b", r"\b20\d\d-\d\d-\d\d\b"
MOST_LINES_OF_README = 120

each_page = pytest.mark.parametrize("page", PAGES)


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)", _without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _snippets(text: str) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def _exported(module: str) -> set[str]:
    if module in ("memsaver.ray", "memsaver.metrics"):
        pytest.importorskip({"memsaver.ray": "ray", "memsaver.metrics": "prometheus_client"}[module])
    return set(importlib.import_module(module).__all__)


@each_page
def test_links_and_names_of_tests_and_files_exist(page: str) -> None:
    text = PAGES[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there.read_text()), target
    assert set(re.findall(r"`(test_\w+)`", text)) <= TESTS
    # "run as" names the program of a run at a commit, which may be gone.
    text = re.sub(r"run as `[\w/]+\.py`(?: and `[\w/]+\.py`)?", "", text)
    for name in re.findall(r"`([\w/]+\.(?:py|h|cpp|sh))`", text) if page not in PAST else ():
        assert any(path.endswith(f"/{name}") for path in SOURCES), name


@each_page
def test_commands_that_are_named_exist(page: str, tmp_path: Path) -> None:
    text = PAGES[page]
    if page not in PAST:
        assert "python benchmarks/" not in text
        for command in re.findall(r"python -m benchmarks\s+([^`|]+)`", text):
            name, *options = shlex.split(command)
            if name != "NAME":
                assert name in benchmarks.names(), name
                module = importlib.import_module(f"benchmarks.{name}")
                parser = Options(name, module)
                module.options(parser)
                parser.parse_args([str(tmp_path) if each == "DIR" else each for each in options])
    for module in re.findall(r"-m (examples(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    asked = re.findall(r"`make ([a-z]+)", text) + re.findall(r"^make ([a-z]+)", shell, flags=re.MULTILINE)
    assert set(asked) <= targets


@each_page
def test_snippets_parse_and_their_calls_match_signatures(page: str) -> None:
    for snippet in _snippets(PAGES[page]):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                assert {name.name for name in node.names} <= _exported(node.module)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "memsaver":
                assert node.attr in _exported("memsaver"), f"memsaver.{node.attr} in {page}"
            if not isinstance(node, ast.Call) or any(isinstance(each, ast.Starred) for each in node.args):
                continue
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "memsaver":
                named = {each.arg: None for each in node.keywords if each.arg is not None}
                try:
                    inspect.signature(getattr(memsaver, node.func.attr)).bind(*node.args, **named)
                except TypeError as error:
                    raise AssertionError(f"{ast.unparse(node)}: {error}") from error


def test_benchmarks_and_their_results_are_named_in_a_page() -> None:
    pages = "\n".join(PAGES.values())
    for name in benchmarks.names():
        assert f"`python -m benchmarks {name}" in pages, f"is {name} a benchmark, or a part of benchmarks/harness?"
    for each in (ROOT / "benchmarks/results").iterdir():
        assert f"benchmarks/results/{each.name})" in pages, each


def test_figures_have_their_origin() -> None:
    for page in MEASURED:
        sections = re.split(r"^## ", PAGES[page], flags=re.MULTILINE)
        measured = [each for each in sections if FIGURE.search(_without_code(each))]
        assert measured
        for text in measured:
            for part in (r"python (-m benchmarks \w+|-m examples)", HARDWARE, DATE):
                assert re.search(part, text), (page, part, text)
            assert re.search(r"commits? .*\b[0-9a-f]{7}\b|commits below", text), (page, text)
    for page in REPORTING:
        assert re.search(HARDWARE, PAGES[page]) and re.search(DATE, PAGES[page]), page
    for page in EXPLAINING:
        assert FIGURE.search(_without_code(PAGES[page])) is None, page


def test_each_promise_names_a_test() -> None:
    rows = [line for line in PAGES["docs/promises.md"].splitlines() if line.startswith("| ")]
    rows = [line for line in rows if not line.startswith("| promise")]
    assert len(rows) > 25
    assert all("`test_" in line for line in rows)


def test_the_reference_has_every_public_name() -> None:
    names = [each.rpartition(".") for each in re.findall(r"^::: (\S+)", PAGES["docs/reference.md"], flags=re.MULTILINE)]
    shared = _exported("memsaver.distributed") & _exported("memsaver.ray") - {"Group"}
    assert all(getattr(memsaver.distributed, name) is getattr(memsaver.ray, name) for name in shared)
    for module in MODULES:
        expected = _exported(module) - (shared if module == "memsaver.distributed" else set())
        assert {name for parent, _, name in names if parent == module} == expected, module


def test_pages_are_short_linked_and_complete() -> None:
    assert len(PAGES["README.md"].splitlines()) <= MOST_LINES_OF_README
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == pages, f"the nav of mkdocs.yml has not exactly the pages of docs/: {sorted(listed ^ pages)}"
    assert set(re.findall(r"\]\(([\w-]+\.md)", PAGES["docs/index.md"])) == pages - {"index.md"}
    for parent in ("csrc", "memsaver"):
        for folder in {path.parent for suffix in ("py", "cpp") for path in (ROOT / parent).glob(f"*/*.{suffix}")}:
            name = str(folder.relative_to(ROOT))
            named = {f"`{name}`", f"`{name.replace('/', '.')}`"}
            assert any(each in PAGES["docs/source-tree.md"] for each in named), name
    assert any(each in (ROOT / "examples/two_processes.py").read_text() for each in _snippets(PAGES["README.md"]))


@pytest.mark.gpu
def test_the_quick_start_of_the_readme_runs_on_a_gpu() -> None:
    program = next(snippet for snippet in _snippets(PAGES["README.md"]) if "CUDAGraph" in snippet)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
