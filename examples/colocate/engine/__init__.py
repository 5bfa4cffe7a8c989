"""A small paged-decode engine whose memory can be paused; the module `engine` is the place to start reading.

::

    engine           what callers use
    config           sizes and switches
    sequence         a request, how to sample for it, and its completion
    scheduler        which requests the next step works on
    block_manager    who holds which block of the KV cache, and the prefix cache
    model            weights by name, and the forward pass in pieces; `decoder` is Qwen3 and Llama, `gpt2` GPT-2
    parallel         tensor parallel over several processes
    checkpoint       models from a Hugging Face folder, or by the name of a shape
    ops              what layers compute between matrix products; `fused_kernels` are the same in Triton
    attention        the paged KV cache: decode and prefill; `paged_kernel` is decode in Triton
    sampler          the next token and its log-probability
    decode_batch     static inputs and outputs of a decode step; `prefill_batch` are a prefill's
    graph_runner     decode steps as CUDA graphs; `prefill_runner` the parts of a prefill between attentions
    graph_pool       captures, and what each cost
    memory           the regions all of it lives in
    verify           graphs against eager steps; `profile` says what a replay spends its time on
    benchmark        how fast it serves: `python -m examples.colocate.engine.benchmark --help`
"""

from .config import EngineConfig
from .engine import Engine
from .sequence import Completion, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams"]
