from .utils import is_xpu

__all__ = ["is_xpu"]
