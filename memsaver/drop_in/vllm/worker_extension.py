"""A worker extension of vLLM: ``worker_extension_cls="memsaver.drop_in.vllm.worker_extension.WeightReceiver"``."""

from __future__ import annotations

import pickle
from typing import Any

from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.vllm import sources, version
from memsaver.drop_in.vllm.weights import Spec, make_plan


class WeightReceiver:
    """Lets another process on the device write the weights of a vLLM worker.

    Example::

        specs = {name: (tuple(each.shape), "bfloat16") for name, each in trained.items()}
        plans = llm.collective_rpc("memsaver_weight_plan", args=(specs,))
        with attached(plans[rank]) as weights:     # in the trainer, on the device of this rank
            weights.write(trained)
    """

    def memsaver_weight_plan(self, specs: dict[str, Spec]) -> bytes:
        """The plan of this rank, pickled: vLLM's own serialization would make a dict of it.

        Args:
            specs: Shape and dtype of each weight of the checkpoint, by its name there.

        Raises:
            DropInError: The model is quantized, a weight cannot be written in place, or this version of vLLM has other
                modules of layers than memsaver knows.
        """
        worker: Any = self
        sources.check(version(), sources.PROCESSED)
        quantization = worker.model_config.quantization
        if quantization is not None:
            raise DropInError(f"the model is quantized ({quantization}): use vLLM's own load_weights")
        return pickle.dumps(make_plan(worker.get_model(), specs))
