"""A trainer with FSDP2 whose memory can be paused; the module `trainer` is the place to start reading.

Its modules:

    trainer        what callers use: supervised and policy-gradient steps, log-probabilities, weights to send
    config         switches of the optimizer
    batch          sequences, and which of their tokens to learn from
    model          the decoder, with parameters named as in Hugging Face checkpoints
    memory         the regions that parameters, gradients and optimizer state live in
    weights        written straight into tensors of others, or full in buckets of bounded size
    process_group  how the ranks find each other
"""

from .batch import TokenBatch
from .config import TrainerConfig
from .trainer import StepMetrics, Trainer

__all__ = ["StepMetrics", "TokenBatch", "Trainer", "TrainerConfig"]
