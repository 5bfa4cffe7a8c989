"""The parts of the model that engine and trainer share: configuration, layers, and the layout of weights."""

from .config import ModelConfig, parameter_shapes, random_parameters
from .weight_layout import EngineWeights, WeightPart, checksums, fused_shapes, weight_layout

__all__ = [
    "EngineWeights", "ModelConfig", "WeightPart", "checksums", "fused_shapes", "parameter_shapes", "random_parameters",
    "weight_layout",
]  # fmt: skip
