"""What the server of processes loads last. A collection in a child would copy the pages of all of torch's objects."""

import gc

import torch  # noqa: F401

gc.collect()
gc.freeze()
