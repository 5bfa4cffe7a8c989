"""A small paged-decode engine whose memory can be paused; the module `engine` is the place to start reading.

::

    engine         what callers use
    config         sizes and switches
    sequence       a request, how to sample for it, and its completion
    scheduler      which requests the next step works on
    block_manager  who holds which block of the KV cache, and the prefix cache
    model          the decoder, on fused weights
    attention      the paged KV cache: write, decode, prefill; `paged_kernel` is decode in Triton
    sampler        the next token and its log-probability
    decode_batch   static inputs and outputs of a decode step
    graph_runner   decode steps as CUDA graphs
    memory         the regions all of it lives in
"""

from .config import EngineConfig
from .engine import Engine
from .sequence import Completion, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams"]
