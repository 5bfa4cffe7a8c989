"""A hook of mkdocs: files of the repository that pages link to become part of the site, under `repository/`.

The pages link to each other as GitHub expects it. mkdocs knows the files in `docs/` only.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "repository/"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    waiting = [("docs/" + each.src_uri) for each in files.documentation_pages()]
    waiting += ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/colocate/README.md"]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, PREFIX + path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting += [target for target in _targets(path) if (ROOT / target).is_file()]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    path = uri.removeprefix(PREFIX) if uri.startswith(PREFIX) else "docs/" + uri

    def moved(link: re.Match[str]) -> str:
        target, mark, anchor = link[1].partition("#")
        if not target or "://" in target:
            return link[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        there = there.removeprefix("docs/") if there.startswith("docs/") else PREFIX + there
        return f"]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{mark}{anchor})"

    return LINK.sub(moved, markdown)


def _targets(path: str) -> list[str]:
    links = (link.partition("#")[0] for link in LINK.findall((ROOT / path).read_text()) if "://" not in link)
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links if link]
