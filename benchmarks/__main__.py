"""Lists the benchmarks, and runs one: `python -m benchmarks NAME [OPTIONS]`."""

from __future__ import annotations

import ast
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """A module or package beside this one is a benchmark, except for the harness."""
    found = [path.stem for path in FOLDER.glob("[a-z]*.py")]
    found += [path.parent.name for path in FOLDER.glob("*/__init__.py")]
    return sorted(name for name in found if name != "harness")


def first_line(name: str) -> str:
    """Of the benchmark's docstring, without an import of the benchmark."""
    module = FOLDER / f"{name}.py"
    source = module if module.exists() else FOLDER / name / "__init__.py"
    return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0, 1 if a measurement or a comparison failed, 2 for wrong arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [OPTIONS]; --help after the name lists its options\n")
        print("\n".join(f"{name:16}{first_line(name)}" for name in names()))
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in names():
        nearest = get_close_matches(name, names(), 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        print(f"there is no benchmark {name!r}, expected one of {', '.join(names())}{hint}", file=sys.stderr)
        return 2
    # Imported here: the list needs no torch, and each process that a benchmark starts imports this module.
    from benchmarks.harness.command import run

    return run(name, import_module(f"benchmarks.{name}"), rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
