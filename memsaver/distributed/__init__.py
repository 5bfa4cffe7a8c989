"""Groups of ranks over torch.distributed's store: the turns of memsaver.ray, for torchrun and similar launchers."""

try:
    import torch.distributed as _distributed
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "memsaver.distributed needs torch; expected it from pip install 'memsaver[torch]'", name="torch"
    ) from error
if not _distributed.is_available():
    raise ModuleNotFoundError("memsaver.distributed needs torch.distributed, which this build of torch does not have")

from memsaver.distributed.group import Group
from memsaver.distributed.messages import LostRankError
from memsaver.turns.members import AsyncColocated, Colocated, Ready
from memsaver.turns.turn import Turn

__all__ = ["AsyncColocated", "Colocated", "Group", "LostRankError", "Ready", "Turn"]
