"""Programs with drop-ins: a file in the environment's site-packages, a folder for ``PYTHONPATH``, ``memsaver run``."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from memsaver import _core
from memsaver.config import parse_drop_in
from memsaver.errors import Error

FOLDER: Final = Path(__file__).parent / "start"  # for PYTHONPATH
# Of torch_memory_saver's package and of the libraries to preload. They are apart in an editable installation.
PACKAGES: Final = Path(__file__).parent / "tms" / "packages"
LIBRARIES: Final = Path(_core.__file__).parent / "drop_in" / "tms" / "packages"
_STEM: Final = "torch_memory_saver_hook_mode_"
PRELOAD: Final = LIBRARIES / f"{_STEM}preload.abi3.so"

# The file stays where memsaver was uninstalled: then it does nothing. Where memsaver is in the environment below a
# virtual one, its packages cannot be found yet.
_LINE = (
    'import os, sys; find = lambda: __import__("importlib.util").util.find_spec("memsaver_drop_in"); '
    'os.environ.setdefault("MEMSAVER_DROP_IN", {value!r}) and (find() or os.path.isdir({folder!a}) and '
    'not sys.path.append({folder!a}) and find()) and __import__("memsaver_drop_in").start()\n'
)


def file() -> Path:
    """The file whose line Python runs at its start."""
    return Path(sysconfig.get_path("purelib")) / "memsaver_drop_in.pth"


def install(names: Sequence[str]) -> Path:
    """Writes the file: each Python process of the environment uses these drop-ins unless its variable says otherwise.

    Raises ConfigError for a name that does not exist, and OSError.
    """
    value = ",".join(names)
    parse_drop_in(value)
    made = file().with_suffix(f".{os.getpid()}")
    try:
        made.write_text(_LINE.format(value=value, folder=str(FOLDER)))
        made.replace(file())  # on a full disk the former file stays
    except OSError:
        made.unlink(missing_ok=True)
        raise
    return file()


def remove() -> bool:
    """Removes the file. False if there is none."""
    found = file().exists()
    file().unlink(missing_ok=True)
    return found


def python_path(former: str = "") -> str:
    """``PYTHONPATH`` with the folder first. An empty part of it stays: it is the working directory."""
    others = former.split(os.pathsep) if former else []
    return os.pathsep.join([str(FOLDER), *(each for each in others if each != str(FOLDER))])


def preloaded(variable: str) -> list[str]:
    """The libraries in a value of ``LD_PRELOAD``, as the loader reads it."""
    return list(filter(None, re.split("[: ]", variable)))


def preload_variable(library: str, former: str) -> str:
    """``LD_PRELOAD`` with this library first. Other libraries stay, but for those of torch_memory_saver.

    Raises Error for a path that the variable cannot have.
    """
    if preloaded(library) != [library]:
        raise Error(
            f"the library to preload is {library!r}, expected a path without spaces and colons, at which the system's "
            "loader would split it: install memsaver elsewhere"
        )
    return ":".join([library, *(each for each in preloaded(former) if not os.path.basename(each).startswith(_STEM))])


def managed(backup: str, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program whose memory is managed whole, with this policy.

    ``base``: those of the caller. Other libraries to preload and other drop-ins stay. Raises ConfigError if
    ``MEMSAVER_DROP_IN`` has a wrong value, and as ``preload_variable()``.
    """
    drop_in = base.get("MEMSAVER_DROP_IN", "")
    if "tms" not in parse_drop_in(drop_in):
        drop_in = ",".join(filter(None, [drop_in, "tms"]))
    return {
        **base,
        "MEMSAVER_DROP_IN": drop_in,
        "PYTHONPATH": python_path(base.get("PYTHONPATH", "")),
        "LD_PRELOAD": preload_variable(str(PRELOAD), base.get("LD_PRELOAD", "")),
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": str(int(backup == "host")),
        "TMS_INIT_ENABLE_DISK_BACKUP": str(int(backup == "disk")),
    }


def run(program: list[str], backup: str) -> None:
    """Replaces this process by the program. It does not return.

    Raises OSError if the program cannot be started, and ConfigError as managed().
    """
    os.execvpe(program[0], program, managed(backup, os.environ))
