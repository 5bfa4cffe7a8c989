"""A trainer with FSDP2 whose memory can be paused; the module `trainer` is the place to start reading.

Its modules:

    trainer        the interface for callers: supervised and policy-gradient steps, log-probabilities, weights to send
    config         switches of the optimizer
    finite         the check before each step of the optimizer
    gap            the difference between the log-probabilities of the sampling program and the trainer
    batch          sequences, and a mask of the tokens to learn from
    model          the decoder, with parameters named as in Hugging Face checkpoints
    checkpoint     parameters and optimizer state on disk
    memory         the regions of parameters, gradients and optimizer state
    weights        written into tensors of other processes, or sent in buckets of bounded size
    process_group  the meeting of the ranks
"""

from .batch import RankBatch, TokenBatch
from .checkpoint import CheckpointError
from .config import TrainerConfig
from .finite import NonFiniteError, RankFault
from .gap import LogprobGap
from .trainer import StepMetrics, Trainer

__all__ = [
    "CheckpointError", "LogprobGap", "NonFiniteError", "RankBatch", "RankFault", "StepMetrics", "TokenBatch", "Trainer",
    "TrainerConfig",
]  # fmt: skip
