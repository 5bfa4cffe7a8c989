"""What the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
TESTS = {
    name
    for path in ROOT.glob("tests/**/test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)
}


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= TESTS


def test_the_page_of_promises_names_tests() -> None:
    rows = [line for line in (ROOT / "docs/promises.md").read_text().splitlines() if line.startswith("| ")]
    rows = [line for line in rows if not line.startswith("| promise")]
    assert len(rows) > 25
    assert all("`test_" in line for line in rows)
