"""A trainer with FSDP2 whose memory can be paused; the module `trainer` is the place to start reading.

trainer: supervised and policy-gradient steps. batch: samples in packed rows. model, token_logprobs: the forward pass.
statistics: of sampled tokens. weights: for engines. checkpoint: files. memory: regions. process_group: the ranks meet.
"""

from .batch import RankBatch, Sample
from .checkpoint import CheckpointError
from .statistics import TokenStatistics
from .trainer import NonFiniteError, StepMetrics, Trainer, TrainerConfig
from .weights import EngineWeights

__all__ = [
    "CheckpointError", "EngineWeights", "NonFiniteError", "RankBatch", "Sample", "StepMetrics", "TokenStatistics",
    "Trainer", "TrainerConfig",
]  # fmt: skip
