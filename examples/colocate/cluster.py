"""The Ray cluster of the loop."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import ray


def start_ray(options: argparse.Namespace) -> None:
    """Join the cluster at `--address`, or start a local one with a CPU for each actor."""
    # Without this, Ray hides the GPUs from actors that request no share of a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local: dict[str, Any] = {}
    if options.address is None:
        local = {"num_cpus": max(os.cpu_count() or 1, 2 * options.ranks), "include_dashboard": False}
    ray.init(address=options.address or "local", logging_level=logging.ERROR, **local)
