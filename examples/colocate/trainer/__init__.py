"""A trainer with FSDP2 whose memory can be paused; the module `trainer` is the place to start reading.

Its modules:

    trainer        the interface for callers: supervised and policy-gradient steps, log-probabilities, weights to send
    config         settings of the optimizer and of the computation
    batch          samples, packed into micro-batches
    model          the decoder, with parameters named as in Hugging Face checkpoints
    token_logprobs log-probabilities without the logits of all tokens
    statistics     the gap to the sampling program, and a test of the sampler
    weights        written into tensors of engines, or sent in buckets of bounded size
    checkpoint     parameters and optimizer state on disk, and initial parameters of Hugging Face
    memory         the regions of parameters, gradients, optimizer state and activations
    process_group  the meeting of the ranks
"""

from .batch import RankBatch, Sample
from .checkpoint import CheckpointError
from .config import TrainerConfig
from .statistics import TokenStatistics
from .trainer import NonFiniteError, StepMetrics, Trainer
from .weights import EngineWeights

__all__ = [
    "CheckpointError", "EngineWeights", "NonFiniteError", "RankBatch", "Sample", "StepMetrics",
    "TokenStatistics", "Trainer", "TrainerConfig",
]  # fmt: skip
