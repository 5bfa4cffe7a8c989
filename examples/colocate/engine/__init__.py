"""A small paged-decode engine whose memory can be paused; the module `engine` is the place to start reading.

::

    engine           the interface for callers
    engine_config    sizes
    sequence         a request, its sampling options, and its completion
    scheduler        the requests of the next step
    block_manager    the blocks of the KV cache by sequence, and the prefix cache
    model_runner     a step on the device; `batches` are its inputs
    decoder          weights by name, and the forward pass in pieces; `tensor_parallel` over several processes
    ops, attention   operations between matrix products, and sampling, in torch; `kernels`, in Triton
    engine_memory    the regions, and captures of graphs
    prefill_graphs   graphs of the parts of a prefill between attentions
    warm_up          every kind of step once, before the first request
"""

from .engine import Engine
from .engine_config import EngineConfig
from .scheduler import Counts
from .sequence import Completion, SamplingParams

__all__ = ["Completion", "Counts", "Engine", "EngineConfig", "SamplingParams"]
