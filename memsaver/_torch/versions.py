"""The version of torch, for faults and rules of it that differ."""

from __future__ import annotations

import torch

RELEASE = tuple(int(each) for each in torch.__version__.split(".")[:2])
