"""The ways to prepare drop-ins when Python starts: a file in the environment's site-packages, or a folder."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from memsaver.config import parse_drop_in

FOLDER: Final = Path(__file__).parent / "start"  # for PYTHONPATH

# The file stays where memsaver was uninstalled: then it does nothing.
_LINE = (
    'import os; os.environ.setdefault("MEMSAVER_DROP_IN", {value!r}) and __import__("importlib.util").util.find_spec('
    '"memsaver_drop_in") and __import__("memsaver_drop_in").start()\n'
)


def python_path(former: str = "") -> str:
    """``PYTHONPATH`` with the folder first."""
    others = [each for each in former.split(os.pathsep) if each and each != str(FOLDER)]
    return os.pathsep.join([str(FOLDER), *others])


def file() -> Path:
    """The file whose line Python runs at its start."""
    return Path(sysconfig.get_path("purelib")) / "memsaver_drop_in.pth"


def install(names: Sequence[str]) -> Path:
    """Writes the file: each Python process of the environment uses these drop-ins unless its variable says otherwise.

    Raises ConfigError for a name that does not exist, and OSError.
    """
    value = ",".join(names)
    parse_drop_in(value)
    file().write_text(_LINE.format(value=value))
    return file()


def remove() -> bool:
    """Removes the file. False if there is none."""
    found = file().exists()
    file().unlink(missing_ok=True)
    return found
