"""What the engine and the trainer share about the model: its configuration and its pure layer functions."""

from .config import ModelConfig, RopeScaling, parameter_shapes

__all__ = ["ModelConfig", "RopeScaling", "parameter_shapes"]
