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
from collections.abc import Iterator
from pathlib import Path

import pytest

import memsaver
from benchmarks import __main__ as benchmarks
from benchmarks.harness.command import Options

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
TESTS = {
    name
    for path in ROOT.glob("tests/**/test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
}
SOURCES = [
    str(path.relative_to(ROOT))
    for folder in ("memsaver", "csrc", "examples", "benchmarks", "tests", "tools")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix in (".py", ".h", ".cpp", ".sh")
]
# Pages with figures that are measured here; each section names its origin.
MEASURED = [ROOT / "README.md", ROOT / "docs/benchmarks.md"]
# Pages with figures in their text; the page names hardware and date once.
REPORTING = [
    *(ROOT / f"docs/{name}.md" for name in ("design", "frameworks", "log", "shared-pool")),
    *(ROOT / f"examples/colocate/{name}.md" for name in ("README", "graphs")),
]
# Pages without figures.
EXPLAINING = [ROOT / f"docs/{name}.md" for name in ("index", "limits")]
FIGURE = re.compile(r"\d (?:ms|us|s|GB/s|tokens/s|%|times)\b|\d %")
MOST_LINES_OF_README = 120

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", _without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _snippets(page: Path) -> list[str]:
    return [
        textwrap.dedent(block)
        for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    ]


def _sections(page: Path) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", page.read_text(), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def _exported(module: str) -> set[str]:
    return set(importlib.import_module(module).__all__)


@each_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= TESTS


@each_page
def test_source_files_that_are_named_exist(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "log.md"):  # history names files that are gone
        return
    # "run as" names the program of a run at a commit, which may be gone.
    text = re.sub(r"run as `[\w/]+\.py`(?: and `[\w/]+\.py`)?", "", page.read_text())
    for name in re.findall(r"`([\w/]+\.(?:py|h|cpp|sh))`", text):
        assert any(f"/{path}".endswith(f"/{name}") for path in SOURCES), name


@each_page
def test_commands_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    if page.name not in ("CHANGELOG.md", "log.md"):  # history names commands of its time
        assert "python benchmarks/" not in text
        for command in re.findall(r"python -m benchmarks\s+([^`|]+)`", text):
            name, *options = shlex.split(command)
            if name != "NAME":
                assert name in benchmarks.names(), name
                module = importlib.import_module(f"benchmarks.{name}")
                parser = Options(name, module)
                module.options(parser)
                parser.parse_args([each for each in options if each not in ("--save", "DIR")])
    for module in re.findall(r"-m (examples(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    asked = re.findall(r"`make ([a-z]+)", text) + re.findall(r"^make ([a-z]+)", shell, flags=re.MULTILINE)
    assert set(asked) <= targets


def test_each_benchmark_is_named_in_a_page() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    for name in benchmarks.names():
        assert f"`python -m benchmarks {name}" in pages, f"is {name} a benchmark, or a part of benchmarks/harness?"


def test_each_result_is_linked_in_a_page() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    files = (ROOT / "benchmarks/results").iterdir()
    assert [each.name for each in files if f"benchmarks/results/{each.name})" not in pages] == []


@each_page
def test_snippets_parse_and_their_calls_match_signatures(page: Path) -> None:
    for snippet in _snippets(page):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "memsaver":
                assert node.attr in _exported("memsaver"), f"memsaver.{node.attr} in {page.name}"
            if isinstance(node, ast.ImportFrom) and node.module == "memsaver.ray":
                pytest.importorskip("ray")
                assert {name.name for name in node.names} <= _exported("memsaver.ray")
            if isinstance(node, ast.ImportFrom) and node.module == "memsaver.guests":
                assert {name.name for name in node.names} <= _exported("memsaver.guests")
            if isinstance(node, ast.ImportFrom) and node.module == "memsaver.distributed":
                assert {name.name for name in node.names} <= _exported("memsaver.distributed")
            if isinstance(node, ast.Call):
                _check_call(node)


def _check_call(call: ast.Call) -> None:
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return
    if function.value.id != "memsaver" or any(isinstance(each, ast.Starred) for each in call.args):
        return
    named = {each.arg: None for each in call.keywords if each.arg is not None}
    try:
        inspect.signature(getattr(memsaver, function.attr)).bind(*call.args, **named)
    except TypeError as error:
        raise AssertionError(f"{ast.unparse(call)}: {error}") from error


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES_OF_README


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_a_section_with_figures_names_command_hardware_date_and_commit(page: Path) -> None:
    found = 0
    for title, text in _sections(page).items():
        if FIGURE.search(_without_code(text)) is None:
            continue
        found += 1
        assert re.search(r"python (-m benchmarks \w+|-m examples)", text), title
        assert re.search(r"\bH[12]00s?\b", text), title
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", text), title
        assert re.search(r"commits? .*\b[0-9a-f]{7}\b|commits below", text), title
    assert found > 0


@pytest.mark.parametrize("page", REPORTING, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_that_report_figures_name_hardware_and_date(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"\bH[12]00s?\b", text)
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", text)


@pytest.mark.parametrize("page", EXPLAINING, ids=lambda page: page.name)
def test_explanatory_pages_have_no_figures(page: Path) -> None:
    assert FIGURE.search(_without_code(page.read_text())) is None


def test_the_page_of_promises_names_existing_tests() -> None:
    rows = [line for line in (ROOT / "docs/promises.md").read_text().splitlines() if line.startswith("| ")]
    rows = [line for line in rows if not line.startswith("| promise")]
    assert len(rows) > 25
    assert all("`test_" in line for line in rows)


def _reference() -> Iterator[tuple[str, str]]:
    for name in re.findall(r"^::: (\S+)", (ROOT / "docs/reference.md").read_text(), flags=re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        yield module, attribute


def test_the_reference_has_every_public_name() -> None:
    assert {name for module, name in _reference() if module == "memsaver"} == _exported("memsaver")
    assert {name for module, name in _reference() if module == "memsaver.guests"} == _exported("memsaver.guests")
    pytest.importorskip("ray")
    assert {name for module, name in _reference() if module == "memsaver.ray"} == _exported("memsaver.ray")
    # The other names of memsaver.distributed are classes of memsaver.ray as well.
    assert {name for module, name in _reference() if module == "memsaver.distributed"} == {"Group", "LostRankError"}
    shared = _exported("memsaver.distributed") - {"Group", "LostRankError"}
    assert all(getattr(memsaver.distributed, name) is getattr(memsaver.ray, name) for name in shared)


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    pages = {page.name for page in ROOT.glob("docs/*.md")}
    assert listed == pages, f"the nav of mkdocs.yml has not exactly the pages of docs/: {sorted(listed ^ pages)}"


def test_the_first_page_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs/index.md").read_text()))
    assert linked == {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"}


def test_the_source_tree_has_every_folder() -> None:
    text = (ROOT / "docs/source-tree.md").read_text()
    for parent in ("csrc", "memsaver"):
        folders = {path.parent for pattern in ("*.py", "*.cpp") for path in (ROOT / parent).glob(f"*/{pattern}")}
        for folder in folders:
            name = str(folder.relative_to(ROOT))
            assert f"`{name}`" in text or f"`{name.replace('/', '.')}`" in text, name


def test_the_tutorial_runs_without_a_gpu() -> None:
    program = "\n".join(_snippets(ROOT / "docs/index.md"))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_the_example_of_two_processes() -> None:
    assert any(each in (ROOT / "examples/two_processes.py").read_text() for each in _snippets(ROOT / "README.md"))


@pytest.mark.gpu
def test_the_quick_start_of_the_readme_runs_on_a_gpu() -> None:
    program = next(snippet for snippet in _snippets(ROOT / "README.md") if "CUDAGraph" in snippet)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
