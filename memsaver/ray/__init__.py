"""Ray actors that take turns on GPUs: base classes of actors, and the group of all ranks."""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "memsaver.ray needs Ray; expected it from pip install 'memsaver[ray]'", name="ray"
    ) from error

from memsaver.ray.group import Group
from memsaver.turns.members import AsyncColocated, Colocated, Ready
from memsaver.turns.turn import Turn

__all__ = ["AsyncColocated", "Colocated", "Group", "Ready", "Turn"]
