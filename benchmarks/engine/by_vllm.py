"""The same loads by vLLM, with asynchronous scheduling."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator

from benchmarks.engine.loads import Load
from benchmarks.harness.models import MODELS
from benchmarks.harness.processes import Sample


def by_vllm(loads: list[Load]) -> Iterator[Sample]:
    """Completion tokens per second of each load in turn."""
    from vllm import LLM, SamplingParams

    model, batch, length = loads[0].model, max(load.batch for load in loads), max(load.length for load in loads)
    with tempfile.TemporaryDirectory() as directory:
        MODELS[model].write(directory)
        llm = LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", async_scheduling=True,
            gpu_memory_utilization=0.4, max_model_len=length, max_num_seqs=batch, enable_prefix_caching=False,
        )  # fmt: skip
    common = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    try:
        for load in itertools.cycle(loads):
            sampling = [SamplingParams(max_tokens=new_tokens, **common) for new_tokens in load.completions()]
            prompts = [{"prompt_token_ids": tokens} for tokens in load.prompts(MODELS[model].vocab_size)]
            begin = time.perf_counter()
            done = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            yield {"tokens_per_s": sum(len(each.outputs[0].token_ids) for each in done) / seconds}
    finally:
        llm.llm_engine.engine_core.shutdown()  # a process of its own
