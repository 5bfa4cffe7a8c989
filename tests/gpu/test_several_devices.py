"""Regions on two GPUs of one process access each other's memory as plain tensors do."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.processes import in_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only"),
]


@pytest.mark.parametrize("first", [0, 1])
def test_copies_and_kernels_between_regions_of_two_devices_keep_contents(first: int) -> None:
    in_process(f"copies_between_devices({first})")
