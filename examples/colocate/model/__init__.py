"""The parts of the model that engine and trainer share: the configuration and pure layer functions."""

from .config import ModelConfig, RopeScaling, parameter_shapes

__all__ = ["ModelConfig", "RopeScaling", "parameter_shapes"]
