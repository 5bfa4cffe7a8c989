"""torch_memory_saver's API on memsaver. See docs/frameworks.md of memsaver."""

from .entrypoint import TorchMemorySaver, configure_subprocess

torch_memory_saver = TorchMemorySaver()

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
