"""A small paged-decode engine whose memory can be paused; the module `engine` is the place to start reading.

::

    engine           the interface for callers
    engine_config    sizes
    sequence         a request, its sampling options, and its completion
    scheduler        the requests of the next step
    block_manager    the blocks of the KV cache by sequence, and the prefix cache
    model_runner     a step on the device; `decode_batch` and `prefill_batch` are its inputs
    decoder          weights by name, and the forward pass in pieces; `tensor_parallel` over several processes
    loader           models from a Hugging Face folder
    ops              operations between matrix products; `fused_kernels` are the same in Triton
    attention        over the paged KV cache; `paged_decode_kernel` and `paged_prefill_kernel` are this in Triton
    sampling         the next token and its log-probability; `sampling_kernel` is the same in Triton
    cuda_graphs      captures; `prefill_graphs` are those of the parts of a prefill between attentions
    warm_up          every kind of step once, before the first request
    engine_memory    the regions
"""

from .engine import Counts, Engine
from .engine_config import EngineConfig
from .sequence import Completion, SamplingParams

__all__ = ["Completion", "Counts", "Engine", "EngineConfig", "SamplingParams"]
