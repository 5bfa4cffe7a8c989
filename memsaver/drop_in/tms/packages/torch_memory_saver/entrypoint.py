from memsaver.drop_in.tms.saver import TorchMemorySaver

from .hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess"]
