"""The environment of a program whose memory is managed whole: ``memsaver run``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from memsaver.config import parse_drop_in
from memsaver.drop_in import startup
from memsaver.drop_in.tms.library import FOLDER, preload_variable

LIBRARY = FOLDER / "torch_memory_saver_hook_mode_preload.abi3.so"


def environment(backup: str, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a managed program.

    Args:
        backup: The policy of all memory: ``"none"``, ``"host"`` or ``"disk"``.
        base: The variables of the caller. Other libraries to preload and other drop-ins stay.

    Raises:
        ConfigError: ``MEMSAVER_DROP_IN`` has a wrong value.
    """
    drop_in = base.get("MEMSAVER_DROP_IN", "")
    if "tms" not in parse_drop_in(drop_in):
        drop_in = ",".join(filter(None, [drop_in, "tms"]))
    return {
        **base,
        "MEMSAVER_DROP_IN": drop_in,
        "PYTHONPATH": startup.python_path(base.get("PYTHONPATH", "")),
        "LD_PRELOAD": preload_variable(str(LIBRARY), base.get("LD_PRELOAD", "")),
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": str(int(backup == "host")),
        "TMS_INIT_ENABLE_DISK_BACKUP": str(int(backup == "disk")),
    }


def run(program: list[str], backup: str) -> None:
    """Replaces this process by the program. It does not return.

    Raises OSError if the program cannot be started, and ConfigError as environment().
    """
    os.execvpe(program[0], program, environment(backup, os.environ))
