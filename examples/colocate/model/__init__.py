"""The parts of the model that engine and trainer share: configuration, layers, and the layout of weights."""

from .config import ModelConfig, RopeScaling, parameter_shapes
from .weight_layout import WeightPart, bit_sum, weight_layout

__all__ = ["ModelConfig", "RopeScaling", "WeightPart", "bit_sum", "parameter_shapes", "weight_layout"]
