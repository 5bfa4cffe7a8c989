"""A small paged-decode engine whose memory can be paused; the module `engine` is the place to start reading.

::

    engine           the interface for callers
    config           sizes and switches
    sequence         a request, its sampling options, and its completion
    scheduler        the requests of the next step
    block_manager    the blocks of the KV cache by sequence, and the prefix cache
    model            weights by name, and the forward pass in pieces; `decoder` is Qwen3 and Llama, `gpt2` GPT-2
    parallel         tensor parallel over several processes
    checkpoint       models from a Hugging Face folder, or by the name of a shape
    ops              operations between matrix products; `fused_kernels` are the same in Triton
    attention        the paged KV cache: decode and prefill; `paged_kernel`, `prefill_kernel` are these in Triton
    sampler          the next token and its log-probability
    decode_batch     static inputs and outputs of a decode step; `prefill_batch` are a prefill's
    graph_runner     decode steps as CUDA graphs; `prefill_runner` the parts of a prefill between attentions
    graph_pool       captures, and the cost of each
    warm_up          every kind of step once, before the first request
    memory           the regions of the engine
    verify           graphs against eager steps; `profile` gives the time of a replay by kernel
    benchmark        throughput and latency: `python -m examples.colocate.engine.benchmark --help`
"""

from .config import EngineConfig
from .engine import Engine
from .sequence import Completion, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams"]
