"""SGLang on the drop-in for torch_memory_saver: tensors that were not written before the first forward pass."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memsaver
from memsaver import regions
from memsaver.drop_in import DropInError, tms
from memsaver.drop_in.tms.saver import TorchMemorySaver

# Of SGLang 0.5.17 and 0.5.23, in short: ModelRunner, and SchedulerWeightUpdaterManager (`Scheduler`).
RUNNER = """
import torch

class ModelRunner:
    def __init__(self, saver, model, is_draft_worker=False, draft_model_idx=None):
        self.saver, self.is_draft_worker, self.draft_model_idx = saver, is_draft_worker, draft_model_idx
        self.graph, self.passes = None, 0
        self.load_model(model)

    def load_model(self, model):
        with self.saver.region("weights"):
            self.model = model()
            self.scratch = torch.zeros(1000)  # not of the model: a pass writes it
        with self.saver.region("kv_cache"):
            self.kv_cache = torch.zeros(1000)

    def forward(self, batch):
        self.passes += 1
        if self.graph is not None:  # decode: a replay calls no module
            return self.graph(batch)
        return self.model.forward(batch)  # not self.model(batch)

class Scheduler:
    def __init__(self, saver, model, *drafts):
        self.saver, self.target = saver, ModelRunner(saver, model)
        layers = [None] if len(drafts) == 1 else range(len(drafts))
        self.drafts = [ModelRunner(saver, draft, True, layer) for draft, layer in zip(drafts, layers)]

    def release_memory_occupation(self):
        self.saver.pause("kv_cache")
        self.state = [(name, buffer.detach().clone()) for name, buffer in self.target.model.named_buffers()]
        for tag in ("weights", "cuda_graph"):
            self.saver.pause(tag)

    def resume_memory_occupation(self, tags):
        for tag in tags:
            self.saver.resume(tag)
            if tag == "weights":
                with torch.inference_mode():
                    buffers = dict(self.target.model.named_buffers())
                    for name, tensor in self.state:
                        buffers[name][...] = tensor

    def update_weights_from_tensor(self, weights):
        for runner in [self.target, *self.drafts]:
            runner.model.load_weights(weights)
"""


class Model(torch.nn.Module):
    """A layer with a rotary cache, and a matrix computed from its weight, which is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(40, 30)
        self.layer.register_buffer("cos", torch.ones(50), persistent=False)
        self.w_kc = torch.zeros(30, 40)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
            if "w_kc" in weights:
                self.w_kc.copy_(self.layer.weight)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(batch)
        return found


WEIGHTS = {"layer.weight": torch.full((30, 40), 2.0), "layer.bias": torch.ones(30), "w_kc": torch.empty(0)}
BATCH = torch.ones(3, 40)


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchMemorySaver]:
    memsaver.configure(stale="raise")
    module = types.ModuleType(tms.RUNNER)
    exec(RUNNER, module.__dict__)
    monkeypatch.setitem(sys.modules, tms.RUNNER, module)
    saver = TorchMemorySaver()
    saver.hook_mode = "torch"  # type: ignore[method-assign, assignment]
    yield saver
    memsaver.configure(stale="off")
    gc.collect()  # tracebacks hold models
    for region in regions.all_regions():
        if region.tag.startswith("tms."):
            region.resume()
            region.close()


def scheduler(saver: TorchMemorySaver, *drafts: type[Model]) -> Any:
    return sys.modules[tms.RUNNER].Scheduler(saver, Model, *drafts)


def unwritten(runner: Any) -> set[str]:
    with pytest.raises(memsaver.StaleError) as raised, torch.inference_mode():
        runner.forward(BATCH)
    return {name for name, *_ in raised.value.tensors}


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("missing", ["layer.bias", "w_kc", ""])
def test_the_first_pass_after_a_resume_needs_all_tensors_of_the_models(
    saver: TorchMemorySaver, missing: str, decodes: bool
) -> None:
    engine = scheduler(saver, Model)
    draft = engine.drafts[0].model
    for turn in range(3):  # also before a pass of the draft model
        engine.release_memory_occupation()
        engine.resume_memory_occupation(["cuda_graph", "weights"])
        other = torch.nn.Linear(40, 40)(BATCH)  # modules of other memory, such as the tower of a trainer
        for name in WEIGHTS:  # in buckets
            if name != missing:
                engine.update_weights_from_tensor({name: WEIGHTS[name]})
        engine.resume_memory_occupation(["kv_cache"])
        memsaver.check_written("tms.kv_cache")  # it is written while it is used
        if decodes:
            engine.target.graph = lambda batch: batch
        # SGLang saves and restores the buffers of the target model alone.
        names = {missing, f"draft.{missing}"} if missing else set()
        for _ in range(2):
            assert unwritten(engine.target) == names | {"draft.layer.cos"}
        assert engine.target.passes == turn
        draft.layer.cos.fill_(1)
        if missing:
            assert unwritten(engine.drafts[0]) == names
            engine.update_weights_from_tensor({missing: WEIGHTS[missing]})
        with torch.inference_mode():
            engine.target.forward(other)
            if turn == 1:
                engine.drafts[0].forward(other)


def test_each_of_several_draft_models_has_its_number(saver: TorchMemorySaver) -> None:
    engine = scheduler(saver, Model, Model)
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights", "kv_cache"])
    engine.update_weights_from_tensor(WEIGHTS)
    assert unwritten(engine.target) == {"draft.0.layer.cos", "draft.1.layer.cos"}


@pytest.mark.parametrize("mode", ["off", "check", "warn"])
def test_a_pass_goes_on_unless_the_option_raises(saver: TorchMemorySaver, mode: str) -> None:
    memsaver.configure(stale=mode)
    engine = scheduler(saver)
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights", "kv_cache"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.target.forward(BATCH)
    assert ["layer.weight (4800 of 4800 bytes)" in str(each.message) for each in warned] == [True] * (mode == "warn")
    assert engine.target.passes == 2


def test_a_runner_without_the_methods_is_refused(saver: TorchMemorySaver) -> None:
    del sys.modules[tms.RUNNER].ModelRunner.forward
    with pytest.raises(DropInError, match=r"expected a class with load_model\(\) and forward\(\).*: unset MEMSAVER_ST"):
        saver.pause("weights")
