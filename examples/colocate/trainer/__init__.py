"""A trainer with FSDP2 whose memory can be paused; the module `trainer` is the place to start reading.

trainer: FSDP2 with mixed precision, supervised and policy-gradient steps. batch: samples packed into rows.
causal_lm: the forward pass. statistics: of sampled tokens. weights: written into engines. trainer_memory: regions.
process_group: the ranks meet.
"""

from .batch import RankBatch, Sample
from .statistics import TokenStatistics
from .trainer import CheckpointError, NonFiniteError, StepMetrics, Trainer, TrainerConfig
from .weights import EngineWeights

__all__ = [
    "CheckpointError", "EngineWeights", "NonFiniteError", "RankBatch", "Sample", "StepMetrics", "TokenStatistics",
    "Trainer", "TrainerConfig",
]  # fmt: skip
